"""serve.processes > 1: this process owns the engines and starts those that answer HTTP. No token passes through it.

Each listens with a socket of its own on the same port, and the kernel spreads connections over them by a hash of the
client's address (SO_REUSEPORT). With one socket for all, connections that come one by one would go to whoever the
kernel wakes first, which is nearly always the same.
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

from dovetail.core.errors import DovetailError, EngineDown
from dovetail.core.frontend.attached import Sharing
from dovetail.core.frontend.fleet import Reports
from dovetail.core.frontend.process_rpc import Peer
from dovetail.core.frontend.shared_counters import Board
from dovetail.core.frontend.supervised import Restarts
from dovetail.core.parallel.channel import ChannelClosed
from dovetail.core.parallel.failure import describe_exit
from dovetail.core.parallel.process import end_hung, order_for, start_process
from dovetail.plugins.app.serve import owner
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.front import LAST_WORDS_SECONDS, limit
from dovetail.plugins.app.serve.keys import Keys
from dovetail.plugins.app.serve.monitor import Monitor, Seen
from dovetail.plugins.app.serve.watch import Watch

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_MAIN = "dovetail.plugins.app.serve.front_end:main"
_END_SECONDS = 10.0
"""For a process to end once it has said its last words."""
_TELL_SECONDS = 1.0
"""For all processes to say what they have seen."""


class FrontEnd:
    """One life of a process that answers HTTP: a thread starts it, hears it and sees it die."""

    def __init__(
        self,
        number: int,
        order: Mapping[str, Any],
        inherited: tuple[int, ...],
        *,
        on_start: Callable[[FrontEnd, Peer], None],
        on_end: Callable[[FrontEnd, int, str], None],
    ) -> None:
        """`on_start`, `on_end` (exit status; cause, which ends a sentence) are called in the event loop."""
        self.number = number
        self.peer: Peer | None = None
        self.failed = False
        """It said why it ended. Final when `on_end` is called."""
        self._order, self._inherited = order, inherited
        self._on_start, self._on_end = on_start, on_end
        self._loop = asyncio.get_running_loop()
        self._popen: subprocess.Popen[bytes] | None = None
        self._hung = ""
        """What is said of its end where it hangs."""
        # Linux ends a child with the thread that started it: this one lives as long as the process.
        threading.Thread(target=self._run, name=f"dovetail-front-{number}", daemon=True).start()

    def tell(self, op: str) -> None:
        if self.peer is not None:
            self.peer.tell(op)

    def kill(self) -> None:
        if self._popen is not None:
            self._popen.kill()

    def hangs(self, seconds: float) -> None:
        """Its event loop has not turned for so long: it is killed. From any thread."""
        if self._popen is not None and not self._hung:
            self._hung = f"hangs: its event loop has not turned for {seconds:g} s, so it was killed"
            end_hung(self._popen)

    def _run(self) -> None:
        try:
            status, cause = self._live()
        except Exception as error:
            log.exception("the thread that listens to front-end %d failed", self.number)
            status, cause = 1, f"cannot be heard any more: {error!r}"
        finally:
            if self._popen is not None and self._popen.poll() is None:
                self._popen.kill()
                self._popen.wait()
        self._loop.call_soon_threadsafe(self._on_end, self, status, cause)

    def _live(self) -> tuple[int, str]:
        """Until it is gone: its exit status, and why."""
        self._popen, channel = start_process(_MAIN, self._inherited)
        try:
            channel.send(self._order)
            peer = Peer(channel, self._loop)
            self._loop.call_soon_threadsafe(self._started, peer)
            peer.listen()
            status = self._popen.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            status = self._popen.wait()
        except ChannelClosed:
            return self._popen.wait(_END_SECONDS), "ended before it was told what to do"
        finally:
            channel.close()
        if peer.last_words:
            self.failed = True
            return status, f"failed: {peer.last_words}"
        return status, self._hung or describe_exit(status, "serving")

    def _started(self, peer: Peer) -> None:
        self.peer = peer
        self._on_start(self, peer)


class Supervisor:
    """Belongs to the event loop."""

    def __init__(self, config: ServeConfig, composition: Composition, accepted: Keys, sock: socket.socket) -> None:
        self._config, self._sock = config, sock
        self._board = Board(config.processes + 1, composition.engine.dp)
        self._monitor = Monitor()
        reports = Reports(
            stats=self._monitor.stats,
            restarted=self._monitor.restarted,
            changed=lambda: self._sharing.publish(),
        )
        self._fleet = owner.owned_fleet(config, composition, reports, self._board)
        self._sharing = Sharing(self._fleet)
        self._order = {
            **order_for(composition),
            "board": self._board.fd,
            "address": sock.getsockname(),
            "keys": {digest.hex(): name for digest, name in accepted.hashes.items()},
            "started": int(time.time()),
        }
        self._front_ends: dict[int, FrontEnd] = {}
        self._ready: set[int] = set()
        """Numbers of front-ends that have been ready."""
        self._restarts = Restarts(config.max_restarts)
        self._over, self._alone = asyncio.Event(), asyncio.Event()
        self._listening = self._was_ready = False
        self._error: DovetailError | None = None
        self._status = 0
        self._grace = config.grace

    async def run(self) -> int:
        owner.on_signals(self._config, self._stop)
        self._fleet.start()
        for number in range(1, self._config.processes + 1):
            self._start(number)
        engines, gone = asyncio.ensure_future(self._watch_engines()), threading.Event()
        watch = Watch(self._board, limit(self._config.front_end_timeout), self._hangs)
        threading.Thread(target=watch.run, args=(gone,), name="dovetail-watch", daemon=True).start()
        try:
            await self._over.wait()
            await self._end_front_ends()
        finally:
            engines.cancel()
            gone.set()
            await self._fleet.close()
        if self._error is not None:
            raise self._error
        return self._status or owner.exit_status(self._fleet, self._was_ready)

    async def _watch_engines(self) -> None:
        try:
            info = await self._fleet.wait_ready()
        except EngineDown:
            pass
        else:
            self._was_ready = True
            names = self._config.model_names or (info.model,)
            self._monitor.engine_ready(names[0], len(self._fleet.clients))
            await self._fleet.failed.wait()
        self._over.set()

    # The processes that answer.

    def _start(self, number: int) -> None:
        self._front_ends[number] = FrontEnd(
            number,
            {**self._order, "number": number},
            (self._board.fd,),
            on_start=self._started,
            on_end=self._ended,
        )

    def _started(self, front_end: FrontEnd, peer: Peer) -> None:
        peer.handlers |= {
            "listening": self._is_listening,
            "ready": lambda: self._is_ready(front_end.number),
            "seen": lambda seen: self._monitor.saw(msgspec.convert(seen, Seen)),
            "exposition": self._exposition,
            "live": self._monitor.live,
        }
        self._sharing.join(front_end.number, peer)
        if self._over.is_set():
            peer.tell("stop")

    def _is_listening(self) -> None:
        if not self._listening:
            self._listening = True
            owner.tell_listening(self._sock)

    def _is_ready(self, number: int) -> None:
        before = len(self._ready)
        self._ready.add(number)
        if before < len(self._ready) == self._config.processes:
            owner.tell_ready(self._fleet)

    def _ended(self, front_end: FrontEnd, status: int, cause: str) -> None:
        number = front_end.number
        del self._front_ends[number]
        self._sharing.leave(number)
        if self._over.is_set():
            if status and self._error is None:
                log.error("front-end %d %s", number, cause)
            if not self._front_ends:
                self._alone.set()
            return
        allowed = self._restarts.died()
        if front_end.failed and number not in self._ready:
            # What could not start will not start next time either.
            self._error = DovetailError(f"front-end {number} {cause}")
        elif not allowed:
            log.error("front-end %d %s", number, cause)
            self._status = 1
        else:
            log.error("front-end %d %s; it is started again", number, cause)
            self._start(number)
            return
        self._over.set()

    def _hangs(self, number: int, seconds: float) -> None:
        """In the thread that watches."""
        if (front_end := self._front_ends.get(number)) is not None:
            front_end.hangs(seconds)

    async def _exposition(self, accept: str) -> Any:
        """Of now: every process first tells what it has seen."""
        asks = [asyncio.ensure_future(one.peer.ask("tell_all")) for one in self._front_ends.values() if one.peer]
        await asyncio.wait(asks, timeout=_TELL_SECONDS)
        for ask in asks:
            ask.cancel()
        return msgspec.to_builtins(await self._monitor.exposition(accept))

    # The end.

    def _stop(self, grace: float) -> None:
        if not self._over.is_set():
            self._grace = grace
            owner.tell_stopping(self._fleet, grace)
            self._over.set()
        else:
            self._tell_all("stop")

    def _tell_all(self, op: str) -> None:
        for front_end in self._front_ends.values():
            front_end.tell(op)

    async def _end_front_ends(self) -> None:
        self._sock.close()
        if not self._front_ends:
            return
        self._tell_all("stop")
        if await self._all_end(self._grace):
            return
        owner.tell_late(self._fleet, self._grace)
        self._tell_all("cut_off")
        if await self._all_end(LAST_WORDS_SECONDS + _END_SECONDS):
            return
        for front_end in self._front_ends.values():
            log.warning("front-end %d did not end and is killed", front_end.number)
            front_end.kill()
        await self._alone.wait()

    async def _all_end(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._alone.wait(), seconds)
        except TimeoutError:
            return False
        return True
