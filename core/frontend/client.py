"""EngineClient: one engine of an asyncio front. It follows the engine's state; the table has the requests."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.errors import EngineDown, RequestError, for_clients
from dovetail.core.frontend.messages import EngineInfo, EngineStats, Reply, StepMessage
from dovetail.core.frontend.outputs import Delta, Timing
from dovetail.core.frontend.request_table import Delivery, OpenRequest, RequestTable, Transport
from dovetail.core.tokenizer import FILE, Tokenizer

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "failed", "stopped"]


class Stream:
    """One request's output, for asyncio. Deltas accumulate until `take` fetches them. Used only in the event loop."""

    request: OpenRequest
    """Set by Fleet.submit."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended = False
        """The output is complete, or the request failed."""
        self.latest: dict[int, float] = {}
        """Sample -> time.perf_counter() of its latest tokens."""
        self._loop = loop
        self.error: Exception | None = None
        """Error that ended the request."""
        self._deltas: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def timing(self) -> Timing:
        return self.request.timing

    @property
    def cached(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.request.cached

    @property
    def replica(self) -> int:
        return self.request.replica

    async def take(self) -> list[Delta]:
        """Wait for and return the deltas since the last call; empty = the end. Raises RequestError and EngineDown."""
        while not self._deltas and self.error is None and not self.ended:
            self._waiter = self._loop.create_future()
            await self._waiter
        deltas, self._deltas = self._deltas, []
        if not deltas and self.error is not None:
            raise self.error
        return deltas

    def put(self, deltas: list[Delta], *, last: bool) -> None:
        self._deltas += deltas
        self.ended = last
        self._wake()

    def fail(self, error: Exception) -> None:
        self.ended = True
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient(ABC):
    """Used in one event loop, except the receiving thread's methods. Subclasses implement the start and end."""

    def __init__(
        self,
        replica: int,
        table: RequestTable,
        *,
        name: str = "the engine",
        on_stats: Callable[[EngineStats], None] = lambda stats: None,
        on_inter_token: Callable[[Sequence[float]], None] = lambda seconds: None,
        on_state: Callable[[], None] = lambda: None,
        on_phase: Callable[[], None] = lambda: None,
    ) -> None:
        """`name` begins sentences about the engine. `on_stats` is called a few times a second while the engine works,
        `on_inter_token` with the inter-token latencies of each message, `on_state` after a change of the state, and
        `on_phase` when a starting engine enters another phase."""
        self.replica, self.name, self._table = replica, name, table
        self._on_stats, self._on_inter_token = on_stats, on_inter_token
        self._on_state, self._on_phase = on_state, on_phase
        self.state: State = "stopped"
        self.failure = ""
        """Cause of the engine's latest death, for operators; clients get `for_clients(failure)`."""
        self.phase = ""
        """Phase of a starting engine."""
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._outbox: deque[Any] = deque()
        """A stream, its delivery, the next stream, etc. Filled by the receiving thread, emptied by the event loop.
        Flat, since a tuple for each pair is one more object that the garbage collector visits while output waits."""

    def start(self) -> None:
        """Start the engine without waiting for it."""
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    async def close(self) -> None:
        """Fail open requests and disconnect from the engine. Idempotent."""

    @property
    def samples(self) -> int:
        """Samples that run or wait, over all processes that use the engine."""
        return self._table.load(self.replica).samples

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of requests without output, over all processes that use the engine."""
        return self._table.load(self.replica).prompt_tokens

    @property
    def stats(self) -> EngineStats:
        return self._table.stats(self.replica)

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDown(f"the engine is starting{f' ({self.phase})' if self.phase else ''}")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """Thread-safe."""
        if self._tokenizer is None:
            raise missing_tokenizer(self.info)
        return self._tokenizer

    async def control(self, op: str, **arguments: Any) -> Any:
        """Run an operation of the engine: `check` (the allocator's integrity check, then the counters), `reset_cache`
        (forget cached prefixes), `load_adapter` (name, folder), `unload_adapter` (name). Raises RequestError."""
        if self.state != "ready":
            raise EngineDown(f"{self.name} is {self.state}")
        return await asyncio.wrap_future(self._table.control(self.replica, op, **arguments))

    # In the event loop.

    def _opened(self, transport: Transport, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        self._info, self._tokenizer = info, tokenizer
        self._table.tokenizer = tokenizer
        self._table.connect(self.replica, transport)
        self.state = "ready"
        self._on_state()

    def _lost(self, cause: str) -> None:
        """Handle the death of the engine. `cause` is a phrase that follows the engine's name."""
        self.failure = cause
        self._fail_all(EngineDown(f"{self.name} {for_clients(cause)}", ran=True))

    def _fail_all(self, error: EngineDown) -> None:
        self._table.fail(self.replica, error)
        self._empty_outbox()

    def _empty_outbox(self) -> None:
        now, gaps = time.perf_counter(), []
        while self._outbox:
            stream: Stream = self._outbox.popleft()
            deltas, error, last = self._outbox.popleft()
            if stream.ended:
                continue
            if error is not None:
                stream.fail(error)
                continue
            for delta in deltas:
                if delta.token_ids:
                    if before := stream.latest.get(delta.sample):
                        gaps.append((now - before) / len(delta.token_ids))
                    stream.latest[delta.sample] = now
            stream.put(deltas, last=last)
        if gaps:
            self._on_inter_token(gaps)

    def _on_progress(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._on_phase()

    # In the thread that receives from the engine.

    def deliver(self, stream: Stream, delivery: Delivery) -> None:
        """Pass on a delivery of the table for a request of this engine."""
        self._outbox.extend((stream, delivery))

    def _receive(self, message: StepMessage | Reply) -> None:
        self._table.receive(self.replica, message)
        if isinstance(message, StepMessage) and message.stats is not None:
            self._call_soon(self._on_stats, message.stats)
        if self._outbox:
            # One wake-up of the event loop for all requests of the message.
            self._call_soon(self._empty_outbox)

    def _call_soon(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the event loop is closed: %s is not called", function)


def missing_tokenizer(info: EngineInfo) -> RequestError:
    """Return the refusal of text by a model without a tokenizer."""
    cause = "no checkpoint" if info.checkpoint is None else "no tokenizer.json in its checkpoint"
    return RequestError(
        f"the model {info.model} has {cause} and therefore no tokenizer: give token ids, and stop_token_ids in place "
        "of stop strings"
    )


_reading_tokenizer = threading.Lock()


def tokenizer_of(info: EngineInfo) -> Tokenizer | None:
    """Return the tokenizer of the engine's model, shared by its engines; None = it has none. Blocks while reading."""
    with _reading_tokenizer:
        return None if info.checkpoint is None else _tokenizer(info.checkpoint)


@functools.cache
def _tokenizer(path: str) -> Tokenizer | None:
    checkpoint = open_checkpoint(path)
    return None if checkpoint.text(FILE) is None else Tokenizer(checkpoint)
