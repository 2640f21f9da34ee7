"""Fleet: engine.dp engines behind one front door, for asyncio. One of them may die while the others go on."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import RequestError
from dovetail.core.interfaces import ReplicaLoad, SamplingParams
from dovetail.core.serving.client import EngineClient, EngineDown, State, Stream
from dovetail.core.serving.protocol import EngineInfo, EngineStats, total
from dovetail.core.serving.replicas import FrontDoor, arrival_of, replica_compositions, replica_environment
from dovetail.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


@dataclass(frozen=True, slots=True)
class Reports:
    """Whom a fleet tells what. Called in the event loop: be quick."""

    stats: Callable[[int, EngineStats], None] = lambda replica, stats: None
    """A few times a second while that replica works."""
    more: Callable[[Sequence[float]], None] = lambda seconds: None
    """Of samples that got tokens, not for the first time: time since those before, divided by their number."""
    restarted: Callable[[int], None] = lambda replica: None
    """A replica that had died is ready again."""


class Fleet:
    """Belongs to one event loop; every method is called there."""

    def __init__(
        self,
        composition: Composition,
        *,
        max_restarts: int = 0,
        timeout: float = math.inf,
        reports: Reports | None = None,
    ) -> None:
        """`max_restarts` within an hour and `timeout` are those of each replica: see `EngineClient`. One that fails for
        good leaves its work to the others; with max_restarts=0, or before all were ready once, or when it was the last,
        the fleet has failed with it."""
        self.composition, self._max_restarts = composition, max_restarts
        self._reports = reports or Reports()
        self._door = FrontDoor(composition)
        self._closed = self._complete = False
        self.failure = ""
        """Why the last replica that died did; a sentence."""
        self.failed = asyncio.Event()
        """Set when no engine will come back."""
        self._all_ready = asyncio.Event()
        self._adapters: dict[str, str] | None = None
        """Since all replicas were ready once."""
        self._adapting = asyncio.Lock()
        compositions, ids = replica_compositions(composition), itertools.count()
        self.clients = [
            EngineClient(
                one,
                name="the engine" if len(compositions) == 1 else f"replica {replica}",
                ids=ids,
                max_restarts=max_restarts,
                timeout=timeout,
                on_stats=lambda stats, replica=replica: self._reports.stats(replica, stats),  # type: ignore[misc]
                on_more=self._reports.more,
                on_state=lambda replica=replica: self._changed(replica),  # type: ignore[misc]
                adapters=lambda: self._adapters,
                environment=replica_environment(composition),
            )
            for replica, one in enumerate(compositions)
        ]

    # What it is.

    @property
    def state(self) -> State:
        """Starting until every replica was ready once; from then on ready while one is."""
        if self._closed:
            return "stopped"
        if self.failed.is_set():
            return "failed"
        return "ready" if self._complete and self._open() else "starting"

    @property
    def phase(self) -> str:
        """What a starting replica is doing."""
        return next((client.phase for client in self.clients if client.state == "starting"), "")

    @property
    def samples(self) -> int:
        """That run or wait, over all requests."""
        return sum(client.samples for client in self.clients)

    @property
    def max_seqs(self) -> int:
        """Samples that run at once at most, on the replicas that are ready. Raises EngineDown where none is."""
        self._check_ready()
        return sum(client.info.max_seqs for client in self._open())

    @property
    def stats(self) -> EngineStats:
        """Over all replicas."""
        return total(client.stats for client in self.clients)

    @property
    def info(self) -> EngineInfo:
        """Of any replica: they are alike."""
        return self._any.info

    @property
    def tokenizer(self) -> Tokenizer:
        """Thread-safe."""
        return self._any.tokenizer

    @property
    def _any(self) -> EngineClient:
        return next(iter(self._open()), self.clients[0])

    def _open(self) -> list[EngineClient]:
        return [client for client in self.clients if client.state == "ready"]

    def _check_ready(self) -> None:
        if (state := self.state) != "ready":
            raise EngineDown(f"the engine is {state}{f': {self.failure}' if self.failure else ''}")

    # Its life.

    def start(self) -> None:
        """Returns at once; `wait_ready` waits for the engines."""
        for client in self.clients:
            client.start()

    async def wait_ready(self) -> EngineInfo:
        """Until all replicas are ready for the first time. Raises EngineDown when the fleet has failed."""
        waits = [asyncio.ensure_future(event.wait()) for event in (self._all_ready, self.failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.failed.is_set():
            raise EngineDown(self.failure)
        return self.info

    async def close(self) -> None:
        """Abort what runs and end the engines' processes. Idempotent."""
        self._closed = not self.failed.is_set()
        await asyncio.gather(*(client.close() for client in self.clients))

    def _changed(self, replica: int) -> None:
        client = self.clients[replica]
        if client.state == "ready":
            if self._all_ready.is_set():
                self._reports.restarted(replica)
            elif all(one.state == "ready" for one in self.clients):
                self._complete = True
                self._adapters = dict(self.info.adapters)
                self._all_ready.set()
        elif client.state != "stopped":
            self.failure = f"{client.name} {client.failure}"
            self._door.forget(replica)
            alive = any(one.state in ("ready", "starting") for one in self.clients)
            if client.state == "failed" and not (alive and self._complete and self._max_restarts):
                self.failed.set()

    # Requests.

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, **request: Any) -> Stream:
        """As `EngineClient.submit`, to the replica that the router chooses."""
        self._check_ready()
        loads = [
            ReplicaLoad(replica, client.samples, client.prompt_tokens, client.stats.kv_usage)
            for replica, client in enumerate(self.clients)
            if client.state == "ready"
        ]
        replica = self._door.choose(arrival_of(prompt_ids, params.n, **request), loads)
        stream = self.clients[replica].submit(prompt_ids, params, **request)
        stream.replica = replica
        return stream

    def abort(self, stream: Stream) -> None:
        """Idempotent; a complete stream is left alone."""
        self.clients[stream.replica].abort(stream)

    async def control(self, op: str, **arguments: Any) -> list[Any]:
        """`check`: the allocator's own integrity check, then the counters. `reset_cache`: forget cached prefixes. The
        answer of each replica that is ready, in their order; the first error is raised."""
        ready = [replica for replica, client in enumerate(self.clients) if client.state == "ready"]
        self._check_ready()
        answers = await asyncio.gather(*(self.clients[replica].control(op, **arguments) for replica in ready))
        if op == "reset_cache":
            for replica in ready:
                self._door.forget(replica)
        return list(answers)

    # Adapters.

    @property
    def adapters(self) -> Mapping[str, str]:
        """Those that requests may choose: name -> folder."""
        return self._adapters or {}

    async def load_adapter(self, name: str, folder: str) -> None:
        """On every replica, or on none: raises RequestError. Engines that start later have it, too."""
        async with self._adapting:
            self._check_settled()
            loads = [client.control("load_adapter", name=name, folder=folder) for client in self._open()]
            answers = await asyncio.gather(*loads, return_exceptions=True)
            failed = [answer for answer in answers if isinstance(answer, BaseException)]
            if failed:
                if len(failed) < len(answers):
                    await self._unload(name)
                raise failed[0]
            assert self._adapters is not None
            self._adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        """Requests that have it run to their end. RequestError for an unknown name."""
        async with self._adapting:
            self._check_settled()
            assert self._adapters is not None
            if name not in self._adapters:
                raise RequestError(
                    f"adapter: {name!r} is not loaded; there is {', '.join(self._adapters) or 'none'}", status=404
                )
            del self._adapters[name]
            await self._unload(name)

    def _check_settled(self) -> None:
        """An engine that starts has been told already what to begin with."""
        self._check_ready()
        for client in self.clients:
            if client.state == "starting":
                raise EngineDown(f"{client.name} is starting: adapters can be loaded and unloaded when it is ready")

    async def _unload(self, name: str) -> None:
        """Where it is."""
        unloads = [client.control("unload_adapter", name=name) for client in self._open()]
        await asyncio.gather(*unloads, return_exceptions=True)

    def health(self) -> list[Mapping[str, Any]]:
        """Of each replica, for people and their programs."""
        return [
            {
                "state": client.state,
                "phase": client.phase if client.state == "starting" else "",
                "failure": client.failure,
                "samples": client.samples,
                "running": client.stats.running,
                "waiting": client.stats.waiting,
                "kv_usage": client.stats.kv_usage,
            }
            for client in self.clients
        ]
