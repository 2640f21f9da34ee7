"""One life of an engine's process: a thread starts it, hears it and sees it die."""

from __future__ import annotations

import logging
import math
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from dovetail.core.parallel.channel import Channel, ChannelClosed
from dovetail.core.parallel.failure import StartHung, describe_exit
from dovetail.core.parallel.process import LAST_LOOK_SECONDS, SHOW_STACKS, start_process
from dovetail.core.parallel.worker import order_for
from dovetail.core.serving.protocol import Batch, EngineInfo, Output, Reply

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

_MAIN = "dovetail.core.serving.engine_process:main"
_STOP_SECONDS = 10.0
_RANKS_FIRST_SECONDS = 5.0
"""Longer than they wait themselves: where a rank hangs, the others can say which."""


class Listener(Protocol):
    """Whoever uses the engine. Each is called in the process's own thread, in the order in which it said so."""

    def on_progress(self, process: EngineProcess, phase: str) -> None: ...

    def on_ready(self, process: EngineProcess, info: EngineInfo) -> None: ...

    def on_message(self, process: EngineProcess, message: Batch | Reply) -> None: ...

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
        self._timeout, self._environment, self._adapters = timeout, environment, adapters
        engine = composition.engine
        self._start_timeout = math.inf if engine.start_timeout is None else engine.start_timeout
        if engine.tp * engine.pp > 1:
            self._start_timeout += _RANKS_FIRST_SECONDS
        self._sending = threading.Lock()
        self._commands: zmq.Socket[bytes] | None = None
        self._sent = 0
        """Commands."""
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

    def send(self, command: bytes) -> None:
        """A Command, encoded; from any thread. To a dead process nothing is sent: its death is on the way."""
        with self._sending:
            if self._commands is not None:
                self._commands.send(command)
                self._sent += 1

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
            # mkdtemp's mode is 0700: nobody else can connect.
            with tempfile.TemporaryDirectory(prefix="dovetail-") as folder, zmq.Context() as context:
                cause = self._serve(context, Path(folder))
        except Exception as error:
            log.exception("the thread that listens to the engine failed")
            cause = f"cannot be heard any more: {error!r}"
        finally:
            if self._popen is not None and self._popen.poll() is None:
                self._popen.kill()
                self._popen.wait()
        self._listener.on_death(self, cause)

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> str:
        commands, outputs = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        addresses = {"commands": f"ipc://{folder}/commands", "outputs": f"ipc://{folder}/outputs"}
        try:
            for sock, address in zip((commands, outputs), addresses.values(), strict=True):
                sock.linger = 0
                sock.set_hwm(0)
                sock.bind(address)
            self._popen, self._channel = start_process(_MAIN, environment=self._environment)
            wanted = None if self._adapters is None else dict(self._adapters)
            self._channel.send({**order_for(self._composition), **addresses, "adapters": wanted})
            if self._stopping:
                self._tell_to_stop()
            with self._sending:
                self._commands = commands
            self._listen(outputs, self._channel)
            return self._cause(self._popen)
        finally:
            with self._sending:
                self._commands = None
            commands.close()
            outputs.close()
            if self._channel is not None:
                self._channel.close()

    def _cause(self, popen: subprocess.Popen[bytes]) -> str:
        try:
            status = popen.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            popen.kill()
            status = popen.wait()
        return self._said or describe_exit(status, self._doing)

    def _listen(self, outputs: zmq.Socket[bytes], channel: Channel) -> None:
        """Until the process closes its end."""
        decoder = msgspec.msgpack.Decoder(Output)
        poller = zmq.Poller()
        poller.register(outputs, zmq.POLLIN)
        poller.register(channel.fileno(), zmq.POLLIN)
        tick = max(0.001, min(1.0, self._timeout / 4, self._start_timeout / 4))
        # Only time in which this thread listened counts: all of the server may have been stopped and gone on.
        silent, taken, idle = 0.0, 0, True
        while True:
            sources = poller.poll(int(tick * 1e3))
            if not sources:
                starts = self._doing == "starting"
                silent = 0.0 if idle and taken == self._sent and not starts else silent + tick
                if silent >= (self._start_timeout if starts else self._timeout):
                    self._end_hung(silent)
                    return
            for source, _ in sources:
                silent = 0.0
                if source is outputs:
                    message = decoder.decode(outputs.recv())
                    if isinstance(message, Batch):
                        taken, idle = message.taken, message.idle
                    self._listener.on_message(self, message)
                    continue
                try:
                    self._heard(*channel.recv())
                except ChannelClosed:
                    return

    def _end_hung(self, seconds: float) -> None:
        assert self._popen is not None
        if self._doing == "starting":
            self.hung_at_start = True
            phase = f" in phase {self._phase!r}" if self._phase else ", before any phase"
            self._said = f"hangs: no progress for {seconds:g} s while starting{phase} (engine.start_timeout)"
        else:
            self._said = f"hangs: it had work and said nothing for {seconds:g} s, so it was killed"
        self._popen.send_signal(SHOW_STACKS)
        try:
            self._popen.wait(LAST_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()

    def _heard(self, message: dict[str, Any], raw: bytes) -> None:
        if message["op"] == "ready":
            self._doing = "serving"
            self._listener.on_ready(self, msgspec.convert(message["info"], EngineInfo, str_keys=True))
        elif message["op"] == "error":
            self._said = f"failed: {message['text']}"
            self.hung_at_start = message["type"] == StartHung.__name__
        elif message["op"] == "progress":
            self._phase = message["phase"]
            self._listener.on_progress(self, self._phase)
