"""Engines that several processes use: their owner, and those that it lends them to.

    owner: OwnedFleet, Sharing          ─ Peer ─    AttachedFleet: a process that uses the engines
           starts, restarts, adapters               requests, text
                 │ child                                  │ Link, one to each engine
                 └──────────────── engine ────────────────┘

Requests and tokens go over the links alone. What the owner says is the whole state of its engines, each time anything
of it has changed.
"""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.core.errors import EngineDown
from dovetail.core.frontend.client import EngineClient, State, tokenizer_of
from dovetail.core.frontend.fleet import Fleet, Reports
from dovetail.core.frontend.messages import EngineInfo, Reply, StepMessage
from dovetail.core.frontend.process_rpc import Peer
from dovetail.core.frontend.shared_counters import Board
from dovetail.core.frontend.supervised import OwnedFleet
from dovetail.core.frontend.zmq_link import Link
from dovetail.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


class EngineState(msgspec.Struct):
    """Of one replica."""

    state: State
    phase: str
    failure: str
    life: int
    """Which of the processes that its owner started."""
    info: EngineInfo | None
    """Of one that is ready."""


class FleetState(msgspec.Struct):
    complete: bool
    """All replicas were ready once."""
    failure: str
    adapters: dict[str, str]
    replicas: list[EngineState]


class Sharing:
    """Lends a fleet's engines to other processes. Each has a number, which is its place on the fleet's board and the
    number of its links; 0 is the owner's. Belongs to the event loop."""

    def __init__(self, fleet: OwnedFleet) -> None:
        self._fleet = fleet
        self._users: dict[int, Peer] = {}

    def join(self, number: int, user: Peer) -> None:
        user.handlers |= {
            "attach": lambda replica, life, **link: self._fleet.clients[replica].attach(number, life, link),
            "hangs": lambda replica, life, seconds: self._fleet.clients[replica].hangs(life, seconds),
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
        }
        self._users[number] = user
        user.tell("engines", state=self._state())

    def leave(self, number: int) -> None:
        """It is gone: its requests are aborted."""
        if self._users.pop(number, None) is not None:
            for client in self._fleet.clients:
                client.detach(number)
            self._fleet.board.clear(number)

    def publish(self) -> None:
        """Something of the fleet has changed."""
        for user in self._users.values():
            user.tell("engines", state=self._state())

    async def _load_adapter(self, name: str, folder: str) -> None:
        await self._fleet.load_adapter(name, folder)
        await self._all_know()

    async def _unload_adapter(self, name: str) -> None:
        await self._fleet.unload_adapter(name)
        await self._all_know()

    async def _all_know(self) -> None:
        """Waits until every process has the state of now, or is gone."""
        asks = [user.ask("engines", state=self._state()) for user in self._users.values()]
        await asyncio.gather(*asks, return_exceptions=True)

    def _state(self) -> Any:
        fleet = self._fleet
        replicas = [
            EngineState(
                client.state,
                client.phase,
                client.failure,
                client.life,
                client.info if client.state == "ready" else None,
            )
            for client in fleet.clients
        ]
        return msgspec.to_builtins(FleetState(fleet.complete, fleet.failure, dict(fleet.adapters), replicas))


class AttachedFleet(Fleet):
    """Of a process that does not own the engines."""

    def __init__(
        self, composition: Composition, owner: Peer, board: Board, *, timeout: float = math.inf, reports: Reports
    ) -> None:
        """`timeout`: as OwnedEngine's."""
        super().__init__(composition, board=board, reports=reports)
        self._owner = owner
        owner.handlers["engines"] = self._told
        self.clients: list[AttachedEngine] = [
            AttachedEngine(owner, timeout=timeout, **self._client_options(replica))
            for replica in range(composition.engine.dp)
        ]

    def _told(self, state: Any) -> None:
        found = msgspec.convert(state, FleetState, str_keys=True)
        self.complete, self.failure, self._adapters = found.complete, found.failure, found.adapters
        for client, one in zip(self.clients, found.replicas, strict=True):
            client.told(one)

    def _changed(self, replica: int) -> None:
        if self.clients[replica].state != "ready":
            self._router.forget(replica)
        elif self.state == "ready":
            self._all_ready.set()

    async def load_adapter(self, name: str, folder: str) -> None:
        """As the owner's; when it returns, every process knows."""
        await self._owner.ask("load_adapter", name=name, folder=folder)

    async def unload_adapter(self, name: str) -> None:
        await self._owner.ask("unload_adapter", name=name)


class AttachedEngine(EngineClient):
    """An engine that another process owns. Its state is what the owner says, but that it is ready only once the link
    is open."""

    def __init__(self, owner: Peer, *, timeout: float, **client: Any) -> None:
        super().__init__(**client)
        self._owner, self._timeout = owner, timeout
        self._joint: _Joint | None = None

    def start(self) -> None:
        super().start()
        self.state = "starting"

    async def close(self) -> None:
        self.state = "stopped"
        self._fail_all(EngineDown("the server stops"))
        if (joint := self._joint) is not None:
            self._joint = None
            await asyncio.to_thread(joint.end)

    def told(self, found: EngineState) -> None:
        """By the owner."""
        if self.state == "stopped":
            return
        self.phase = found.phase
        joint, before = self._joint, self.state
        if joint is not None and (found.state, found.life) != ("ready", joint.life):
            # The thread ends by itself.
            joint.let_go()
            self._joint, self.state = None, "starting"
            self._lost(found.failure or "is gone")
        if found.info is None:
            self.state, self.failure = found.state, found.failure
        elif self._joint is None:
            self._joint = _Joint(self, found.info, found.life, self._timeout)
            self._owner.tell("attach", replica=self.replica, life=found.life, **self._joint.link.addresses)
        if self.state != before:
            self._on_state()

    def joined(self, joint: _Joint, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        if joint is self._joint:
            self._opened(joint.link, info, tokenizer)

    def hangs(self, joint: _Joint, seconds: float) -> None:
        if joint is self._joint:
            self._owner.tell("hangs", replica=self.replica, life=joint.life, seconds=seconds)


class _Joint:
    """A link to one life of an engine, and the thread that listens to it."""

    def __init__(self, engine: AttachedEngine, info: EngineInfo, life: int, timeout: float) -> None:
        self._engine, self._info, self.life = engine, info, life
        self.link = Link(self._hear, timeout=timeout)
        self._open = False
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="dovetail-output", daemon=True)
        self._thread.start()

    def let_go(self) -> None:
        self._ours.close()

    def end(self) -> None:
        """Blocks until the thread is done."""
        self.let_go()
        self._thread.join()

    def _run(self) -> None:
        with self._theirs:
            if silent := self.link.listen(self._theirs.fileno(), lambda: False):
                self._engine._call(self._engine.hangs, self, silent)
                self._theirs.recv(1)
            self.link.close()

    def _hear(self, message: StepMessage | Reply) -> None:
        if not self._open:
            # The first word says that the engine has bound its end.
            self._open = True
            self.link.open()
            self._engine._call(self._engine.joined, self, self._info, tokenizer_of(self._info))
        self._engine._receive(message)
