"""The step loop of an engine's process: one thread that takes commands, runs steps and sends what they brought."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import zmq

from dovetail.core.engine.engine import Engine
from dovetail.core.parallel.channel import Channel
from dovetail.core.serving.link import EngineEnd
from dovetail.core.serving.operations import answer, engine_stats, perform
from dovetail.core.serving.protocol import Abort, Add, Command, Control, Finish
from dovetail.core.serving.requests import Requests

_STATS_SECONDS = 0.25
_MOMENT = 0.02
"""Seconds that an idle loop sleeps while adapters are being read."""
_NAP = 2e-4
"""Seconds between two looks for commands where less than a millisecond, the poller's unit, is left."""


class StepLoop:
    """Takes commands between two steps; sends what each step brought as one message to each link that it concerns."""

    def __init__(self, engine: Engine, control: Channel, link: Mapping[str, str]) -> None:
        """`link`: the addresses of the first, whose number is 0."""
        self._engine, self._control = engine, control
        self._requests = Requests(engine)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._poller = zmq.Poller()
        self._poller.register(control.fileno(), zmq.POLLIN)
        self._links: dict[int, EngineEnd] = {}
        """By number."""
        self._by_socket: dict[zmq.Socket[bytes], EngineEnd] = {}
        self._stats_due = 0.0
        self._loading: list[tuple[EngineEnd, int, Future[None]]] = []
        """Commands that are answered when this is done."""
        self._attach(0, **link)

    def run(self) -> None:
        """Until the process that started this one says stop."""
        engine, requests = self._engine, self._requests
        while self._take_commands():
            if engine.has_work:
                for event in engine.step():
                    requests.note(event)
            self._publish()

    def _take_commands(self) -> bool:
        """Carry out what arrived; sleeps while the engine has nothing to do, or nothing yet (Engine.spare). False =
        stop."""
        idle = not self._engine.has_work
        if idle and (self._stats_due or not all(link.up_to_date for link in self._links.values())):
            # The last word before silence, so that gauges do not stay where they were.
            stats, self._stats_due = engine_stats(self._engine), 0.0
            for one in self._links.values():
                one.tell(stats, idle=True)
        patience = (_MOMENT if self._loading else None) if idle else 0.0
        while True:
            for source, _ in self._poll(patience):
                if source == self._control.fileno():
                    if not self._ordered():
                        return False
                elif (link := self._by_socket.get(source)) is not None:
                    # None where it was detached since the poll, with commands unread.
                    for command in link.receive():
                        self._obey(link, command)
            if self._loading:
                self._answer_loaded()
            patience = self._engine.spare()
            if not patience:
                return True

    def _poll(self, patience: float | None) -> list[tuple[Any, int]]:
        """Whoever has said something, after at most so many seconds; None = whenever somebody has."""
        if patience is not None and 0.0 < patience < 1e-3:
            time.sleep(_NAP)
            patience = 0.0
        return self._poller.poll(None if patience is None else int(patience * 1e3))

    def _obey(self, link: EngineEnd, command: Command) -> None:
        match command:
            case Add():
                self._requests.add(link, command)
            case Abort():
                self._requests.abort(command.id)
            case Finish():
                self._requests.finish(command)
            case Control():
                reply = perform(self._engine, command)
                if isinstance(reply.value, Future):
                    self._loading.append((link, command.id, reply.value))
                else:
                    link.send(reply)

    def _answer_loaded(self) -> None:
        done = [entry for entry in self._loading if entry[2].done()]
        self._loading = [entry for entry in self._loading if entry not in done]
        for link, id, future in done:
            link.send(answer(id, future.result))

    def _publish(self) -> None:
        now = time.perf_counter()
        stats = None
        if now >= self._stats_due:
            # Without news, too: a long prompt has none for many steps, and silence would look like death.
            stats, self._stats_due = engine_stats(self._engine), now + _STATS_SECONDS
        for link in self._links.values():
            if stats is not None or link.news:
                link.tell(stats)

    # Links.

    def _ordered(self) -> bool:
        """What the process that started this one says; False = stop."""
        message, _ = self._control.recv()
        match message["op"]:
            case "attach":
                link = self._attach(message["link"], message["commands"], message["outputs"])
                # The first word says that commands may come.
                link.tell(engine_stats(self._engine), idle=not self._engine.has_work)
            case "detach":
                self._detach(message["link"])
            case "stop":
                return False
            case other:
                raise ValueError(f"the engine's process was sent {other!r}")
        return True

    def _attach(self, number: int, commands: str, outputs: str) -> EngineEnd:
        link = EngineEnd(self._context, commands=commands, outputs=outputs)
        self._poller.register(link.commands, zmq.POLLIN)
        self._links[number] = self._by_socket[link.commands] = link
        return link

    def _detach(self, number: int) -> None:
        """Its other end is gone."""
        link = self._links.pop(number, None)
        if link is None:
            return
        self._requests.abort_all(link)
        self._loading = [entry for entry in self._loading if entry[0] is not link]
        self._poller.unregister(link.commands)
        del self._by_socket[link.commands]
        link.close()
