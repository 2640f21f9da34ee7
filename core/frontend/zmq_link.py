"""A link: two one-way sockets between one engine's process and one that uses it.

Whoever receives binds, and is bound before the other end connects: so nothing that is sent has to wait, and nobody
tries again to reach an end that is gone.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator

import msgspec
import zmq

from dovetail.core.frontend.messages import Command, EngineStats, Output, Reply, SampleUpdate, StepMessage


class Link:
    """The user's end."""

    def __init__(
        self,
        on_message: Callable[[StepMessage | Reply], None],
        *,
        timeout: float = math.inf,
        start_timeout: float = math.inf,
    ) -> None:
        """`on_message` is called in the thread that listens. `timeout`: seconds without a sign of life, while the
        engine has work, after which it counts as hung; `start_timeout`: the same until the link is open."""
        self._on_message, self._timeout, self._start_timeout = on_message, timeout, start_timeout
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if sys.platform == "linux":
            # A name without a file: nothing is left behind, whatever way the processes end.
            base = f"@dovetail-{secrets.token_hex(16)}"
        else:
            # mkdtemp's mode is 0700: nobody else can connect.
            self._folder = tempfile.TemporaryDirectory(prefix="dovetail-")
            base = self._folder.name
        self.addresses = {"commands": f"ipc://{base}/commands", "outputs": f"ipc://{base}/outputs"}
        """For the engine, which binds the first and connects to the second."""
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._outputs = self._context.socket(zmq.PULL)
        _bind(self._outputs, self.addresses["outputs"])
        self._sending = threading.Lock()
        self._commands: zmq.Socket[bytes] | None = None
        self._sent = 0
        """Commands."""

    def open(self) -> None:
        """The engine has bound its end: commands may be sent."""
        commands = self._context.socket(zmq.PUSH)
        commands.linger = 0
        _connect(commands, self.addresses["commands"])
        with self._sending:
            self._commands = commands

    def send(self, command: bytes) -> None:
        """A Command, encoded; from any thread. Before it is open, and once it is closed, nothing is sent."""
        with self._sending:
            if self._commands is not None:
                _send(self._commands, command)
                self._sent += 1

    def listen(self, fd: int, heard: Callable[[], bool]) -> float:
        """Hand over what the engine says, until `heard`, which is called when there is something to read from `fd`,
        says False. Returns how many seconds the engine was silent where it hangs, else 0."""
        decoder = msgspec.msgpack.Decoder(Output)
        poller = zmq.Poller()
        poller.register(self._outputs, zmq.POLLIN)
        poller.register(fd, zmq.POLLIN)
        tick = max(0.001, min(1.0, self._timeout / 4, self._start_timeout / 4))
        # Only time in which this thread listened counts: all of the server may have been stopped and gone on.
        silent, taken, idle = 0.0, 0, True
        while True:
            sources = poller.poll(int(tick * 1e3))
            if not sources:
                starts = self._commands is None
                silent = 0.0 if idle and taken == self._sent and not starts else silent + tick
                if silent >= (self._start_timeout if starts else self._timeout):
                    return silent
            for source, _ in sources:
                silent = 0.0
                if source is self._outputs:
                    message = decoder.decode(self._outputs.recv())
                    if isinstance(message, StepMessage):
                        taken, idle = message.taken, message.idle
                    self._on_message(message)
                elif not heard():
                    return 0.0

    def close(self) -> None:
        """By the thread that listened."""
        with self._sending:
            commands, self._commands = self._commands, None
        if commands is not None:
            commands.close()
        self._outputs.close()
        self._context.term()
        if self._folder is not None:
            self._folder.cleanup()


class EngineEnd:
    """In the engine's process, where its step loop alone uses it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, commands: str, outputs: str) -> None:
        """The addresses are the other end's."""
        self.commands, self._outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._outputs.linger = 1000
        _bind(self.commands, commands)
        _connect(self._outputs, outputs)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._taken = self._told = 0
        """Commands carried out, and how many of them the other end knows of."""
        self.news: list[SampleUpdate] = []
        """For the next `tell`."""

    def receive(self) -> Iterator[Command]:
        """What has arrived. A command counts as carried out when the next one is asked for."""
        while True:
            try:
                data = self.commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield self._decoder.decode(data)
            self._taken += 1

    @property
    def up_to_date(self) -> bool:
        """The other end knows of every command that was carried out."""
        return self._told == self._taken

    def tell(self, stats: EngineStats | None, *, idle: bool = False) -> None:
        self.send(StepMessage(self.news, stats, self._taken, idle))
        self.news, self._told = [], self._taken

    def send(self, message: Output) -> None:
        _send(self._outputs, self._encoder.encode(message))

    def close(self) -> None:
        self.commands.close(linger=0)
        self._outputs.close(linger=0)


def _bind(sock: zmq.Socket[bytes], address: str) -> None:
    """Other users of this machine are turned away."""
    sock.set_hwm(0)
    if sys.platform == "linux":
        sock.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    sock.bind(address)


def _connect(sock: zmq.Socket[bytes], address: str) -> None:
    """To an end that is bound."""
    sock.set_hwm(0)
    sock.setsockopt(zmq.RECONNECT_IVL, -1)
    sock.connect(address)


def _send(sock: zmq.Socket[bytes], message: bytes) -> None:
    """Never waits. What is sent to an end that is gone goes nowhere: word of that is on its way."""
    try:
        sock.send(message, zmq.NOBLOCK)
    except zmq.Again:
        pass
