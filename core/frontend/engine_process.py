"""One life of an engine's process: a thread starts it, hears it and sees it die."""

from __future__ import annotations

import logging
import math
import subprocess
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dovetail.core.frontend.messages import Command, EngineInfo, Reply, StepMessage
from dovetail.core.frontend.zmq_link import Link
from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.failure import StartHung, describe_exit
from dovetail.core.parallel.process import end_hung, order_for, start_process

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_MAIN = "dovetail.core.frontend.engine_main:main"
_STOP_SECONDS = 4.0
"""A step that does not end by then hangs: Ctrl-C ends everything within 5 s."""
_RANKS_FIRST_SECONDS = 5.0
"""Longer than they wait themselves: where a rank hangs, the others can say which."""


class Listener(Protocol):
    """Whoever uses the engine. Each is called in the process's own thread, in the order in which it said so."""

    def on_progress(self, process: EngineProcess, phase: str) -> None: ...

    def on_ready(self, process: EngineProcess, info: EngineInfo) -> None: ...

    def on_message(self, process: EngineProcess, message: StepMessage | Reply) -> None: ...

    def on_death(self, process: EngineProcess, cause: str) -> None:
        """The last call. `cause` ends a sentence that begins with the engine."""


class EngineProcess:
    def __init__(
        self,
        composition: Composition,
        listener: Listener,
        *,
        timeout: float = math.inf,
        environment: Mapping[str, str] | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        """adapters: name -> folder of those to begin with, in place of what the composition says.
        timeout: seconds without a sign of life, while it has work, after which it counts as hung and is killed; while
        it starts, that is engine.start_timeout.
        environment: of the process; that of this one by default."""
        self._composition, self._listener = composition, listener
        self._environment, self._adapters = environment, adapters
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
        self._doing = "starting"
        self._said = ""
        """Its last words."""
        self._phase = ""
        """Of starting."""
        self.hung_at_start = False
        """Final when `on_death` is called."""
        # Linux ends a child with the thread that started it: this one lives as long as the process.
        self._thread = threading.Thread(target=self._run, name="dovetail-output", daemon=True)

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    def start(self) -> None:
        """Returns at once."""
        self._thread.start()

    def send(self, *commands: Command) -> None:
        """Send from any thread. Nothing is sent to a dead process, whose death `on_death` reports."""
        self._link.send(*commands)

    def order(self, message: Mapping[str, Any]) -> None:
        """To the engine's process itself, which carries it out between two steps. To a dead one nothing is said."""
        try:
            if self._channel is not None:
                self._channel.send(message)
        except (ChannelClosed, OSError):
            pass  # Its death is on the way.

    def stop(self) -> None:
        """Blocks until the process is gone."""
        self._stopping = True
        self._tell_to_stop()
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive() and self._popen is not None:
            log.warning("the engine did not end within %g s and is killed", _STOP_SECONDS)
            self._popen.kill()
            self._thread.join()

    def _tell_to_stop(self) -> None:
        """Who still loads cannot hear, and has nothing to finish: it is killed."""
        try:
            if self._doing == "starting" and self._popen is not None:
                self._popen.kill()
            elif self._channel is not None:
                self._channel.send({"op": "stop"})
        except (ChannelClosed, OSError):
            pass  # It is dead already.

    def _run(self) -> None:
        try:
            cause = self._serve()
        except Exception as error:
            log.exception("the thread that listens to the engine failed")
            cause = f"cannot be heard any more: {error!r}"
        finally:
            if self._popen is not None and self._popen.poll() is None:
                self._popen.kill()
                self._popen.wait()
        self._listener.on_death(self, cause)

    def _serve(self) -> str:
        try:
            self._popen, self._channel = start_process(_MAIN, environment=self._environment)
            wanted = None if self._adapters is None else dict(self._adapters)
            order = {**order_for(self._composition), "link": self._link.addresses, "adapters": wanted}
            self._channel.send(order)
            if self._stopping:
                self._tell_to_stop()
            if silent := self._link.listen(self._channel.fileno(), self._heard):
                self.end_hung(silent)
            return self._cause(self._popen)
        finally:
            self._link.close()
            if self._channel is not None:
                self._channel.close()

    def _cause(self, popen: subprocess.Popen[bytes]) -> str:
        try:
            status = popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            popen.kill()
            status = popen.wait()
        return self._said or describe_exit(status, self._doing)

    def end_hung(self, seconds: float) -> None:
        """It was silent for so long: it says where it is, and is killed. From any thread, and at once."""
        if self._popen is None or self._said:
            return
        if self._doing == "starting":
            self.hung_at_start = True
            phase = f" in phase {self._phase!r}" if self._phase else ", before any phase"
            self._said = f"hangs: no progress for {seconds:g} s while starting{phase} (engine.start_timeout)"
        else:
            self._said = f"hangs: it had work and said nothing for {seconds:g} s, so it was killed"
        end_hung(self._popen)

    def _heard(self) -> bool:
        """Something on the channel; False: its end."""
        assert self._channel is not None
        try:
            message, _ = self._channel.recv()
        except ChannelClosed:
            return False
        if message["op"] == "ready":
            self._doing = "serving"
            self._link.open()
            self._listener.on_ready(self, msgspec.convert(message["info"], EngineInfo, str_keys=True))
        elif message["op"] == "error":
            self._said = f"failed: {message['text']}"
            self.hung_at_start = message["type"] == StartHung.__name__
        elif message["op"] == "progress":
            self._phase = message["phase"]
            self._listener.on_progress(self, self._phase)
        return True
