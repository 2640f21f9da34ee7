"""Engines controlled by a test, at the other end of a request table's transport."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import zmq

from dovetail.core.compose import compose
from dovetail.core.frontend.messages import (
    Command,
    EngineStats,
    Reply,
    SampleUpdate,
    StepMessage,
)
from dovetail.core.frontend.request_table import Deliver, Delivery, NewRequest, OpenRequest, RequestTable
from dovetail.core.frontend.zmq_link import EngineEnd, Link
from dovetail.core.interfaces import RequestOptions, SamplingParams
from dovetail.core.parallel.channel import Channel

SECONDS = 60
COMPOSITION = compose(["+preset=tiny_cpu"], app="generate")


class Engine(Protocol):
    """An engine controlled by the test, at the other end of a transport."""

    def received(self) -> Command:
        """Return the next command."""

    def send_step(self, *updates: SampleUpdate, stats: EngineStats | None = None) -> None:
        """Send the message of one step."""

    def reply(self, reply: Reply) -> None: ...


class FakeLocalEngine:
    """Passes messages without encoding, as LocalEngine does."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        table.connect(0, self)

    def send(self, *commands: Command) -> None:
        for command in commands:
            self._commands.put(command)

    def received(self) -> Command:
        return self._commands.get(timeout=SECONDS)

    def send_step(self, *updates: SampleUpdate, stats: EngineStats | None = None) -> None:
        self._table.receive(0, StepMessage(list(updates), stats))

    def reply(self, reply: Reply) -> None:
        self._table.receive(0, reply)


class FakeRemoteEngine:
    """Passes messages over the sockets of a Link, as EngineProcess does."""

    def __init__(self, table: RequestTable, link: Link, end: EngineEnd) -> None:
        self._end = end
        link.open()
        table.connect(0, link)

    def received(self) -> Command:
        assert self._end.commands.poll(SECONDS * 1000)
        return next(self._end.receive())

    def send_step(self, *updates: SampleUpdate, stats: EngineStats | None = None) -> None:
        self._end.updates += updates
        self._end.send_step(stats)

    def reply(self, reply: Reply) -> None:
        self._end.send(reply)


@contextmanager
def linked(table: RequestTable) -> Iterator[FakeRemoteEngine]:
    ours, theirs = socket.socketpair()
    link = Link(partial(table.receive, 0))
    end = EngineEnd(zmq.Context.instance(), **link.addresses)
    listening = threading.Thread(target=link.listen, args=(theirs.fileno(), lambda: False), daemon=True)
    listening.start()
    try:
        yield FakeRemoteEngine(table, link, end)
    finally:
        ours.close()
        listening.join(SECONDS)
        link.close()
        end.close()
        Channel(theirs).close()


@contextmanager
def local(table: RequestTable) -> Iterator[FakeLocalEngine]:
    yield FakeLocalEngine(table)


TRANSPORTS: list[Callable[[RequestTable], AbstractContextManager[Engine]]] = [local, linked]


class Collected:
    """Deliveries of one request."""

    def __init__(self) -> None:
        self.deliveries: queue.SimpleQueue[Delivery] = queue.SimpleQueue()

    def deliver(self, request: OpenRequest, delivery: Delivery) -> None:
        assert request.ended == delivery.last
        self.deliveries.put(delivery)

    def next(self) -> Delivery:
        return self.deliveries.get(timeout=SECONDS)

    @property
    def empty(self) -> bool:
        return self.deliveries.empty()


Front = tuple[RequestTable, Engine]


def submit(
    table: RequestTable, params: SamplingParams | None = None, deliver: Deliver | None = None, **options: Any
) -> tuple[OpenRequest, Collected]:
    collected = Collected()
    (request,) = table.submit(
        NewRequest([1, 2, 3], params or SamplingParams(), RequestOptions(**options), deliver or collected.deliver)
    )
    return request, collected


def load(table: RequestTable) -> tuple[int, int]:
    return table.load(0).samples, table.load(0).prompt_tokens
