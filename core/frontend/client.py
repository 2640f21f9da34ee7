"""EngineClient: one engine behind an asyncio front. It follows the engine's life; requests are the table's."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from dovetail.core.errors import EngineDown, RequestError
from dovetail.core.frontend.messages import EngineInfo, EngineStats, Reply, StepMessage
from dovetail.core.frontend.outputs import Delta, Timing
from dovetail.core.frontend.request_table import OpenRequest, RequestTable, Transport
from dovetail.core.tokenizer import Tokenizer

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "failed", "stopped"]

Delivery = tuple["Stream", list[Delta], Exception | None, bool]
"""What one message brought for a stream: deltas, the error that ended it, and whether it is complete."""


class Stream:
    """One request's output, for asyncio. Deltas gather until one `take` fetches them all. Belongs to the event loop."""

    request: OpenRequest
    """Set by whoever submits the request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended = False
        """All output has come, or the request failed or was aborted."""
        self.latest: dict[int, float] = {}
        """Sample -> time.perf_counter() when it got tokens last."""
        self._loop = loop
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
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
        """Return what came since the last call; wait if that is nothing. An empty list means that the output is
        complete. Raises RequestError and EngineDown."""
        while not self._deltas and self._error is None and not self.ended:
            self._waiter = self._loop.create_future()
            await self._waiter
        deltas, self._deltas = self._deltas, []
        if not deltas and self._error is not None:
            raise self._error
        return deltas

    def put(self, deltas: list[Delta], *, last: bool) -> None:
        self._deltas += deltas
        self.ended = last
        self._wake()

    def fail(self, error: Exception) -> None:
        self.ended = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient(ABC):
    """Belongs to one event loop, where every method is called except those of the thread that receives from the engine.
    Subclasses know how the engine starts and ends."""

    def __init__(
        self,
        replica: int,
        table: RequestTable,
        *,
        name: str = "the engine",
        on_stats: Callable[[EngineStats], None] = lambda stats: None,
        on_more: Callable[[Sequence[float]], None] = lambda seconds: None,
        on_state: Callable[[], None] = lambda: None,
        on_phase: Callable[[], None] = lambda: None,
    ) -> None:
        """`name` begins sentences about the engine. `on_stats` is called a few times a second while the engine works,
        `on_more` with the times between tokens of samples that got some, except for their first; `on_state` when the
        state has changed, `on_phase` when a starting engine enters another phase."""
        self.replica, self.name, self._table = replica, name, table
        self._on_stats, self._on_more, self._on_state, self._on_phase = on_stats, on_more, on_state, on_phase
        self.state: State = "stopped"
        self.failure = ""
        """Why the engine died last."""
        self.phase = ""
        """What a starting engine is doing."""
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._outbox: deque[Delivery] = deque()
        """Filled by the thread that receives, emptied in the event loop."""

    def start(self) -> None:
        """Returns at once."""
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    async def close(self) -> None:
        """Fail what runs and let go of the engine. Idempotent."""

    @property
    def samples(self) -> int:
        """Number of samples that run or wait, over all requests of all processes that use the engine."""
        return self._table.load(self.replica).samples

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens of requests without output, likewise."""
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
            raise RequestError(f"the model {self.info.model} has no tokenizer: give token ids, and no stop strings")
        return self._tokenizer

    async def control(self, op: str, **arguments: Any) -> Any:
        """Run an operation of the engine: `check` (the allocator's integrity check, then the counters), `reset_cache`
        (forget cached prefixes), `load_adapter` (name, folder), `unload_adapter` (name). Raises RequestError."""
        if self.state != "ready":
            raise EngineDown(f"{self.name} is {self.state}")
        answer: asyncio.Future[Any] = self._loop.create_future()
        asked = self._table.control(self.replica, op, **arguments)
        asked.add_done_callback(lambda done: self._call(_answer, answer, done))
        return await answer

    # In the event loop.

    def _opened(self, transport: Transport, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        self._info, self._tokenizer = info, tokenizer
        self._table.tokenizer = tokenizer
        self._table.connect(self.replica, transport)
        self.state = "ready"
        self._on_state()

    def _lost(self, cause: str) -> None:
        """The engine died. `cause` ends a sentence that begins with the engine."""
        self.failure = cause
        self._fail_all(EngineDown(f"{self.name} {cause.splitlines()[0]}"))

    def _fail_all(self, error: EngineDown) -> None:
        self._table.fail(self.replica, error)
        self._empty_outbox()

    def _empty_outbox(self) -> None:
        now, gaps = time.perf_counter(), []
        while self._outbox:
            stream, deltas, error, last = self._outbox.popleft()
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
            self._on_more(gaps)

    def _on_progress(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._on_phase()

    # In the thread that receives from the engine.

    def deliver(self, stream: Stream, request: OpenRequest, deltas: list[Delta], error: Exception | None) -> None:
        """For the table: what a message brought for a request of this engine."""
        self._outbox.append((stream, deltas, error, request.ended))

    def _receive(self, message: StepMessage | Reply) -> None:
        self._table.receive(self.replica, message)
        if isinstance(message, StepMessage) and message.stats is not None:
            self._call(self._on_stats, message.stats)
        if self._outbox:
            # One wake-up of the event loop for all requests of the message.
            self._call(self._empty_outbox)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the event loop is closed: %s came too late", function)


def _answer(answer: asyncio.Future[Any], done: Future[Any]) -> None:
    if answer.done():
        return
    if (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())


_reading_tokenizer = threading.Lock()


def tokenizer_of(info: EngineInfo) -> Tokenizer | None:
    """Of the engine's model, where it has one. Engines of one model share it. Blocks while it is read."""
    with _reading_tokenizer:
        return None if info.folder is None else _tokenizer(Path(info.folder))


@functools.cache
def _tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
