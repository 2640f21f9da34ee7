"""LLM: the Python API. A thread runs the engine's step loop; callers talk to it from threads or from asyncio."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dovetail.core.compose import compose
from dovetail.core.compose.wording import words
from dovetail.core.engine.counters import Counters
from dovetail.core.engine.engine import Engine
from dovetail.core.engine.results import SequenceEvent
from dovetail.core.errors import DovetailError, EngineStopped, RequestError
from dovetail.core.frontend.outputs import (
    REASONS,
    Completion,
    Delta,
    Generation,
    StopStringMatcher,
    Timing,
    truncate_and_normalize,
)
from dovetail.core.interfaces import EmbeddingSpec, FinishReason, Pooling, Progress, SamplingParams, Sequence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.compose import Composition
    from dovetail.core.frontend.replicated import ReplicatedEngine
    from dovetail.core.tokenizer import Tokenizer

T = TypeVar("T")
STEP_SECONDS = 2.0
"""What the last step has to end, when nobody wants it any more; then its ranks hang, or it may as well end now."""
Prompt = str | Seq[int]
"""Text, or token ids."""


Put = Callable[[Delta | BaseException | None], None]
"""Takes news of a request, in the engine's thread; None = complete."""


@dataclass(slots=True)
class _Job:
    """One request before the engine has it."""

    ids: Seq[int]
    params: SamplingParams
    request: Mapping[str, Any]
    put: Put
    timing: Timing = field(default_factory=lambda: Timing(time.perf_counter()))


@dataclass(slots=True)
class _Stream:
    """One request on its way. Written by the engine thread, read through `put`'s other end."""

    sequences: list[Sequence]
    watches: list[StopStringMatcher]
    timing: Timing
    put: Put
    open: set[int] = field(default_factory=set)
    """Samples that still run."""


