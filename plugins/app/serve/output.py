"""Common parts of the endpoints that generate text: request handling, choices, logprobs, usage, stream chunks."""

from __future__ import annotations

import asyncio
import codecs
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from dovetail.core.errors import RequestError
from dovetail.core.frontend.outputs import Delta
from dovetail.core.interfaces import TokenLogprobs
from dovetail.core.tokenizer import Tokenizer
from dovetail.plugins.app.serve.errors import FieldError
from dovetail.plugins.app.serve.schemas import Common, StreamOptions
from dovetail.plugins.app.serve.service import Job, Service, constraint_of
from dovetail.plugins.app.serve.transport import DONE, ENCODER, EventStream, event, json_response, while_connected

_FLOOR = -9999.0
"""Logprob of an impossible token in OpenAI's API; JSON has no infinity."""

ChoiceDeltas = list[tuple[int, Delta]]
"""(index of the choice, its new output), at most one entry per choice."""


B = TypeVar("B", bound=Common)


class Generation(ABC, Generic[B]):
    """One request to an endpoint that generates text."""

    def __init__(self, service: Service, body: B, request: Request, prefix: str) -> None:
        """`prefix`: begin of the answer's id."""
        self.service, self.body, self.request = service, body, request
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.limit = service.limit(body.timeout)
        self.model = service.model(body.model)
        if body.stream_options is not None and not body.stream:
            raise FieldError("stream_options needs stream=true", "stream_options")

    @property
    def head(self) -> dict[str, Any]:
        return {"id": self.id, "created": self.created, "model": self.model}

    @abstractmethod
    def whole(self, jobs: list[Job], outputs: list[Delta]) -> dict[str, Any]:
        """Build the answer from the complete output of every choice."""

    @abstractmethod
    def chunks(self, jobs: list[Job]) -> AsyncIterator[bytes]:
        """Yield the answer as a stream of events."""

    async def reply(self, jobs: list[Job], n: int = 1) -> Response:
        """Stream the answer, or send it once all choices are complete, n for each job. Closes the jobs."""
        if not self.body.stream:
            try:
                with self._naming():
                    outputs = await while_connected(self.request.receive, collect(jobs, n))
                return json_response(self.whole(jobs, outputs))
            finally:
                close(jobs)
        chunks = self.chunks(jobs)
        try:
            # Wait for the first chunk before the status is sent, so that a refused request gets an error status.
            with self._naming():
                first = await while_connected(self.request.receive, anext(chunks))
        except BaseException:
            close(jobs)
            raise
        return EventStream(first, chunks, lambda: close(jobs))

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Add the request's field to a refusal of its grammar, which the engine compiles."""
        try:
            yield
        except RequestError as error:
            if not str(error).startswith("grammar: "):
                raise
            raise FieldError(str(error), constraint_of(self.body)[0], status=error.status) from None


class Chunks:
    """Encoder of stream events that differ only in their single choice and the usage; the rest is encoded once."""

    def __init__(self, head: Mapping[str, Any], jobs: list[Job], options: StreamOptions | None) -> None:
        self._head, self._jobs, self._options = head, jobs, options or StreamOptions()
        self._begin = b"data: " + ENCODER.encode(head)[:-1] + b',"choices":['

    def event(self, choice: object) -> bytes:
        tail = b"]}\n\n"
        if self._options.continuous_usage_stats:
            tail = b'],"usage":' + ENCODER.encode(usage(self._jobs)) + b"}\n\n"
        return b"".join((self._begin, ENCODER.encode(choice), tail))

    def end(self) -> bytes:
        wants_usage = self._options.include_usage
        return (event({**self._head, "choices": [], "usage": usage(self._jobs)}) if wants_usage else b"") + DONE


