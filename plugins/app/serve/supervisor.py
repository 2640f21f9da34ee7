"""Supervisor, for serve.processes > 1: owns the engines and starts the front-end processes. No token passes through it.

Each front-end process listens with a separate socket on the same port (SO_REUSEPORT), and the kernel distributes
connections by a hash of the client's address. With one shared socket, sequential connections would go to the process
that the kernel wakes first, which is nearly always the same one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.core.errors import DovetailError
from dovetail.core.frontend.attached import EngineSharing
from dovetail.core.frontend.fleet import Reports
from dovetail.core.frontend.process_rpc import ProcessRPC
from dovetail.core.frontend.shared_counters import SharedCounters
from dovetail.core.frontend.supervised import Restarts
from dovetail.core.parallel.channel import ChannelClosed
from dovetail.core.parallel.failure import describe_exit
from dovetail.core.parallel.process import end_hung, order_for, start_process
from dovetail.plugins.app.serve import lifecycle
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.http_server import FLUSH_SECONDS, seconds_or_inf
from dovetail.plugins.app.serve.keys import Keys
from dovetail.plugins.app.serve.monitor import Monitor, ProcessReport
from dovetail.plugins.app.serve.watchdog import Watchdog

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_MAIN = "dovetail.plugins.app.serve.front_end_process:main"
_EXIT_SECONDS = 10.0
"""Time limit for a process to exit after its last message."""
_REPORT_SECONDS = 1.0
"""Time limit for all processes to report to the monitor."""


class FrontEndProcess:
    """One front-end process. A thread starts it, receives its messages and waits for its end."""

    def __init__(
        self,
        number: int,
        order: Mapping[str, Any],
        inherited: tuple[int, ...],
        *,
        on_start: Callable[[FrontEndProcess, ProcessRPC], None],
        on_end: Callable[[FrontEndProcess, int, str], None],
    ) -> None:
        """`on_start` and `on_end` are called in the event loop. `on_end` gets the exit status and the cause, a phrase
        that follows the name of the process."""
        self.number = number
        self.rpc: ProcessRPC | None = None
        self.failed = False
        """Whether it reported an error before it ended. Final when `on_end` is called."""
        self._order, self._inherited = order, inherited
        self._on_start, self._on_end = on_start, on_end
        self._loop = asyncio.get_running_loop()
        self._popen: subprocess.Popen[bytes] | None = None
        self._hung = ""
        """Cause of its end if it hangs; otherwise empty."""
        # The child ends with the thread that started it (PR_SET_PDEATHSIG), so this thread lives as long as the child.
        threading.Thread(target=self._run, name=f"dovetail-front-{number}", daemon=True).start()

    def notify(self, op: str) -> None:
        if self.rpc is not None:
            self.rpc.notify(op)

    def kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()

    def hangs(self, seconds: float) -> None:
        """Kill it, since its event loop has been blocked for `seconds`. Callable from any thread."""
        if self._popen is not None and not self._hung:
            self._hung = f"hangs: its event loop has not turned for {seconds:g} s, so it was killed"
            end_hung(self._popen)

    def _run(self) -> None:
        try:
            status, cause = self._live()
        except Exception as error:
            log.exception("the thread that supervises front-end %d failed", self.number)
            status, cause = 1, f"cannot be supervised any more: {error!r}"
        finally:
            if self._popen is not None and self._popen.poll() is None:
                self._popen.kill()
                self._popen.wait()
        self._loop.call_soon_threadsafe(self._on_end, self, status, cause)

    def _live(self) -> tuple[int, str]:
        """Start the process and wait for its end. Returns its exit status and the cause."""
        self._popen, channel = start_process(_MAIN, self._inherited)
        try:
            channel.send(self._order)
            rpc = ProcessRPC(channel, self._loop)
            self._loop.call_soon_threadsafe(self._started, rpc)
            rpc.listen()
            status = self._popen.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            status = self._popen.wait()
        except ChannelClosed:
            return self._popen.wait(_EXIT_SECONDS), "ended before it received its configuration"
        finally:
            channel.close()
        if rpc.exit_reason:
            self.failed = True
            return status, f"failed: {rpc.exit_reason}"
        return status, self._hung or describe_exit(status, "serving")

    def _started(self, rpc: ProcessRPC) -> None:
        self.rpc = rpc
        self._on_start(self, rpc)


class Supervisor:
    """Starts, restarts and stops the front-end processes. Used only in the event loop."""

    def __init__(self, config: ServeConfig, composition: Composition, accepted: Keys, sock: socket.socket) -> None:
        self._config, self._sock = config, sock
        self._counters = SharedCounters(config.processes + 1, composition.engine.dp)
        self._monitor = Monitor()
        reports = Reports(
            stats=self._monitor.stats, restarted=self._monitor.restarted, changed=lambda: self._sharing.publish()
        )
        self._fleet = lifecycle.supervised_fleet(config, composition, reports, self._counters)
        self._sharing = EngineSharing(self._fleet)
        self._order = {
            **order_for(composition),
            "counters": self._counters.fd,
            "address": sock.getsockname(),
            "keys": {digest.hex(): name for digest, name in accepted.hashes.items()},
            "started": int(time.time()),
        }
        self._front_ends: dict[int, FrontEndProcess] = {}
        self._ready: set[int] = set()
        """Numbers of the front-ends that have been ready at least once."""
        self._restarts = Restarts(config.max_restarts)
        self._stopping, self._all_ended = asyncio.Event(), asyncio.Event()
        self._listening = False
        self._error: DovetailError | None = None
        self._status = 0
        self._grace = config.grace

    async def run(self) -> int:
        lifecycle.on_signals(self._config, self._stop)
        self._fleet.start()
        for number in range(1, self._config.processes + 1):
            self._start(number)
        engines, gone = asyncio.ensure_future(self._watch_engines()), threading.Event()
        watchdog = Watchdog(self._counters, seconds_or_inf(self._config.front_end_timeout), self._hangs)
        threading.Thread(target=watchdog.run, args=(gone,), name="dovetail-watchdog", daemon=True).start()
        try:
            await self._stopping.wait()
            await self._stop_front_ends()
        finally:
            engines.cancel()
            gone.set()
            await self._fleet.close()
        if self._error is not None:
            raise self._error
        return self._status or lifecycle.exit_status(self._fleet, self._monitor)

    async def _watch_engines(self) -> None:
        await lifecycle.watch_engines(self._config, self._fleet, self._monitor, lambda: None)
        self._stopping.set()

    # Front-end processes.

    def _start(self, number: int) -> None:
        self._front_ends[number] = FrontEndProcess(
            number,
            {**self._order, "number": number},
            (self._counters.fd,),
            on_start=self._started,
            on_end=self._ended,
        )

    def _started(self, front_end: FrontEndProcess, rpc: ProcessRPC) -> None:
        rpc.handlers |= {
            "listening": self._is_listening,
            "ready": lambda: self._is_ready(front_end.number),
            "seen": lambda seen: self._monitor.merge(msgspec.convert(seen, ProcessReport)),
            "exposition": self._exposition,
            "live": self._monitor.live,
        }
        self._sharing.join(front_end.number, rpc)
        if self._stopping.is_set():
            rpc.notify("stop")

    def _is_listening(self) -> None:
        if not self._listening:
            self._listening = True
            lifecycle.log_listening(self._sock)

    def _is_ready(self, number: int) -> None:
        before = len(self._ready)
        self._ready.add(number)
        if before < len(self._ready) == self._config.processes:
            lifecycle.log_ready(self._fleet)

    def _ended(self, front_end: FrontEndProcess, status: int, cause: str) -> None:
        number = front_end.number
        del self._front_ends[number]
        self._sharing.leave(number)
        if self._stopping.is_set():
            if status and self._error is None:
                log.error("front-end %d %s", number, cause)
            if not self._front_ends:
                self._all_ended.set()
            return
        allowed = self._restarts.died()
        if front_end.failed and number not in self._ready:
            # A front-end that could not start would fail again.
            self._error = DovetailError(f"front-end {number} {cause}")
        elif not allowed:
            log.error("front-end %d %s", number, cause)
            self._status = 1
        else:
            log.error("front-end %d %s; it is started again", number, cause)
            self._start(number)
            return
        self._stopping.set()

    def _hangs(self, number: int, seconds: float) -> None:
        """Called in the watchdog's thread."""
        if (front_end := self._front_ends.get(number)) is not None:
            front_end.hangs(seconds)

    async def _exposition(self, accept: str) -> Any:
        """Return the current metrics, after every process has reported its observations."""
        calls = [asyncio.ensure_future(one.rpc.call("tell_all")) for one in self._front_ends.values() if one.rpc]
        await asyncio.wait(calls, timeout=_REPORT_SECONDS)
        for call in calls:
            call.cancel()
        return msgspec.to_builtins(await self._monitor.exposition(accept))

    # Shutdown.

    def _stop(self, grace: float) -> None:
        if not self._stopping.is_set():
            self._grace = grace
            lifecycle.log_stopping(self._fleet, grace)
            self._stopping.set()
        else:
            self._broadcast("stop")

    def _broadcast(self, op: str) -> None:
        for front_end in self._front_ends.values():
            front_end.notify(op)

    async def _stop_front_ends(self) -> None:
        self._sock.close()
        if not self._front_ends:
            return
        self._broadcast("stop")
        if await self._all_end(self._grace):
            return
        lifecycle.log_unfinished(self._fleet, self._grace)
        self._broadcast("cut_off")
        if await self._all_end(FLUSH_SECONDS + _EXIT_SECONDS):
            return
        for front_end in self._front_ends.values():
            log.warning("front-end %d did not end and is killed", front_end.number)
            front_end.kill()
        await self._all_ended.wait()

    async def _all_end(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._all_ended.wait(), seconds)
        except TimeoutError:
            return False
        return True