class LLM:
    """A running engine.

    `LLM("llama_folder")`, `LLM(overrides=["+preset=h200_fp8_tp1", "engine.depth=2"])`: any override of the command
    line. A model path that is a folder is read as `model=llama model.path=...`. Use it as a context manager, or
    `close` it.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        overrides: Seq[str] = (),
        composition: Composition | None = None,
        progress: Progress = lambda phase, share: None,
    ) -> None:
        if composition is None:
            chosen = [] if model is None else _model_overrides(model)
            composition = compose([*chosen, *words(overrides)])
        self.composition = composition
        self.engine = make_engine(composition)
        began = time.perf_counter()
        self.engine.start(progress)
        self.start_seconds = time.perf_counter() - began
        try:
            self._tokenizer = self._load_tokenizer()
        except BaseException:
            self.engine.shutdown()
            raise
        self._streams: dict[int, _Stream] = {}
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._closed = False
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="dovetail-engine", daemon=True).start()

    # Public.

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("this model has no tokenizer (model.load=dummy without a folder): give token ids")
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        on_done: Callable[[], None] = lambda: None,
        **request: Any,
    ) -> list[Generation]:
        """Complete one prompt or many; results in the order of prompts. `on_done` is called as each one completes,
        from the engine's thread. `request`: priority, user, cache_salt, hints, adapter."""
        jobs = self._jobs(prompts, params)
        # Every prompt is checked before the first one runs.
        collectors = [_Collector(self, prompt, p, request, on_done) for prompt, p in jobs]
        for collector, sequences in zip(collectors, self._submit([c.job for c in collectors]), strict=True):
            collector.sequences = sequences
        try:
            return [collector.result() for collector in collectors]
        except BaseException:
            for collector in collectors:
                self._abort(collector.sequences)
            raise

    def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        **request: Any,
    ) -> NDArray[np.float32]:
        """One vector a prompt, of the final hidden states: [prompts, dimensions]. What is None is as the checkpoint
        states it; one that states nothing needs a `pooling`, "last" or "mean". `dimensions` cuts the vectors. `request`
        as for generate."""
        stated = self.engine.info.spec.embedding or EmbeddingSpec("last")
        if pooling is None and self.engine.info.spec.embedding is None:
            raise RequestError('this checkpoint does not say how it embeds: give pooling="last" or pooling="mean"')
        size = self.engine.info.spec.hidden
        if dimensions is not None and not 1 <= dimensions <= size:
            raise ValueError(f"dimensions={dimensions}: this model's embeddings have {size}")
        jobs = self._jobs(prompts, None)
        inboxes: list[queue.SimpleQueue[Delta | BaseException | None]] = [queue.SimpleQueue() for _ in jobs]
        request["pooling"] = pooling or stated.pooling
        submitted = self._submit(
            [
                _Job(self._encode(prompt), params, request, inbox.put)
                for (prompt, params), inbox in zip(jobs, inboxes, strict=True)
            ]
        )
        try:
            vectors = np.array([_embedding(inbox) for inbox in inboxes], np.float32).reshape(len(jobs), size)
        except BaseException:
            for sequences in submitted:
                self._abort(sequences)
            raise
        return truncate_and_normalize(
            vectors, normalize=stated.normalize if normalize is None else normalize, dimensions=dimensions
        )

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **request: Any) -> Iterator[Delta]:
        """Deltas as they come. Leaving the iteration early aborts the request."""
        inbox: queue.SimpleQueue[Delta | BaseException | None] = queue.SimpleQueue()
        (sequences,) = self._submit([_Job(self._encode(prompt), params or SamplingParams(), request, inbox.put)])
        try:
            while (item := inbox.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._abort(sequences)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Any
    ) -> AsyncIterator[Delta]:
        """As `stream`, for asyncio."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

        def put(item: Delta | BaseException | None) -> None:
            loop.call_soon_threadsafe(inbox.put_nowait, item)

        ids = self._encode(prompt)
        (sequences,) = await asyncio.to_thread(self._submit, [_Job(ids, params or SamplingParams(), request, put)])
        try:
            while (item := await inbox.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._abort(sequences)

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None, **request: Any) -> Generation:
        """As `generate` for one prompt, for asyncio."""
        params = params or SamplingParams()
        text, ids = (prompt, self._encode(prompt)) if isinstance(prompt, str) else (None, tuple(prompt))
        generation = _blank(text, ids, params.n)
        async for delta in self.astream(ids, params, **request):
            _merge(generation, delta)
        generation.timing.finished = time.perf_counter()
        return generation

    def load_adapter(self, name: str, folder: str) -> None:
        """Read an adapter that requests can then choose (`adapter=name`), while others run. Raises RequestError."""
        self._wait(self._call(lambda: self.engine.load_adapter(name, folder)))

    def unload_adapter(self, name: str) -> None:
        """Requests that have it run to their end. Raises RequestError."""
        self._call(lambda: self.engine.unload_adapter(name))

    @property
    def adapters(self) -> dict[str, str]:
        """Those that requests may choose: name -> folder."""
        return self._call(lambda: dict(self.engine.adapters))

    @property
    def counters(self) -> Counters:
        """What was counted since the start, over all replicas."""
        return self._call(lambda: copy(self.engine.counters))

    def close(self) -> None:
        """Abort what runs, stop the engine, free its memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(None)
        # Not joined: a join that Ctrl-C breaks off takes the thread for one that has ended (Python 3.11).
        if not self._ended.wait(STEP_SECONDS):
            self.engine.interrupt()
            self._ended.wait()
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Caller's side.

    def _load_tokenizer(self) -> Tokenizer | None:
        from dovetail.core.tokenizer import Tokenizer

        model = self.composition.part("model")
        folder = model.target().source(model.config).folder
        if folder is None or not (folder / "tokenizer.json").is_file():
            return None
        return Tokenizer(folder)

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)

    def _jobs(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[tuple[Prompt, SamplingParams]]:
        many: list[Prompt]
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            many = [prompts]  # type: ignore[list-item]
        else:
            many = list(prompts)  # type: ignore[arg-type]
        if params is None:
            params = SamplingParams()
        if isinstance(params, Mapping):
            raise TypeError("params is a SamplingParams or a list of them, not a dict: write SamplingParams(**params)")
        each = [params] * len(many) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts and {len(each)} SamplingParams: give one for all, or one each")
        return list(zip(many, each, strict=True))

    def _submit(self, jobs: Seq[_Job]) -> list[list[Sequence]]:
        """Hand requests to the engine thread, all between the same two steps, and wait until they are queued. Raises
        RequestError; then none of them is."""
        if self._tokenizer is None and any(job.params.stop for job in jobs):
            raise RequestError("stop strings need a tokenizer; this model has none (use stop_token_ids)")

        def add() -> list[list[Sequence]]:
            added: list[list[Sequence]] = []
            try:
                for job in jobs:
                    added.append(self.engine.add(job.ids, job.params, **job.request))
            except BaseException:
                for seq in (seq for sequences in added for seq in sequences):
                    self.engine.abort(seq.uid)
                raise
            for job, sequences in zip(jobs, added, strict=True):
                watches = [StopStringMatcher(job.params, self._tokenizer) for seq in sequences]
                stream = _Stream(sequences, watches, job.timing, job.put, {seq.sample for seq in sequences})
                for seq in sequences:
                    self._streams[seq.uid] = stream
            return added

        return self._call(add)

    def _call(self, function: Callable[[], T]) -> T:
        """Between two steps, in the engine's thread. Raises what a caller's mistake raises there."""
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(function())
            except (DovetailError, TypeError, ValueError) as error:
                answer.set_exception(error)

        self._post(call)
        return self._wait(answer)

    def _wait(self, answer: Future[T]) -> T:
        while True:
            try:
                return answer.result(timeout=1.0)
            except TimeoutError:
                self._check_alive()

    def _abort(self, sequences: Seq[Sequence]) -> None:
        def abort() -> None:
            for seq in sequences:
                if self._streams.pop(seq.uid, None) is not None:
                    self.engine.abort(seq.uid)

        if sequences and not self._closed and self._failure is None:
            self._inbox.put(abort)

    def _post(self, call: Callable[[], None]) -> None:
        if self._closed:
            raise RuntimeError("this LLM is closed")
        self._check_alive()
        self._inbox.put(call)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise _stopped(self._failure)

    # Engine's thread.

    def _run(self) -> None:
        try:
            while self._take_calls():
                if self.engine.has_work:
                    for event in self.engine.step():
                        self._deliver(event)
            failure: BaseException = RuntimeError("closed while requests ran")
        except BaseException as error:
            failure = error
        self._failure = failure
        try:
            for stream in {id(s): s for s in self._streams.values()}.values():
                stream.put(_stopped(failure))
            self._streams.clear()
        finally:
            self._ended.set()

    def _take_calls(self) -> bool:
        """Run what callers asked for; sleeps only while the engine has nothing to do. False = close."""
        while True:
            try:
                call = self._inbox.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _deliver(self, event: SequenceEvent) -> None:
        stream = self._streams.get(event.uid)
        if stream is None:
            return
        sample = event.uid & 0xFF
        watch = stream.watches[sample]
        if event.reason is FinishReason.REJECTED:
            for sibling in stream.sequences:
                self._streams.pop(sibling.uid, None)
                self.engine.abort(sibling.uid)
            stream.put(RequestError(event.detail))
            return
        before, tokens, reason = watch.tokens, event.tokens, event.reason
        text, stopped = watch.push(tokens[:-1] if event.hidden else tokens)
        if stopped:
            tokens, reason = tokens[: watch.tokens - before], FinishReason.STOP
            self.engine.finish(event.uid, stream.sequences[sample].prompt_len + watch.tokens, reason)
        elif reason is not None:
            text += watch.flush()
        if tokens and not stream.timing.first_token:
            stream.timing.first_token = time.perf_counter()
        stream.put(
            Delta(
                sample,
                text,
                tokens,
                event.logprobs[: len(tokens)],
                event.prompt_logprobs,
                REASONS[reason] if reason else None,
                event.pooled_C,
            )
        )
        if reason is not None:
            del self._streams[event.uid]
            stream.open.discard(sample)
            if not stream.open:
                stream.timing.finished = time.perf_counter()
                stream.put(None)


def make_engine(composition: Composition) -> Engine | ReplicatedEngine:
    """Not started yet. One replica runs in this process."""
    if composition.engine.dp == 1:
        return Engine(composition)
    from dovetail.core.frontend.replicated import ReplicatedEngine

    return ReplicatedEngine(composition)


class _Collector:
    """Waits for one request of `generate`."""

    def __init__(
        self, llm: LLM, prompt: Prompt, params: SamplingParams, request: Mapping[str, Any], on_done: Callable[[], None]
    ) -> None:
        self._on_done = on_done
        self._inbox: queue.SimpleQueue[Delta | BaseException | None] = queue.SimpleQueue()
        self._generation = _blank(prompt if isinstance(prompt, str) else None, llm._encode(prompt), params.n)
        self.job = _Job(self._generation.prompt_ids, params, request, self._put, self._generation.timing)
        self.sequences: list[Sequence] = []

    def _put(self, item: Delta | BaseException | None) -> None:
        if item is None:
            self._on_done()
        self._inbox.put(item)

    def result(self) -> Generation:
        while (item := self._inbox.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            _merge(self._generation, item)
        self._generation.cached_tokens = self.sequences[0].cached
        return self._generation


def _stopped(failure: BaseException) -> RuntimeError:
    words = f"the engine stopped: {type(failure).__name__}: {failure}"
    error = EngineStopped(words) if isinstance(failure, DovetailError) else RuntimeError(words)
    error.__cause__ = failure
    return error


def _embedding(inbox: queue.SimpleQueue[Delta | BaseException | None]) -> NDArray[np.float32]:
    """It comes whole."""
    delta = inbox.get()
    if isinstance(delta, BaseException):
        raise delta
    assert delta is not None and delta.pooled_C is not None
    return delta.pooled_C


def _blank(prompt: str | None, ids: Seq[int], n: int) -> Generation:
    return Generation(prompt, tuple(ids), [Completion() for _ in range(n)], Timing(time.perf_counter()))


def _merge(generation: Generation, delta: Delta) -> None:
    if delta.token_ids and not generation.timing.first_token:
        generation.timing.first_token = time.perf_counter()
    completion = generation.completions[delta.sample]
    completion.text += delta.text
    completion.token_ids += delta.token_ids
    completion.logprobs += delta.logprobs
    completion.finish_reason = delta.finish_reason or completion.finish_reason
    if delta.sample == 0:
        generation.prompt_logprobs += delta.prompt_logprobs


def _model_overrides(model: str) -> list[str]:
    """A folder becomes a path of the llama component; anything else is the name of a `model` option."""
    from pathlib import Path

    if Path(model).expanduser().is_dir() or "/" in model:
        return ["model=llama", f"model.path={Path(model).expanduser()}"]
    return [f"model={model}"]
