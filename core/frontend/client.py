"""EngineClient: one engine in another process, for asyncio. Requests go in, text comes out; a death is told."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from dovetail.core.errors import DovetailError, RequestError
from dovetail.core.frontend.messages import (
    Abort,
    Control,
    EngineInfo,
    EngineStats,
    Finish,
    Reply,
    SampleUpdate,
    StepMessage,
    encode_add,
    read_logprobs,
)
from dovetail.core.frontend.outputs import Delta, StopStringMatcher, Timing
from dovetail.core.frontend.shared_counters import Board, Load
from dovetail.core.interfaces import Pooling, SamplingParams
from dovetail.core.tokenizer import Tokenizer

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "failed", "stopped"]


class EngineDown(DovetailError):
    """There is no engine to run a request, or it died while the request ran. The next attempt may succeed."""


class Stream:
    """One request's output. Deltas that nobody took yet gather, and one `take` brings them all."""

    def __init__(self, id: int, watches: list[StopStringMatcher], loop: asyncio.AbstractEventLoop) -> None:
        self.id = id
        self.timing = Timing(time.perf_counter())
        self.cached = 0
        """Prompt tokens found in the prefix cache. Written by the output thread."""
        self.watches = watches
        """Read and written by the output thread."""
        self.open = set(range(len(watches)))
        """Samples that still run. Written by the output thread."""
        self.ended = False
        """Everything came, or it failed, or it was aborted. Written by the event loop."""
        self.replica = 0
        """Which engine runs it. Written by whoever chose that."""
        self.unread = 0
        """Prompt tokens, until there is output. Written by the event loop."""
        self.latest: dict[int, float] = {}
        """Sample -> time.perf_counter() when it got tokens last. Written by the event loop."""
        self._loop = loop
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def take(self) -> list[Delta]:
        """What came since the last call; waits for something. Empty: complete. Raises RequestError, EngineDown."""
        while not self._deltas and self._error is None and not self.ended:
            self._waiter = self._loop.create_future()
            await self._waiter
        deltas, self._deltas = self._deltas, []
        if not deltas and self._error is not None:
            raise self._error
        return deltas

    # For the client, in the event loop.

    def put(self, delta: Delta, last: bool, now: float) -> None:
        if delta.token_ids and not self.timing.first_token:
            self.timing.first_token = now
        self._deltas.append(delta)
        if last:
            self.timing.finished = now
            self.ended = True
        self._wake()

    def fail(self, error: Exception) -> None:
        self.ended = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Transport(Protocol):
    def send(self, command: bytes) -> None:
        """From any thread."""


