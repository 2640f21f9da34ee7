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
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import zmq

from dovetail.core.frontend.messages import (
    Attach,
    Command,
    Detach,
    EngineStats,
    Output,
    Reply,
    SampleUpdate,
    StepMessage,
    decode_command,
    decode_output,
    encode_command,
    encode_output,
)
from dovetail.core.parallel.channel import Channel

_NAP = 2e-4
"""Seconds between two looks for commands where less than a millisecond, the poller's unit, is left."""


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

    def send(self, *commands: Command) -> None:
        """Send from any thread. Nothing is sent before the link is open, nor once it is closed. Raises RequestError for
        a value that cannot be encoded."""
        encoded = [encode_command(command) for command in commands]
        with self._sending:
            if self._commands is not None:
                for data in encoded:
                    _send(self._commands, data)
                self._sent += len(encoded)

    def listen(self, fd: int, heard: Callable[[], bool]) -> float:
        """Hand over what the engine says, until `heard`, which is called when there is something to read from `fd`,
        says False. Returns how many seconds the engine was silent where it hangs, else 0."""
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
                    message = decode_output(self._outputs.recv())
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
        self._taken = self._told = 0
        """Commands carried out, and how many of them the other end knows of."""
        self.updates: list[SampleUpdate] = []
        """For the next `tell`."""

    def receive(self) -> Iterator[Command]:
        """What has arrived. A command counts as carried out when the next one is asked for."""
        while True:
            try:
                data = self.commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode_command(data)
            self._taken += 1

    @property
    def up_to_date(self) -> bool:
        """The other end knows of every command that was carried out."""
        return self._told == self._taken

    def tell(self, stats: EngineStats | None, *, idle: bool = False) -> None:
        self.send(StepMessage(self.updates, stats, self._taken, idle))
        self.updates, self._told = [], self._taken

    def send(self, message: Output) -> None:
        _send(self._outputs, encode_output(message))

    def close(self) -> None:
        self.commands.close(linger=0)
        self._outputs.close(linger=0)


class ZmqMailbox:
    """Commands of all users, over one link each, and the orders of the process that started this one."""

    delays_launches = True

    def __init__(self, control: Channel, *, commands: str, outputs: str) -> None:
        """The addresses are those of the first link, whose number is 0."""
        self.stopped = False
        self._control = control
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._poller = zmq.Poller()
        self._poller.register(control.fileno(), zmq.POLLIN)
        self._links: dict[int, EngineEnd] = {}
        """By number."""
        self._by_socket: dict[zmq.Socket[bytes], EngineEnd] = {}
        self._attach(0, commands, outputs)

    @property
    def ports(self) -> Collection[EngineEnd]:
        return self._links.values()

    def receive(self, seconds: float | None) -> Iterator[tuple[EngineEnd, Command | Attach | Detach]]:
        for source, _ in self._poll(seconds):
            if source == self._control.fileno():
                yield from self._ordered()
                if self.stopped:
                    return
            elif (link := self._by_socket.get(source)) is not None:
                # None where the link was detached since the poll, with commands unread.
                for command in link.receive():
                    yield link, command

    def _poll(self, seconds: float | None) -> list[tuple[Any, int]]:
        if seconds is not None and 0.0 < seconds < 1e-3:
            time.sleep(_NAP)
            seconds = 0.0
        return self._poller.poll(None if seconds is None else int(seconds * 1e3))

    def _ordered(self) -> Iterator[tuple[EngineEnd, Attach | Detach]]:
        message, _ = self._control.recv()
        match message["op"]:
            case "attach":
                yield self._attach(message["link"], message["commands"], message["outputs"]), Attach()
            case "detach":
                if (link := self._links.pop(message["link"], None)) is not None:
                    self._poller.unregister(link.commands)
                    del self._by_socket[link.commands]
                    yield link, Detach()
                    link.close()
            case "stop":
                self.stopped = True
            case other:
                raise ValueError(f"the engine's process was sent {other!r}")

    def _attach(self, number: int, commands: str, outputs: str) -> EngineEnd:
        link = EngineEnd(self._context, commands=commands, outputs=outputs)
        self._poller.register(link.commands, zmq.POLLIN)
        self._links[number] = self._by_socket[link.commands] = link
        return link

    def close(self) -> None:
        """Close all sockets; what was not sent yet is dropped."""
        self._context.destroy(linger=0)


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
