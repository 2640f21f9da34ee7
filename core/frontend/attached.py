"""Engines that several processes use: their owner shares them, and other processes attach to them.

    owner: SupervisedFleet, EngineSharing ─ ProcessRPC ─ AttachedFleet: a process that uses the engines
           starts, restarts, adapters                    requests, text
                 │ child                                       │ Link, one per engine
                 └───────────────── engine ────────────────────┘

Requests and tokens pass only over the links. The owner sends the whole state of its engines after every change.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from dovetail.core.errors import EngineDown
from dovetail.core.frontend.client import EngineClient, State, tokenizer_of
from dovetail.core.frontend.fleet import Fleet, Reports
from dovetail.core.frontend.messages import EngineInfo, Reply, StepMessage
from dovetail.core.frontend.process_rpc import ProcessRPC
from dovetail.core.frontend.shared_counters import SharedCounters
from dovetail.core.frontend.supervised import SupervisedFleet
from dovetail.core.frontend.zmq_link import Link
from dovetail.core.parallel.failure import for_user
from dovetail.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)


class EngineState(msgspec.Struct):
    """State of one replica."""

    state: State
    phase: str
    failure: str
    incarnation: int
    """See SupervisedEngine."""
    info: EngineInfo | None
    """None = the replica is not ready."""


class FleetState(msgspec.Struct):
    complete: bool
    """All replicas were ready once."""
    failure: str
    adapters: dict[str, str]
    replicas: list[EngineState]


class EngineSharing:
    """Shares a fleet's engines with other processes. The number of a process is its row in the shared counters and the
    number of its links; 0 is the owner. Used only in the event loop."""

    def __init__(self, fleet: SupervisedFleet) -> None:
        self._fleet = fleet
        self._users: dict[int, ProcessRPC] = {}

    def join(self, number: int, user: ProcessRPC) -> None:
        clients = self._fleet.clients
        user.handlers |= {
            "detach": lambda replica: clients[replica].detach(number),
            "attach": lambda replica, incarnation, **link: clients[replica].attach(number, incarnation, link),
            "hangs": lambda replica, incarnation, seconds: clients[replica].end_hung(incarnation, seconds),
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
        }
        self._users[number] = user
        user.notify("engines", state=self._state())

    def leave(self, number: int) -> None:
        """Abort the requests of a process that has ended."""
        if self._users.pop(number, None) is not None:
            for client in self._fleet.clients:
                client.detach(number)
            self._fleet.counters.clear(number)

    def publish(self) -> None:
        """Send the state of the fleet, which has changed, to all processes."""
        for user in self._users.values():
            user.notify("engines", state=self._state())

    async def _load_adapter(self, name: str, folder: str) -> None:
        await self._fleet.load_adapter(name, folder)
        await self._synchronize()

    async def _unload_adapter(self, name: str) -> None:
        await self._fleet.unload_adapter(name)
        await self._synchronize()

    async def _synchronize(self) -> None:
        """Wait until every process has the current state or has ended."""
        calls = [user.call("engines", state=self._state()) for user in self._users.values()]
        await asyncio.gather(*calls, return_exceptions=True)

    def _state(self) -> Any:
        fleet = self._fleet
        replicas = [
            EngineState(
                client.state,
                client.phase,
                client.failure,
                client.incarnation,
                client.info if client.state == "ready" else None,
            )
            for client in fleet.clients
        ]
        return msgspec.to_builtins(FleetState(fleet.complete, fleet.failure, dict(fleet.adapters), replicas))


class AttachedFleet(Fleet):
    """Fleet of a process that does not own the engines."""

    def __init__(
        self,
        composition: Composition,
        owner: ProcessRPC,
        counters: SharedCounters,
        *,
        timeout: float = math.inf,
        reports: Reports,
    ) -> None:
        """`timeout`: see SupervisedEngine."""
        super().__init__(composition, counters=counters, reports=reports)
        self._owner = owner
        owner.handlers["engines"] = self._update
        self.clients: list[AttachedEngine] = [
            AttachedEngine(owner, timeout=timeout, **self._client_options(replica))
            for replica in range(composition.engine.dp)
        ]

    def _update(self, state: Any) -> None:
        found = msgspec.convert(state, FleetState, str_keys=True)
        self.complete, self.failure, self._adapters = found.complete, found.failure, found.adapters
        for client, one in zip(self.clients, found.replicas, strict=True):
            client.update(one)

    def _changed(self, replica: int) -> None:
        if self.clients[replica].state != "ready":
            self._table.forget(replica)
        elif self.state == "ready":
            self._all_ready.set()

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter through the owner. On return, requests of every process can choose it."""
        await self._owner.call("load_adapter", name=name, folder=folder)

    async def unload_adapter(self, name: str) -> None:
        await self._owner.call("unload_adapter", name=name)


