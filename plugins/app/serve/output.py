"""Parts that all answers have in common, built from engine streams: choices, logprobs, usage."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dovetail.core.frontend.outputs import Delta
from dovetail.core.interfaces import TokenLogprobs
from dovetail.core.tokenizer import Tokenizer
from dovetail.plugins.app.serve.service import Job
from dovetail.plugins.app.serve.transport import EventStream, json_response, while_connected

_FLOOR = -9999.0
"""Logprob of an impossible token in OpenAI's API; JSON has no infinity."""

ChoiceDeltas = list[tuple[int, Delta]]
"""(index of the choice, its new output), at most one entry per choice."""


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


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


async def answer(
    request: Request,
    jobs: list[Job],
    n: int,
    *,
    whole: Callable[[list[Job], list[Delta]], dict[str, Any]],
    chunks: AsyncIterator[bytes] | None,
) -> Response:
    """Stream `chunks`, or if None, answer with `whole` once all choices are complete. Closes the jobs."""
    if chunks is None:
        try:
            return json_response(whole(jobs, await while_connected(request, collect(jobs, n))))
        finally:
            close(jobs)
    try:
        # Wait for the first chunk before the status is sent, so that a refused request gets an error status.
        first = await while_connected(request, anext(chunks))
    except BaseException:
        close(jobs)
        raise
    return EventStream(first, chunks, lambda: close(jobs))


def close(jobs: Iterable[Job]) -> None:
    for job in jobs:
        job.close()


def usage(jobs: Sequence[Job]) -> dict[str, Any]:
    prompt = sum(job.prompt_tokens for job in jobs)
    output = sum(job.output_tokens for job in jobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(job.stream.cached for job in jobs)},
    }


def mean_logprob(choice: Delta) -> float:
    return sum(entry.logprob for entry in choice.logprobs) / max(len(choice.logprobs), 1)


def spell(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(token)
        return {
            "token": spelled.decode("utf-8", "replace"),
            "logprob": max(logprob, _FLOOR),
            "bytes": list(spelled),
        }

    return {
        "content": [
            {**entry(token, found.logprob), "top_logprobs": [entry(*top) for top in found.top]}
            for token, found in zip(delta.token_ids, delta.logprobs, strict=True)
        ],
        "refusal": None,
    }


@dataclass(slots=True)
class CompletionLogprobs:
    """Logprobs in the format of /v1/completions, over all chunks of one choice."""

    tokenizer: Tokenizer
    offset: int = 0
    """Position of the next token in the text, characters."""
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        for token, found in zip(tokens, logprobs, strict=True):
            text = spell(self.tokenizer, token)
            self.tokens.append(text)
            self.token_logprobs.append(None if found is None else max(found.logprob, _FLOOR))
            top = None
            if found is not None:
                top = {spell(self.tokenizer, other): max(logprob, _FLOOR) for other, logprob in found.top}
            self.top_logprobs.append(top)
            self.text_offset.append(self.offset)
            self.offset += len(text)

    def take(self) -> dict[str, Any]:
        """Return what was added since the last call."""
        taken = {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return taken
