"""Fleet: engine.dp engines as one, for asyncio. When one of them dies, the others go on."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import EngineDown, for_clients
from dovetail.core.frontend.client import EngineClient, State, Stream
from dovetail.core.frontend.messages import EngineInfo, EngineStats, total
from dovetail.core.frontend.replicas import CheckedRouter
from dovetail.core.frontend.request_table import Delivery, NewRequest, OpenRequest, RequestTable
from dovetail.core.frontend.shared_counters import SharedCounters
from dovetail.core.interfaces import RequestOptions, SamplingParams
from dovetail.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


_PLAIN = RequestOptions()


@dataclass(frozen=True, slots=True)
class Reports:
    """Callbacks of a fleet. They are called in the event loop and must not block."""

    stats: Callable[[int, EngineStats], None] = lambda replica, stats: None
    """Called a few times a second while the replica works."""
    inter_token: Callable[[Sequence[float]], None] = lambda seconds: None
    """Takes inter-token latencies: time since a sample's previous tokens, divided by the number of new ones."""
    restarted: Callable[[int], None] = lambda replica: None
    """Called when a replica that had died is ready again."""
    changed: Callable[[], None] = lambda: None
    """Called after a change of a replica's state, a starting replica's phase or the adapters."""


class Fleet(ABC):
    """Used only in one event loop. Subclasses decide where the engines come from and which process changes them."""

    clients: Sequence[EngineClient]
    """One per replica."""

    def __init__(
        self, composition: Composition, *, counters: SharedCounters | None = None, reports: Reports | None = None
    ) -> None:
        """`counters` are shared with the other processes that use these engines; None = there are none."""
        self.composition = composition
        self.counters = counters or SharedCounters(1, composition.engine.dp)
        self._reports = reports or Reports()
        self._router = CheckedRouter(composition)
        self._table = RequestTable(self._router, counters=self.counters)
        self._closed = self.complete = False
        self.failure = ""
        """Cause of the latest death of a replica; a sentence for operators."""
        self.failed = asyncio.Event()
        """Set when no engine will be restarted."""
        self._all_ready = asyncio.Event()
        self._adapters: dict[str, str] = {}
        """Valid once all replicas were ready."""

    def _client_options(self, replica: int) -> dict[str, Any]:
        """Return the arguments of a replica's EngineClient."""
        return {
            "replica": replica,
            "table": self._table,
            "name": "the engine" if self.composition.engine.dp == 1 else f"replica {replica}",
            "on_stats": lambda stats: self._reports.stats(replica, stats),
            "on_inter_token": self._reports.inter_token,
            "on_state": lambda: self._changed(replica),
            "on_phase": self._reports.changed,
        }

    @abstractmethod
    def _changed(self, replica: int) -> None:
        """Handle a change of the replica's state."""

    @property
    def state(self) -> State:
        """ "starting" until every replica was ready once; from then on "ready" while one is."""
        if self._closed:
            return "stopped"
        if self.failed.is_set():
            return "failed"
        return "ready" if self.complete and self._ready_clients() else "starting"

    @property
    def phase(self) -> str:
        """Phase of the first replica that is starting."""
        return next((client.phase for client in self.clients if client.state == "starting"), "")

    @property
    def samples(self) -> int:
        """Samples that run or wait, over all requests."""
        return sum(client.samples for client in self.clients)

    @property
    def max_seqs(self) -> int:
        """Maximum number of running samples, over the replicas that are ready. Raises EngineDown if none is."""
        self._check_ready()
        return sum(client.info.max_seqs for client in self._ready_clients())

    @property
    def stats(self) -> EngineStats:
        """Sum over all replicas."""
        return total(client.stats for client in self.clients)

    @property
    def info(self) -> EngineInfo:
        """Info of any replica; all are alike."""
        return self._any_client.info

    @property
    def tokenizer(self) -> Tokenizer:
        """Thread-safe."""
        return self._any_client.tokenizer

    @property
    def _any_client(self) -> EngineClient:
        return next(iter(self._ready_clients()), self.clients[0])

    def _ready_clients(self) -> list[EngineClient]:
        return [client for client in self.clients if client.state == "ready"]

    def _check_ready(self) -> None:
        if (state := self.state) != "ready":
            raise EngineDown(f"the engine is {state}{f': {for_clients(self.failure)}' if self.failure else ''}")

    def start(self) -> None:
        """Start the engines without waiting for them; `wait_ready` does."""
        for client in self.clients:
            client.start()

    async def wait_ready(self) -> EngineInfo:
        """Wait until all replicas are ready for the first time. Raises EngineDown if the fleet fails."""
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
        """Abort requests and disconnect from the engines. Idempotent."""
        self._closed = not self.failed.is_set()
        await asyncio.gather(*(client.close() for client in self.clients))

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions = _PLAIN,
        *,
        keep: Collection[str] = (),
    ) -> Stream:
        """Queue a request on the replica that the router chooses. With `options.pooling`, one Delta has the embedding.
        `keep`: special tokens whose text is part of the output. Raises EngineDown and RequestError. If the engine
        refuses the request, the stream raises RequestError."""
        self._check_ready()
        if params.stop:
            _ = self.tokenizer
        stream = Stream(asyncio.get_running_loop())

        def deliver(request: OpenRequest, delivery: Delivery) -> None:
            self.clients[request.replica].deliver(stream, delivery)

        (stream.request,) = self._table.submit(NewRequest(prompt_ids, params, options, deliver, keep))
        return stream

    def abort(self, stream: Stream) -> None:
        """Drop a request. Idempotent; no effect on a complete stream."""
        self._table.abort(stream.request)

    async def control(self, op: str, **arguments: Any) -> list[Any]:
        """Run an operation (EngineClient.control) on ready replicas: answers in order, or the first error raised."""
        ready = [replica for replica, client in enumerate(self.clients) if client.state == "ready"]
        self._check_ready()
        answers = await asyncio.gather(*(self.clients[replica].control(op, **arguments) for replica in ready))
        if op == "reset_cache":
            for replica in ready:
                self._table.forget(replica)
        return list(answers)

    @property
    def adapters(self) -> Mapping[str, str]:
        """Adapters that requests may choose: name -> folder."""
        return self._adapters

    @abstractmethod
    async def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter on every replica, or on none; engines that start later load it too. Raises RequestError."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that use it run to their end. Raises RequestError for an unknown name."""

    def health(self) -> list[Mapping[str, Any]]:
        """Return the state and load of each replica, for monitoring by clients, too."""
        return [
            {
                "state": client.state,
                "phase": client.phase if client.state == "starting" else "",
                "failure": for_clients(client.failure),
                "samples": client.samples,
                "running": client.stats.running,
                "waiting": client.stats.waiting,
                "kv_usage": client.stats.kv_usage,
            }
            for client in self.clients
        ]
