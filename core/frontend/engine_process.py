"""EngineProcess: one engine process, with the thread that starts it, receives from it and waits for its end."""

from __future__ import annotations

import logging
import math
import subprocess
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dovetail.core.frontend.lanes import LaneGroup
from dovetail.core.frontend.messages import Command, EngineInfo, Reply, StepMessage
from dovetail.core.frontend.zmq_link import Link
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.failure import StartHung, describe_exit, traceback_of
from dovetail.core.parallel.lanes import LOST
from dovetail.core.parallel.process import end_hung, order_for, start_process

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_MAIN = "dovetail.core.frontend.engine_main:main"
_STOP_SECONDS = 4.0
"""Grace period for the step in flight on `stop`; then the process is killed, so that Ctrl-C ends all within 5 s."""
_RANKS_FIRST_SECONDS = 5.0
"""Added to the time limit, so that ranks that wait for a hung one reach theirs first and report which one it is."""


class ProcessListener(Protocol):
    """User of an engine process. Called in its thread, in the order of events."""

    def on_progress(self, process: EngineProcess, phase: str) -> None: ...

    def on_ready(self, process: EngineProcess, info: EngineInfo) -> None: ...

    def on_message(self, process: EngineProcess, message: StepMessage | Reply) -> None: ...

    def on_death(self, process: EngineProcess, cause: str) -> None:
        """The last call. `cause` is a phrase that follows the engine's name."""


class EngineProcess:
    def __init__(
        self,
        composition: Composition,
        listener: ProcessListener,
        *,
        timeout: float = math.inf,
        environment: Mapping[str, str] | None = None,
        adapters: Mapping[str, str] | None = None,
        again: bool = False,
        lanes: LaneGroup | None = None,
    ) -> None:
        """`timeout`: seconds without a message after which an engine that has work is killed as hung; while it starts,
        the limit is engine.start_timeout. `environment`: None = that of this process. `adapters`: name -> folder of
        the initial adapters; None = those of the composition. `again`: it replaces one that ended. `lanes`: the
        group of its composition's lane, if it has one."""
        self._lanes = lanes
        self._composition, self._listener = composition, listener
        self._environment, self._adapters, self._again = environment, adapters, again
        engine = composition.engine
        start_timeout = math.inf if engine.start_timeout is None else engine.start_timeout
        if engine.tp * engine.pp > 1:
            start_timeout += _RANKS_FIRST_SECONDS
        self._link = Link(
            lambda message: listener.on_message(self, message), timeout=timeout, start_timeout=start_timeout
        )
        self._popen: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._stopping = False
        self._stage = "starting"
        self._failure = ""
        """Why the process ends, if known before its exit."""
        self._phase = ""
        """Phase of the start."""
        self.traceback = ""
        """Traceback of the error that ended the process, for logs; "" = none is known. Final, as `hung_at_start`."""
        self.hung_at_start = False
        """Final when `on_death` is called."""
        # The child ends with the thread that started it (PR_SET_PDEATHSIG), so this thread lives as long as the child.
        self._thread = threading.Thread(target=self._run, name="dovetail-output", daemon=True)

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    def start(self) -> None:
        """Start the process without waiting for it."""
        self._thread.start()

    def send(self, *commands: Command) -> None:
        """Send commands; callable from any thread. Commands to a dead process are dropped; `on_death` reports it."""
        self._link.send(*commands)

    def send_order(self, message: Mapping[str, Any]) -> None:
        """Send an order for the process, which executes it between two steps. Orders to a dead process are dropped."""
        try:
            if self._channel is not None:
                self._channel.send(message)
        except (ChannelClosed, OSError):
            pass  # `on_death` will report it.

    def stop(self) -> None:
        """End the process. Blocks."""
        self._stopping = True
        self._request_stop()
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive() and self._popen is not None:
            log.warning("the engine did not end within %g s and is killed", _STOP_SECONDS)
            self._popen.kill()
            self._thread.join()

    def _request_stop(self) -> None:
        """Order the process to stop. One that is starting reads no orders and is killed."""
        if self._stage == "starting" and self._popen is not None:
            self._popen.kill()
        else:
            self.send_order({"op": "stop"})

    def _run(self) -> None:
        try:
            cause = self._serve()
        except Exception as error:
            cause, self.traceback = f"cannot be reached any more: {error!r}", traceback_of(error)
        finally:
            if self._popen is not None and self._popen.poll() is None:
                self._popen.kill()
                self._popen.wait()
        self._listener.on_death(self, cause)

    def _serve(self) -> str:
        try:
            inherited, lanes = ((), None) if self._lanes is None else self._lanes.access(self._composition)
            self._popen, self._channel = start_process(_MAIN, inherited, self._environment)
            wanted = None if self._adapters is None else dict(self._adapters)
            order = {
                **order_for(self._composition),
                "link": self._link.addresses,
                "adapters": wanted,
                "again": self._again,
                "lanes": lanes,
            }
            self._channel.send(order)
            if self._stopping:
                self._request_stop()
            if silent := self._link.listen(self._channel.fileno(), self._on_control):
                self.end_hung(silent)
            return self._exit_cause(self._popen)
        finally:
            self._link.close()
            if self._channel is not None:
                self._channel.close()

    def _exit_cause(self, popen: subprocess.Popen[bytes]) -> str:
        try:
            status = popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            popen.kill()
            status = popen.wait()
        return self._failure or describe_exit(status, self._stage)

    def end_hung(self, seconds: float) -> None:
        """Log the stacks of a process silent for `seconds`, and kill it, without blocking. Callable from any thread."""
        if self._popen is None or self._failure:
            return
        if self._stage == "starting":
            self.hung_at_start = True
            phase = f" in phase {self._phase!r}" if self._phase else ", before any phase"
            self._failure = f"hangs: no progress for {seconds:g} s while starting{phase} (engine.start_timeout)"
        elif late := [] if self._lanes is None else self._lanes.waits_for(self._composition):
            self._failure = f"{LOST}: it waited {seconds:g} s for replica {', '.join(map(str, late))}"
        else:
            self._failure = f"hangs: it had work and sent nothing for {seconds:g} s, so it was killed"
        end_hung(self._popen)

    def _on_control(self) -> bool:
        """Handle a message on the control channel; False = the channel is closed."""
        assert self._channel is not None
        try:
            message, _ = self._channel.recv()
        except ChannelClosed:
            return False
        if message["op"] == "ready":
            self._stage = "serving"
            self._link.open()
            self._listener.on_ready(self, msgspec.convert(message["info"], EngineInfo, str_keys=True))
        elif message["op"] == "error":
            self._failure, self.traceback = f"failed: {message['text']}", message["traceback"]
            self.hung_at_start = message["type"] == StartHung.__name__
        elif message["op"] == "progress":
            self._phase = message["phase"]
            self._listener.on_progress(self, self._phase)
        return True