async def choice_deltas(jobs: Sequence[Job], n: int) -> AsyncIterator[ChoiceDeltas]:
    """Yield new output until all jobs, of n choices each, are complete. Raises the error of a failed job."""
    if len(jobs) == 1:
        job = jobs[0]
        while deltas := await job.stream.take():
            yield _merge(0, n, job, deltas)
        return
    inbox: asyncio.Queue[ChoiceDeltas | Exception | None] = asyncio.Queue()

    async def follow(at: int, job: Job) -> None:
        try:
            while deltas := await job.stream.take():
                inbox.put_nowait(_merge(at, n, job, deltas))
            inbox.put_nowait(None)
        except Exception as error:
            inbox.put_nowait(error)

    tasks = [asyncio.ensure_future(follow(at, job)) for at, job in enumerate(jobs)]
    try:
        left = len(jobs)
        while left:
            item = await inbox.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()


def _merge(at: int, n: int, job: Job, deltas: list[Delta]) -> ChoiceDeltas:
    """Merge deltas by choice. There are several per choice if the client is slower than the engine."""
    by_sample: dict[int, list[Delta]] = {}
    for delta in deltas:
        job.output_tokens += len(delta.token_ids)
        job.outcome = delta.finish_reason or job.outcome
        if job.predicted is not None:
            job.predicted.add(delta.sample, delta.token_ids)
        by_sample.setdefault(delta.sample, []).append(delta)
    return [(at * n + sample, join(parts)) for sample, parts in by_sample.items()]


def join(parts: Sequence[Delta]) -> Delta:
    if len(parts) == 1:
        return parts[0]
    return Delta(
        parts[0].sample,
        "".join(part.text for part in parts),
        tuple(token for part in parts for token in part.token_ids),
        tuple(entry for part in parts for entry in part.logprobs),
        tuple(entry for part in parts for entry in part.prompt_logprobs),
        parts[-1].finish_reason,
    )


async def collect(jobs: Sequence[Job], n: int) -> list[Delta]:
    """Return the complete output of every choice, by index."""
    parts: list[list[Delta]] = [[] for _ in range(len(jobs) * n)]
    async for items in choice_deltas(jobs, n):
        for index, delta in items:
            parts[index].append(delta)
    return [join(some) for some in parts]


def close(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.close()


def usage(jobs: Sequence[Job]) -> dict[str, Any]:
    prompt = sum(job.prompt_tokens for job in jobs)
    output = sum(job.output_tokens for job in jobs)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(job.stream.cached for job in jobs)},
    }
    if predicted := [job.predicted for job in jobs if job.predicted is not None]:
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": sum(each.accepted for each in predicted),
            "rejected_prediction_tokens": sum(each.rejected for each in predicted),
        }
    return found


def mean_logprob(choice: Delta) -> float:
    return sum(entry.logprob for entry in choice.logprobs) / max(len(choice.logprobs), 1)


def spell(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(token)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": max(logprob, _FLOOR), "bytes": list(spelled)}

    return {
        "content": [
            {**entry(token, found.logprob), "top_logprobs": [entry(*top) for top in found.top]}
            for token, found in zip(delta.token_ids, delta.logprobs, strict=True)
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """Logprobs in the format of /v1/completions, over all chunks of one choice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        """Counts a character that consists of several tokens once."""
        self._offset = 0
        """Position of the next token in the text, characters."""
        self._added: list[dict[str, Any]] = []

    def add(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], given: str = "") -> None:
        """`given`: text of these tokens if it comes from the client; it may name special tokens, which other text
        lacks."""
        for token, found in zip(tokens, logprobs, strict=True):
            text, own, top = spell(self._tokenizer, token), None, None
            if found is not None:
                own = max(found.logprob, _FLOOR)
                top = {spell(self._tokenizer, other): max(logprob, _FLOOR) for other, logprob in found.top}
            entry = {"tokens": text, "token_logprobs": own, "top_logprobs": top, "text_offset": self._offset}
            self._added.append(entry)
            if not self._tokenizer.is_special(token) or given.startswith(text, self._offset):
                self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def take(self) -> dict[str, Any]:
        """Return what was added since the last call."""
        taken, self._added = self._added, []
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [entry[name] for entry in taken] for name in names}
