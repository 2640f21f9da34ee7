"""Link: two one-way sockets between an engine process and a process that uses it. The receiver binds before the sender
connects, so sends never block, and there is no reconnecting to a dead end."""

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
from dovetail.core.parallel.lanes import Lanes

_NAP = 2e-4
"""Seconds between polls if less than a millisecond, the unit of zmq's poll, is left."""


class Link:
    """The user's end of a link."""

    def __init__(
        self,
        on_message: Callable[[StepMessage | Reply], None],
        *,
        timeout: float = math.inf,
        start_timeout: float = math.inf,
    ) -> None:
        """`on_message` is called in the thread in `listen`. `timeout`: seconds without a message after which an engine
        that has work counts as hung; `start_timeout`: the same until the link is open."""
        self._on_message, self._timeout, self._start_timeout = on_message, timeout, start_timeout
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if sys.platform == "linux":
            # An abstract address has no file, so nothing is left behind however the processes end.
            base = f"@dovetail-{secrets.token_hex(16)}"
        else:
            # The folder's mode is 0700, so other users cannot connect.
            self._folder = tempfile.TemporaryDirectory(prefix="dovetail-")
            base = self._folder.name
        self.addresses = {"commands": f"ipc://{base}/commands", "outputs": f"ipc://{base}/outputs"}
        """The engine binds the first and connects to the second."""
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._outputs = self._context.socket(zmq.PULL)
        _bind(self._outputs, self.addresses["outputs"])
        self._sending = threading.RLock()
        """Reentrant for the reason of RequestTable's lock."""
        self._commands: zmq.Socket[bytes] | None = None
        self._sent = 0
        """Number of commands."""

    def open(self) -> None:
        """Allow commands, once the engine has bound its end."""
        commands = self._context.socket(zmq.PUSH)
        commands.linger = 0
        _connect(commands, self.addresses["commands"])
        with self._sending:
            self._commands = commands

    def send(self, *commands: Command) -> None:
        """Send, from any thread; dropped unless the link is open. Raises RequestError for unencodable values."""
        encoded = [encode_command(command) for command in commands]
        with self._sending:
            if self._commands is not None:
                for data in encoded:
                    _send(self._commands, data)
                self._sent += len(encoded)

    def listen(self, fd: int, on_readable: Callable[[], bool]) -> float:
        """Receive messages until `on_readable`, which is called when `fd` is readable, returns False; then return 0. If
        the engine hangs, return the seconds since its last message."""
        poller = zmq.Poller()
        poller.register(self._outputs, zmq.POLLIN)
        poller.register(fd, zmq.POLLIN)
        tick = max(0.001, min(1.0, self._timeout / 4, self._start_timeout / 4))
        # Only time spent polling counts: the whole server may have been suspended and resumed.
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
                elif not on_readable():
                    return 0.0

    def close(self) -> None:
        """Close the sockets. Called by the thread that was in `listen`."""
        with self._sending:
            commands, self._commands = self._commands, None
        if commands is not None:
            commands.close()
        self._outputs.close()
        self._context.term()
        if self._folder is not None:
            self._folder.cleanup()


class EngineEnd:
    """The engine's end of a link. Only the engine loop uses it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, commands: str, outputs: str) -> None:
        """`commands` and `outputs`: Link.addresses of the other end."""
        self.commands, self._outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._outputs.linger = 1000
        _bind(self.commands, commands)
        _connect(self._outputs, outputs)
        self._taken = self._reported = 0
        """Commands executed, and the count of them that was last sent."""
        self.updates: list[SampleUpdate] = []

    def receive(self) -> Iterator[Command]:
        """Yield the commands that have arrived. A command counts as executed when the next one is requested."""
        while True:
            try:
                data = self.commands.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode_command(data)
            self._taken += 1

    @property
    def up_to_date(self) -> bool:
        return self._reported == self._taken

    def send_step(self, stats: EngineStats | None, *, idle: bool = False) -> None:
        self.send(StepMessage(self.updates, stats, self._taken, idle))
        self.updates, self._reported = [], self._taken

    def send(self, message: Output) -> None:
        _send(self._outputs, encode_output(message))

    def close(self) -> None:
        self.commands.close(linger=0)
        self._outputs.close(linger=0)


class ZmqCommands:
    """CommandSource with one link per user, and the orders of the process that started this one."""

    delays_launches = True

    def __init__(self, control: Channel, *, commands: str, outputs: str, lanes: Lanes | None = None) -> None:
        """`commands` and `outputs`: addresses of the first link, which has the number 0. `lanes`: other lanes, which
        end a wait for commands when they have work."""
        self.stopped = False
        self._control = control
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._poller = zmq.Poller()
        self._poller.register(control.fileno(), zmq.POLLIN)
        self._lanes = lanes
        if lanes is not None:
            self._poller.register(lanes.alarm, zmq.POLLIN)
        self._links: dict[int, EngineEnd] = {}
        """Number -> link."""
        self._by_socket: dict[zmq.Socket[bytes], EngineEnd] = {}
        self._attach(0, commands, outputs)

    @property
    def ports(self) -> Collection[EngineEnd]:
        return self._links.values()

    def receive(self, seconds: float | None) -> Iterator[tuple[EngineEnd, Command | Attach | Detach]]:
        for source, _ in self._poll(seconds):
            if source == self._control.fileno():
                yield from self._take_order()
                if self.stopped:
                    return
            elif self._lanes is not None and source == self._lanes.alarm:
                self._lanes.silence()
            elif (link := self._by_socket.get(source)) is not None:
                # None if an order detached the link after the poll.
                for command in link.receive():
                    yield link, command

    def _poll(self, seconds: float | None) -> list[tuple[Any, int]]:
        if seconds is not None and 0.0 < seconds < 1e-3:
            time.sleep(_NAP)
            seconds = 0.0
        return self._poller.poll(None if seconds is None else int(seconds * 1e3))

    def _take_order(self) -> Iterator[tuple[EngineEnd, Attach | Detach]]:
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
                raise ValueError(f"the engine process has no operation {other!r}")

    def _attach(self, number: int, commands: str, outputs: str) -> EngineEnd:
        link = EngineEnd(self._context, commands=commands, outputs=outputs)
        self._poller.register(link.commands, zmq.POLLIN)
        self._links[number] = self._by_socket[link.commands] = link
        return link

    def close(self) -> None:
        """Close all sockets; unsent messages are dropped."""
        self._context.destroy(linger=0)


def _bind(sock: zmq.Socket[bytes], address: str) -> None:
    """Bind an address to which only the same user of the machine can connect."""
    sock.set_hwm(0)
    if sys.platform == "linux":
        sock.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
    sock.bind(address)


def _connect(sock: zmq.Socket[bytes], address: str) -> None:
    """Connect to a bound address, without reconnecting later."""
    sock.set_hwm(0)
    sock.setsockopt(zmq.RECONNECT_IVL, -1)
    sock.connect(address)


def _send(sock: zmq.Socket[bytes], message: bytes) -> None:
    """Send without blocking. Messages to a dead end are dropped; its death is noticed elsewhere."""
    try:
        sock.send(message, zmq.NOBLOCK)
    except zmq.Again:
        pass
