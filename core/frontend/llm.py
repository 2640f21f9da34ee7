"""LLM: the Python API. Callers submit from threads or asyncio; engines deliver from their own threads."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.core.compose import compose
from dovetail.core.compose.wording import words
from dovetail.core.engine.counters import Counters
from dovetail.core.errors import RequestError
from dovetail.core.frontend.client import missing_tokenizer, tokenizer_of
from dovetail.core.frontend.engines import OneLocalEngine, start_engines
from dovetail.core.frontend.outputs import Completion, Delta, Generation, Timing, truncate_and_normalize
from dovetail.core.frontend.request_table import Delivery, NewRequest, OpenRequest
from dovetail.core.interfaces import EmbeddingSpec, Pooling, Progress, RequestOptions, SamplingParams
from dovetail.core.interfaces.request_values import token_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.compose import Composition
    from dovetail.core.engine.engine import Engine
    from dovetail.core.frontend.messages import EngineInfo
    from dovetail.core.tokenizer import Tokenizer

Prompt = str | Seq[int]
"""Text, or token ids."""


class _Inbox:
    """Passes the deliveries of one request to the thread that waits for them."""

    def __init__(self, on_done: Callable[[], None] = lambda: None) -> None:
        self._queue: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self._on_done = on_done

    def deliver(self, request: OpenRequest, delivery: Delivery) -> None:
        if delivery.last and delivery.error is None:
            try:
                self._on_done()
            except Exception as error:
                # Raised for the caller: in this thread it would end the engine.
                delivery = delivery._replace(error=error)
        self._queue.put(delivery)

    def deltas(self) -> Iterator[Delta]:
        """Yield deltas until the request is complete. Raises the error that ended it."""
        last = False
        while not last:
            deltas, error, last = self._queue.get()
            if error is not None:
                raise error
            yield from deltas


class _WholeInbox(_Inbox):
    """Wakes the waiting thread once, when the request has ended, for callers that need only the whole output."""

    def __init__(self, on_done: Callable[[], None] = lambda: None) -> None:
        super().__init__(on_done)
        self._deltas: list[Delta] = []

    def deliver(self, request: OpenRequest, delivery: Delivery) -> None:
        deltas, error, last = delivery
        self._deltas += deltas
        if last:
            super().deliver(request, Delivery(self._deltas, error, True))


class _SharedInbox:
    """Collects the output of one request and puts itself on a queue, which many share, when the request has ended."""

    def __init__(self, index: int, generation: Generation, done: queue.SimpleQueue[_SharedInbox]) -> None:
        self.index, self.generation = index, generation
        self._done = done
        self._deltas: list[Delta] = []
        self._error: Exception | None = None

    def deliver(self, request: OpenRequest, delivery: Delivery) -> None:
        deltas, self._error, last = delivery
        self._deltas += deltas
        if last:
            self.generation.timing, self.generation.cached_tokens = request.timing, request.cached
            self._done.put(self)

    def result(self) -> Generation | RequestError:
        """Return the generation, or the reason for which the request was refused. Raises any other error."""
        if isinstance(self._error, RequestError):
            return self._error
        if self._error is not None:
            raise self._error
        for delta in self._deltas:
            _merge(self.generation, delta)
        return self.generation


class LLM:
    """A running engine. `LLM("llama_folder")`, `LLM(overrides=["+preset=h200_fp8_tp1", "engine.depth=2"])`: any
    override of the command line. The path of a checkpoint is read as `model=auto model.path=...`. Use it as a
    context manager, or `close` it."""

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
        began = time.perf_counter()
        self._engines = start_engines(composition, progress)
        self.start_seconds = time.perf_counter() - began
        self._table = self._engines.table
        try:
            self._tokenizer = self._table.tokenizer = tokenizer_of(self.info)
        except BaseException:
            self._engines.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """Device, sizes, and the phases and notes of the start-up."""
        return self._engines.info

    @property
    def engine(self) -> Engine:
        """The engine in this process. With `engine.dp` > 1 there is none: the engines run in separate processes."""
        if not isinstance(self._engines, OneLocalEngine) or self._engines.local is None:
            raise AttributeError(f"engine.dp={self.composition.engine.dp}: no engine runs in this process")
        return self._engines.local.engine

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise missing_tokenizer(self.info)
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        on_done: Callable[[], None] = lambda: None,
        **request: Any,
    ) -> list[Generation]:
        """Complete one prompt or many; results are in the order of the prompts. `on_done` is called in the engine's
        thread as each request completes. `request`: priority, user, cache_salt, hints, adapter."""
        pairs = self._pairs(prompts, params)
        generations = [_blank(_text(prompt), self._encode(prompt), p.n) for prompt, p in pairs]
        prompts = [generation.prompt_ids for generation in generations]
        inboxes = [_WholeInbox(on_done) for _ in pairs]
        with closing(self._run(prompts, [p for _, p in pairs], RequestOptions(**request), inboxes)) as found:
            for index, opened, delta in found:
                generation = generations[index]
                _merge(generation, delta)
                generation.timing, generation.cached_tokens = opened.timing, opened.cached
        return generations

    def generate_each(
        self, prompts: Iterable[Prompt], params: SamplingParams | None = None, **request: Any
    ) -> Generator[tuple[int, Generation | RequestError]]:
        """Complete many prompts independently: yield (index of the prompt, result) as each completes, in any order. A
        prompt that is refused yields its RequestError. Closing the generator aborts the others."""
        params, options = params or SamplingParams(), RequestOptions(**request)
        done: queue.SimpleQueue[_SharedInbox] = queue.SimpleQueue()
        opened: dict[int, OpenRequest] = {}

        def result(inbox: _SharedInbox) -> tuple[int, Generation | RequestError]:
            del opened[inbox.index]
            return inbox.index, inbox.result()

        try:
            for index, prompt in enumerate(prompts):
                try:
                    inbox = _SharedInbox(index, _blank(_text(prompt), self._encode(prompt), params.n), done)
                    ids = inbox.generation.prompt_ids
                    (opened[index],) = self._submit([NewRequest(ids, params, options, inbox.deliver)])
                except RequestError as error:
                    yield index, error
                while not done.empty():
                    yield result(done.get())
            while opened:
                yield result(done.get())
        finally:
            self._abort(list(opened.values()))

    def embed(
        self,
        prompts: Prompt | Seq[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        **request: Any,
    ) -> NDArray[np.float32]:
        """Return [prompts, dimensions]: vectors pooled from the final hidden states, truncated to `dimensions`.
        `pooling`: "last" or "mean"; None = the checkpoint's setting, if it has one. `request`: as in generate."""
        stated = self.info.embedding or EmbeddingSpec("last")
        if pooling is None and self.info.embedding is None:
            raise RequestError('this checkpoint does not say how it embeds: give pooling="last" or pooling="mean"')
        size = self.info.hidden
        if dimensions is not None and not 1 <= dimensions <= size:
            raise ValueError(f"dimensions={dimensions}: this model's embeddings have {size}")
        pairs = self._pairs(prompts, None)
        options = RequestOptions(**request, pooling=pooling or stated.pooling)
        encoded, params = [self._encode(prompt) for prompt, _ in pairs], [p for _, p in pairs]
        with closing(self._run(encoded, params, options, [_WholeInbox() for _ in pairs])) as found:
            vectors = np.array([delta.pooled_C for _, _, delta in found], np.float32).reshape(len(pairs), size)
        normalize = stated.normalize if normalize is None else normalize
        return truncate_and_normalize(vectors, normalize=normalize, dimensions=dimensions)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **request: Any) -> Iterator[Delta]:
        """Yield deltas as they arrive. Leaving the iteration early aborts the request."""
        prompts, options = [self._encode(prompt)], RequestOptions(**request)
        with closing(self._run(prompts, [params or SamplingParams()], options, [_Inbox()])) as found:
            for _, _, delta in found:
                yield delta

    def _run(
        self,
        prompts: Seq[Seq[int]],
        params: Seq[SamplingParams],
        options: RequestOptions,
        inboxes: Seq[_Inbox],
    ) -> Generator[tuple[int, OpenRequest, Delta]]:
        """Submit all or none; yield (index, request, delta) in prompt order. Closing the generator aborts them."""
        jobs = zip(prompts, params, inboxes, strict=True)
        opened = self._submit([NewRequest(ids, p, options, inbox.deliver) for ids, p, inbox in jobs])
        try:
            for index, (request, inbox) in enumerate(zip(opened, inboxes, strict=True)):
                for delta in inbox.deltas():
                    yield index, request, delta
        finally:
            self._abort(opened)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Any
    ) -> AsyncIterator[Delta]:
        """The asyncio form of `stream`."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[Delivery] = asyncio.Queue()
        opened: list[OpenRequest] = []
        left = False

        def deliver(one: OpenRequest, delivery: Delivery) -> None:
            try:
                loop.call_soon_threadsafe(inbox.put_nowait, delivery)
            except RuntimeError:
                self._table.abort(one)  # The event loop was closed.

        def submit() -> None:
            opened.extend(self._submit([new]))
            if left:
                self._abort(opened)

        new = NewRequest(self._encode(prompt), params or SamplingParams(), RequestOptions(**request), deliver)
        try:
            # In a thread, since submitting waits while another thread submits many requests.
            await asyncio.to_thread(submit)
            last = False
            while not last:
                deltas, error, last = await inbox.get()
                if error is not None:
                    raise error
                for delta in deltas:
                    yield delta
        finally:
            left = True
            self._abort(opened)

    async def agenerate(self, prompt: Prompt, params: SamplingParams | None = None, **request: Any) -> Generation:
        """The asyncio form of `generate`, for one prompt."""
        params = params or SamplingParams()
        ids = self._encode(prompt)
        generation = _blank(prompt if isinstance(prompt, str) else None, ids, params.n)
        async for delta in self.astream(ids, params, **request):
            _merge(generation, delta)
        generation.timing.finished = time.perf_counter()
        return generation

    def load_adapter(self, name: str, folder: str) -> None:
        """Load an adapter, which requests can then choose (`adapter=name`), while others run. Raises RequestError."""
        self._engines.load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests that use it run to their end. Raises RequestError."""
        self._engines.unload_adapter(name)

    @property
    def adapters(self) -> dict[str, str]:
        """Adapters that requests may choose: name -> folder."""
        return dict(self._engines.adapters)

    @property
    def counters(self) -> Counters:
        """Figures since the start, summed over all replicas."""
        return self._engines.counters

    def close(self) -> None:
        """Abort requests, stop the engine and free its memory. Idempotent."""
        self._engines.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else token_ids(prompt)

    def _pairs(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[tuple[Prompt, SamplingParams]]:
        many: list[Prompt]
        if isinstance(prompts, str) or (len(prompts) and not hasattr(prompts[0], "__len__")):
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

    def _submit(self, new: Seq[NewRequest]) -> list[OpenRequest]:
        """Queue all requests between the same two steps of an engine, or none: raises RequestError."""
        if self._tokenizer is None and any(one.params.stop for one in new):
            raise missing_tokenizer(self.info)
        if self._engines.closed:
            raise RuntimeError("this LLM is closed")
        return self._table.submit(*new)

    def _abort(self, opened: Seq[OpenRequest]) -> None:
        for request in opened:
            self._table.abort(request)


def _text(prompt: Prompt) -> str | None:
    return prompt if isinstance(prompt, str) else None


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
    """Return the overrides for a checkpoint, which model=auto reads, or for the name of a `model` option."""
    from pathlib import Path

    from dovetail.core.files import path_kind

    if path_kind(model) != "none" or "/" in model:
        return ["model=auto", f"model.path={Path(model).expanduser()}"]
    return [f"model={model}"]
