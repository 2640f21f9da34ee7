"""EngineClient: one engine in a process of its own, for asyncio. Requests go in, text comes out; a death is told."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from dovetail.core.engine.output import Delta, StopWatch, Timing
from dovetail.core.errors import DovetailError, RequestError
from dovetail.core.interfaces import Pooling, SamplingParams
from dovetail.core.serving.process import EngineProcess
from dovetail.core.serving.protocol import (
    Abort,
    Batch,
    Control,
    EngineInfo,
    EngineStats,
    Finish,
    News,
    Reply,
    encode_add,
    read_logprobs,
)
from dovetail.core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "failed", "stopped"]
_HOUR = 3600.0


class EngineDown(DovetailError):
    """There is no engine to run a request, or it died while the request ran. The next attempt may succeed."""


class Stream:
    """One request's output. Deltas that nobody took yet gather, and one `take` brings them all."""

    def __init__(self, id: int, watches: list[StopWatch], loop: asyncio.AbstractEventLoop) -> None:
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


class EngineClient:
    """Belongs to one event loop; every method is called there."""

    def __init__(
        self,
        composition: Composition,
        *,
        name: str = "the engine",
        ids: Iterator[int] | None = None,
        max_restarts: int = 0,
        timeout: float = math.inf,
        on_stats: Callable[[EngineStats], None] = lambda stats: None,
        on_more: Callable[[Sequence[float]], None] = lambda seconds: None,
        on_state: Callable[[], None] = lambda: None,
        adapters: Callable[[], Mapping[str, str] | None] = lambda: None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`name` begins sentences about it. `ids` number the requests, rising; random draws of requests without a seed
        depend on the number. `max_restarts`: how often within an hour a dead engine is replaced; then the state is
        "failed". `timeout`: seconds of silence after which an engine that has work counts as dead.
        `on_stats` is called a few times a second while the engine works, `on_more` with the times
        between tokens of samples that got some, not for the first time; `on_state` when the state has changed.
        `adapters` says, each time an engine starts, which it shall begin with: name -> folder; None = as composed."""
        self.composition, self.name = composition, name
        self._timeout, self._environment, self._adapters = timeout, environment, adapters
        self.max_restarts, self._on_stats, self._on_more, self._on_state = max_restarts, on_stats, on_more, on_state
        self.state: State = "stopped"
        self.failure = ""
        """Why the engine died last."""
        self.phase = ""
        """What a starting engine is doing."""
        self.stats = EngineStats()
        self.samples = 0
        """Samples that run or wait, over all requests."""
        self.prompt_tokens = 0
        """Of requests that have no output yet."""
        self._info: EngineInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._ids = ids or itertools.count()
        self._controls = itertools.count()
        self._streams: dict[int, Stream] = {}
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._deaths: deque[float] = deque()
        self._process: EngineProcess | None = None

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

    @property
    def pid(self) -> int | None:
        """Of the engine's process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Returns at once."""
        self._loop = asyncio.get_running_loop()
        self._launch()

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
        if self.state != "ready" or self._process is None:
            raise EngineDown(f"{self.name} is {self.state}{f': {self.failure}' if self.failure else ''}")
        tokenizer = self.tokenizer if params.stop else self._tokenizer
        id = next(self._ids)
        stream = Stream(id, [StopWatch(params, tokenizer, keep) for _ in range(params.n)], self._loop)
        told = {"priority": priority, "deadline": deadline, "user": user, "cache_salt": cache_salt}
        message = encode_add(
            self._encoder, id, prompt_ids, params, hints=dict(hints or {}), pooling=pooling, adapter=adapter, **told
        )
        self._streams[id] = stream
        self.samples += params.n
        stream.unread = len(prompt_ids)
        self.prompt_tokens += stream.unread
        self._process.send(message)
        return stream

    def abort(self, stream: Stream) -> None:
        """Idempotent; a complete stream is left alone."""
        if self._forget(stream) and self._process is not None:
            self._process.send(self._encoder.encode(Abort(stream.id)))

    async def control(self, op: str, **arguments: Any) -> Any:
        """`check`: the allocator's own integrity check, then the counters. `reset_cache`: forget cached prefixes.
        `load_adapter` (name, folder), `unload_adapter` (name). Raises RequestError."""
        if self._process is None or self.state != "ready":
            raise EngineDown(f"{self.name} is {self.state}")
        id = next(self._controls)
        message = self._encoder.encode(Control(id, op, arguments))
        answer = self._replies[id] = self._loop.create_future()
        self._process.send(message)
        return await answer

    async def close(self) -> None:
        """Abort what runs and end the engine's process. Idempotent."""
        if self.state != "failed":
            self.state = "stopped"
        self._fail_all(EngineDown("the server stops"))
        self._on_state()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.stop)

    # In the event loop.

    def _launch(self) -> None:
        self.state = "starting"
        self._process = EngineProcess(
            self.composition,
            self,
            timeout=self._timeout,
            environment=self._environment,
            adapters=self._adapters(),
        )
        self._process.start()

    def _on_ready(self, process: EngineProcess, info: EngineInfo, tokenizer: Tokenizer | None) -> None:
        if process is self._process:
            self._info, self._tokenizer = info, tokenizer
            self.state = "ready"
            self._on_state()

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
                    self._has_read(stream)
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

    def _on_death(self, process: EngineProcess, cause: str) -> None:
        if process is not self._process:
            return
        was, self.failure = self.state, cause
        self._process = None
        self.stats = EngineStats()
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - _HOUR:
            self._deaths.popleft()
        # An engine that could not start will not start next time either, except one that hung.
        again = (was == "ready" or process.hung_at_start) and len(self._deaths) <= self.max_restarts
        if was == "ready" or self._deaths:
            log.error("%s %s%s", self.name, cause, "; it is started again" if again else "")
        self._fail_all(EngineDown(f"{self.name} {cause.splitlines()[0]}"))
        if again:
            self._launch()
        else:
            self.state = "failed"
        self._on_state()

    def _forget(self, stream: Stream) -> bool:
        if self._streams.pop(stream.id, None) is None:
            return False
        self.samples -= len(stream.watches)
        self._has_read(stream)
        return True

    def _has_read(self, stream: Stream) -> None:
        self.prompt_tokens -= stream.unread
        stream.unread = 0

    def _fail_all(self, error: EngineDown) -> None:
        streams, self._streams = self._streams, {}
        self.samples = self.prompt_tokens = 0
        for stream in streams.values():
            stream.fail(error)
        replies, self._replies = self._replies, {}
        for answer in replies.values():
            if not answer.done():
                answer.set_exception(error)

    # From the engine's process, in its output thread.

    def on_progress(self, process: EngineProcess, phase: str) -> None:
        self.phase = phase

    def on_ready(self, process: EngineProcess, info: EngineInfo) -> None:
        folder = None if info.folder is None else Path(info.folder)
        has_tokenizer = folder is not None and (folder / "tokenizer.json").is_file()
        self._call(self._on_ready, process, info, Tokenizer(folder) if folder and has_tokenizer else None)

    def on_message(self, process: EngineProcess, message: Batch | Reply) -> None:
        if isinstance(message, Reply):
            self._call(self._on_reply, message)
            return
        if message.stats is not None:
            self._call(self._on_counters, message.stats)
        if message.news and (outcomes := self._translate(message)):
            self._call(self._on_outcomes, outcomes)

    def on_death(self, process: EngineProcess, cause: str) -> None:
        self._call(self._on_death, process, cause)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            log.debug("the event loop is closed: %s came too late", function.__name__)

    def _translate(self, batch: Batch) -> list[tuple[Stream, Delta | RequestError, bool]]:
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

    def _delta(self, stream: Stream, news: News) -> Delta:
        watch, tokens, reason = stream.watches[news.sample], news.tokens, news.reason
        before = watch.tokens
        text, stopped = watch.push(tokens[:-1] if news.hidden else tokens)
        if stopped:
            tokens = tokens[: watch.tokens - before]
            if reason is None and (process := self._process) is not None:
                process.send(self._encoder.encode(Finish(news.id, news.sample, watch.tokens)))
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