class EngineClient(ABC):
    """Belongs to one event loop; every method is called there but those of the thread that hears the engine. Who
    derives from it knows how the engine comes to life."""

    def __init__(
        self,
        *,
        name: str = "the engine",
        ids: Iterator[int] | None = None,
        load: Load | None = None,
        on_stats: Callable[[EngineStats], None] = lambda stats: None,
        on_more: Callable[[Sequence[float]], None] = lambda seconds: None,
        on_state: Callable[[], None] = lambda: None,
        on_phase: Callable[[], None] = lambda: None,
    ) -> None:
        """`name` begins sentences about it. `ids` number the requests, rising; random draws of requests without a seed
        depend on the number. `load` counts them. `on_stats` is called a few times a second while the engine works,
        `on_more` with the times between tokens of samples that got some, not for the first time; `on_state` when the
        state has changed, `on_phase` when a starting engine does something else."""
        self.name = name
        self._on_stats, self._on_more, self._on_state, self._on_phase = on_stats, on_more, on_state, on_phase
        self.state: State = "stopped"
        self.failure = ""
        """Why the engine died last."""
        self.phase = ""
        """What a starting engine is doing."""
        self.stats = EngineStats()
        self._load = load or Board(1, 1).load(0)
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._ids = ids or itertools.count()
        self._controls = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._transport: Transport | None = None
        """To an engine that is ready."""

    def start(self) -> None:
        """Returns at once."""
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    async def close(self) -> None:
        """Fail what runs, and have no more to do with the engine. Idempotent."""

    @property
    def samples(self) -> int:
        """That run or wait, over all requests of all processes that use the engine."""
        return self._load.samples

    @property
    def prompt_tokens(self) -> int:
        """Of requests that have no output yet, likewise."""
        return self._load.prompt_tokens

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

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        user: str = "",
        cache_salt: str = "",
        hints: Mapping[str, float] | None = None,
        keep: Collection[str] = (),
        pooling: Pooling | None = None,
        adapter: str = "",
    ) -> Stream:
        """keep: special tokens whose text is part of the output. pooling: embed the prompt; one Delta brings all.

        deadline: seconds from now, which schedulers may read. A refusal comes out of the stream as RequestError."""
        if self.state != "ready" or self._transport is None:
            raise EngineDown(f"{self.name} is {self.state}{f': {self.failure}' if self.failure else ''}")
        tokenizer = self.tokenizer if params.stop else self._tokenizer
        id = next(self._ids)
        stream = Stream(id, [StopStringMatcher(params, tokenizer, keep) for _ in range(params.n)], self._loop)
        told = {"priority": priority, "deadline": deadline, "user": user, "cache_salt": cache_salt}
        message = encode_add(
            self._encoder, id, prompt_ids, params, hints=dict(hints or {}), pooling=pooling, adapter=adapter, **told
        )
        self._streams[id] = stream
        stream.unread = len(prompt_ids)
        self._load.add(params.n, stream.unread)
        self._transport.send(message)
        return stream

    def abort(self, stream: Stream) -> None:
        """Idempotent; a complete stream is left alone."""
        if self._forget(stream) and self._transport is not None:
            self._transport.send(self._encoder.encode(Abort(stream.id)))

    async def control(self, op: str, **arguments: Any) -> Any:
        """`check`: the allocator's own integrity check, then the counters. `reset_cache`: forget cached prefixes.
        `load_adapter` (name, folder), `unload_adapter` (name). Raises RequestError."""
        if self.state != "ready" or self._transport is None:
            raise EngineDown(f"{self.name} is {self.state}")
        id = next(self._controls)
        message = self._encoder.encode(Control(id, op, arguments))
        answer = self._replies[id] = self._loop.create_future()
        self._transport.send(message)
        return await answer

    # In the event loop.

    def _opened(self, transport: Transport, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        self._transport, self._info, self._tokenizer = transport, info, tokenizer
        self.state = "ready"
        self._on_state()

    def _lost(self, cause: str) -> None:
        """`cause` ends a sentence that begins with the engine."""
        self._transport = None
        self.failure = cause
        self.stats = EngineStats()
        self._fail_all(EngineDown(f"{self.name} {cause.splitlines()[0]}"))

    def _on_outcomes(self, outcomes: Iterable[tuple[Stream, Delta | RequestError, bool]]) -> None:
        now, gaps = time.perf_counter(), []
        for stream, item, last in outcomes:
            if stream.ended:
                continue
            if last:
                self._forget(stream)
            if isinstance(item, RequestError):
                stream.fail(item)
            else:
                if item.token_ids:
                    if stream.unread:
                        self._load.add(0, -stream.unread)
                        stream.unread = 0
                    if before := stream.latest.get(item.sample):
                        gaps.append((now - before) / len(item.token_ids))
                    stream.latest[item.sample] = now
                stream.put(item, last, now)
        if gaps:
            self._on_more(gaps)

    def _on_counters(self, stats: EngineStats) -> None:
        self.stats = stats
        self._on_stats(stats)

    def _on_reply(self, reply: Reply) -> None:
        answer = self._replies.pop(reply.id, None)
        if answer is not None and not answer.done():
            if reply.error:
                answer.set_exception(RequestError(reply.error, status=reply.status))
            else:
                answer.set_result(reply.value)

    def _forget(self, stream: Stream) -> bool:
        if self._streams.pop(stream.id, None) is None:
            return False
        self._load.add(-len(stream.watches), -stream.unread)
        stream.unread = 0
        return True

    def _fail_all(self, error: EngineDown) -> None:
        streams, self._streams = self._streams, {}
        self._load.clear()
        for stream in streams.values():
            stream.fail(error)
        replies, self._replies = self._replies, {}
        for answer in replies.values():
            if not answer.done():
                answer.set_exception(error)

    def _on_progress(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self._on_phase()

    # In the thread that hears the engine.

    def _hear(self, message: StepMessage | Reply) -> None:
        if isinstance(message, Reply):
            self._call(self._on_reply, message)
            return
        if message.stats is not None:
            self._call(self._on_counters, message.stats)
        if message.news and (outcomes := self._translate(message)):
            self._call(self._on_outcomes, outcomes)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the event loop is closed: %s came too late", function.__name__)

    def _translate(self, batch: StepMessage) -> list[tuple[Stream, Delta | RequestError, bool]]:
        """Tokens to text. Each: the stream, its news, and whether that was all."""
        outcomes: list[tuple[Stream, Delta | RequestError, bool]] = []
        for news in batch.news:
            stream = self._streams.get(news.id)
            if stream is None:
                continue
            if news.reason == "rejected":
                outcomes.append((stream, RequestError(news.detail, status=news.status), True))
            elif news.sample in stream.open:
                outcomes.append((stream, self._delta(stream, news), not stream.open))
        return outcomes

    def _delta(self, stream: Stream, news: SampleUpdate) -> Delta:
        watch, tokens, reason = stream.watches[news.sample], news.tokens, news.reason
        before = watch.tokens
        text, stopped = watch.push(tokens[:-1] if news.hidden else tokens)
        if stopped:
            tokens = tokens[: watch.tokens - before]
            if reason is None and (transport := self._transport) is not None:
                transport.send(self._encoder.encode(Finish(news.id, news.sample, watch.tokens)))
            reason = "stop"
        elif reason is not None:
            text += watch.flush()
        if reason is not None:
            stream.open.discard(news.sample)
        stream.cached = news.cached
        return Delta(
            news.sample,
            text,
            tokens,
            read_logprobs(news.logprobs[: len(tokens)]) if news.logprobs else (),
            read_logprobs(news.prompt_logprobs) if news.prompt_logprobs else (),
            reason,
            np.frombuffer(news.pooled, "<f4") if news.pooled else None,
        )


_reading_tokenizer = threading.Lock()


def tokenizer_of(info: EngineInfo) -> Tokenizer | None:
    """Of the engine's model, where it has one. Engines of one model share it. Blocks while it is read."""
    with _reading_tokenizer:
        return None if info.folder is None else _tokenizer(Path(info.folder))


@functools.cache
def _tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
