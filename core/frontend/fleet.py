"""Fleet: engine.dp engines behind one front door, for asyncio. One of them may die while the others go on."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import EngineDown
from dovetail.core.frontend.client import EngineClient, State, Stream
from dovetail.core.frontend.messages import EngineInfo, EngineStats, total
from dovetail.core.frontend.outputs import Delta
from dovetail.core.frontend.replicas import CheckedRouter
from dovetail.core.frontend.request_table import NewRequest, OpenRequest, RequestTable
from dovetail.core.frontend.shared_counters import Board
from dovetail.core.interfaces import RequestOptions, SamplingParams
from dovetail.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


_PLAIN = RequestOptions()


@dataclass(frozen=True, slots=True)
class Reports:
    """Whom a fleet tells what. Called in the event loop: be quick."""

    stats: Callable[[int, EngineStats], None] = lambda replica, stats: None
    """A few times a second while that replica works."""
    more: Callable[[Sequence[float]], None] = lambda seconds: None
    """Of samples that got tokens, not for the first time: time since those before, divided by their number."""
    restarted: Callable[[int], None] = lambda replica: None
    """A replica that had died is ready again."""
    changed: Callable[[], None] = lambda: None
    """A replica's state, what a starting one does, or the adapters."""


class Fleet(ABC):
    """Belongs to one event loop; every method is called there. Who derives from it knows where the engines come from,
    and who changes them."""

    clients: Sequence[EngineClient]
    """Of each replica."""

    def __init__(self, composition: Composition, *, board: Board | None = None, reports: Reports | None = None) -> None:
        """`board`: what other processes that use these engines know of one another; None where there is no other."""
        self.composition = composition
        self.board = board or Board(1, composition.engine.dp)
        self._reports = reports or Reports()
        self._router = CheckedRouter(composition)
        self._table = RequestTable(self._router, board=self.board)
        self._closed = self.complete = False
        self.failure = ""
        """Why the last replica that died did; a sentence."""
        self.failed = asyncio.Event()
        """Set when no engine will come back."""
        self._all_ready = asyncio.Event()
        self._adapters: dict[str, str] = {}
        """Since all replicas were ready once."""

    def _client_options(self, replica: int) -> dict[str, Any]:
        """Of that replica's EngineClient."""
        return {
            "replica": replica,
            "table": self._table,
            "name": "the engine" if self.composition.engine.dp == 1 else f"replica {replica}",
            "on_stats": lambda stats: self._reports.stats(replica, stats),
            "on_more": self._reports.more,
            "on_state": lambda: self._changed(replica),
            "on_phase": self._reports.changed,
        }

    @abstractmethod
    def _changed(self, replica: int) -> None:
        """Its state."""

    # What it is.

    @property
    def state(self) -> State:
        """Starting until every replica was ready once; from then on ready while one is."""
        if self._closed:
            return "stopped"
        if self.failed.is_set():
            return "failed"
        return "ready" if self.complete and self._open() else "starting"

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
        """Abort what runs, and have no more to do with the engines. Idempotent."""
        self._closed = not self.failed.is_set()
        await asyncio.gather(*(client.close() for client in self.clients))

    # Requests.

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions = _PLAIN,
        *,
        keep: Collection[str] = (),
    ) -> Stream:
        """Queue a request on the replica that the router chooses. With `options.pooling` one Delta brings the
        embedding. keep: special tokens whose text is part of the output.

        Raises EngineDown and RequestError; a refusal by the engine comes out of the stream as RequestError."""
        self._check_ready()
        if params.stop:
            _ = self.tokenizer
        stream = Stream(asyncio.get_running_loop())

        def deliver(request: OpenRequest, deltas: list[Delta], error: Exception | None) -> None:
            self.clients[request.replica].deliver(stream, request, deltas, error)

        (stream.request,) = self._table.submit(NewRequest(prompt_ids, params, options, deliver, keep))
        return stream

    def abort(self, stream: Stream) -> None:
        """Drop a request. Idempotent; a complete stream is left alone."""
        self._table.abort(stream.request)

    async def control(self, op: str, **arguments: Any) -> list[Any]:
        """`check`: the allocator's own integrity check, then the counters. `reset_cache`: forget cached prefixes. The
        answer of each replica that is ready, in their order; the first error is raised."""
        ready = [replica for replica, client in enumerate(self.clients) if client.state == "ready"]
        self._check_ready()
        answers = await asyncio.gather(*(self.clients[replica].control(op, **arguments) for replica in ready))
        if op == "reset_cache":
            for replica in ready:
                self._router.forget(replica)
        return list(answers)

    # Adapters.

    @property
    def adapters(self) -> Mapping[str, str]:
        """Those that requests may choose: name -> folder."""
        return self._adapters

    @abstractmethod
    async def load_adapter(self, name: str, folder: str) -> None:
        """On every replica, or on none: raises RequestError. Engines that start later have it, too."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Requests that have it run to their end. RequestError for an unknown name."""

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