class AttachedEngine(EngineClient):
    """Client of another process's engine. It follows the owner's state, but is ready only once its link is open."""

    def __init__(self, owner: ProcessRPC, *, timeout: float, **client: Any) -> None:
        super().__init__(**client)
        self._owner, self._timeout = owner, timeout
        self._link: _AttachedLink | None = None

    def start(self) -> None:
        super().start()
        self.state = "starting"

    async def close(self) -> None:
        self.state = "stopped"
        self._fail_all(EngineDown("the server stops", ran=True))
        if (link := self._link) is not None:
            self._link = None
            await asyncio.to_thread(link.close)

    def update(self, found: EngineState) -> None:
        """Follow the state of the engine at its owner."""
        if self.state == "stopped":
            return
        self.phase = found.phase
        link, before = self._link, self.state
        if link is not None and (found.state, found.incarnation) != ("ready", link.incarnation):
            link.release()
            self._link, self.state = None, "starting"
            self._lost(found.failure or "is gone")
        if found.info is None:
            self.state, self.failure = found.state, found.failure
        elif self._link is None:
            self._attach(found.info, found.incarnation)
        if self.state != before:
            self._on_state()

    def _attach(self, info: EngineInfo, incarnation: int) -> None:
        link = self._link = _AttachedLink(self, info, incarnation, self._timeout)
        self._owner.notify("attach", replica=self.replica, incarnation=incarnation, **link.link.addresses)

    def link_failed(self, link: _AttachedLink, error: Exception) -> None:
        """Fail this process's requests to the engine, whose output was lost. A link that has worked is replaced; one
        that could not be opened would fail again."""
        if link is not self._link:
            return
        log.error("%s cannot be reached any more by this process", self.name, exc_info=error)
        self._link, worked = None, self.state == "ready"
        self.state = "starting" if worked else "failed"
        self._lost(f"cannot be reached any more: {for_user(error)}")
        self._owner.notify("detach", replica=self.replica)
        if worked:
            self._attach(link.info, link.incarnation)
        self._on_state()

    def link_opened(self, link: _AttachedLink, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        if link is self._link:
            self._opened(link.link, info, tokenizer)

    def report_hang(self, link: _AttachedLink, seconds: float) -> None:
        if link is self._link:
            self._owner.notify("hangs", replica=self.replica, incarnation=link.incarnation, seconds=seconds)


class _AttachedLink:
    """Link to one incarnation of an engine, with the thread that receives from it."""

    def __init__(self, engine: AttachedEngine, info: EngineInfo, incarnation: int, timeout: float) -> None:
        self._engine, self.info, self.incarnation = engine, info, incarnation
        self.link = Link(self._receive, timeout=timeout)
        self._open = False
        self._released, self._release_seen = socket.socketpair()
        """The thread ends when the first socket is closed."""
        self._thread = threading.Thread(target=self._run, name="dovetail-output", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Let the thread end, which closes the link."""
        self._released.close()

    def close(self) -> None:
        """Release the link. Blocks until the thread has ended."""
        self.release()
        self._thread.join()

    def _run(self) -> None:
        with self._release_seen:
            try:
                if silent := self.link.listen(self._release_seen.fileno(), lambda: False):
                    self._engine._call_soon(self._engine.report_hang, self, silent)
                    self._release_seen.recv(1)
            except Exception as error:
                self._engine._call_soon(self._engine.link_failed, self, error)
            finally:
                self.link.close()

    def _receive(self, message: StepMessage | Reply) -> None:
        if not self._open:
            # The engine sends its first message once its end is bound.
            self._open = True
            self.link.open()
            self._engine._call_soon(self._engine.link_opened, self, self.info, tokenizer_of(self.info))
        self._engine._receive(message)
