"""Runs of workloads whose requests all arrive at once, as files of requests (protocol.py), for compare.py."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from peers.protocol import Request, read

from dovetail import Composition, ConfigError, compose
from dovetail.core.interfaces import ModelSpec, TimedRequest, WorkloadContext
from dovetail.plugins.workload.config import FIXED_BY_THE_RUN

WARMUP_REQUESTS, WARMUP_TOKENS = 64, 4
GRID = re.compile(r"(\d+)x(\d+)/(\d+)(-sampled)?")
"""Name of a workload of equal requests: number of requests, prompt tokens and output tokens. `-sampled`: with the
sampling of workload=chat instead of greedy."""


@dataclass(frozen=True)
class Job:
    """One run: a file of requests."""

    workload: str
    purpose: str
    """warm-up, one token or whole."""
    round: int
    path: Path

    @cached_property
    def requests(self) -> list[Request]:
        return read(str(self.path))

    @cached_property
    def requests_hash(self) -> str:
        """Equal if two engines get the same requests."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()[:16]

    @property
    def sizes(self) -> dict[str, int]:
        """Number of requests, and mean tokens of their prompts (of a further round: its message) and outputs."""
        prompt = statistics.fmean(len(request.prompt_ids) for request in self.requests)
        output = statistics.fmean(request.output_tokens for request in self.requests)
        return {"requests": len(self.requests), "prompt_tokens": round(prompt), "output_tokens": round(output)}


def words_of(name: str) -> list[str]:
    """Return the overrides that choose a workload: the name of a workload or variant, or a GRID."""
    grid = GRID.fullmatch(name)
    if grid is None:
        return [f"workload={name}"]
    requests, prompt, output, sampled = grid.groups()
    words = ["workload=chats", f"workload.conversations={requests}", f"workload.message.median={prompt}"]
    words.append(f"workload.output.median={output}")
    return [*words, chat_sampling()] if sampled else words


@cache
def chat_sampling() -> str:
    """Return the override that sets the sampling of workload=chat."""
    chat: Any = compose(["workload=chat"], app="bench").part("workload").config
    return f"workload.sampling={{{','.join(f'{name}:{value}' for name, value in chat.sampling.items())}}}"


def make_jobs(
    workloads: Mapping[str, Composition], rounds: int, folder: Path, whole_only: Sequence[str] = ()
) -> dict[str, list[Job]]:
    """Write the requests of every run of each workload. Each run has its own prompts, so that none
    is found in a prefix cache. `whole_only`: workloads without the run of one token. Workloads with drawn output
    lengths, rounds or a grammar have none either."""
    if unknown := set(whole_only) - set(workloads):
        raise ConfigError(f"--whole-only {','.join(sorted(unknown))}: none of {','.join(workloads) or 'nothing'}")
    return {
        name: list(_jobs(composition, name, rounds, folder, name not in whole_only))
        for name, composition in workloads.items()
    }


def _jobs(composition: Composition, name: str, rounds: int, folder: Path, one_token: bool) -> Iterator[Job]:
    workload = composition.build("workload")
    model = composition.part("model")
    spec: ModelSpec = model.facts() or model.target().spec(model.config)
    max_len = min(composition.engine.max_len or spec.max_len, spec.max_len)
    # Seeds differ between workloads: two that differ only in their number of requests would share the first ones.
    seeds = itertools.count(zlib.crc32(name.encode()))

    def draw() -> Sequence[TimedRequest]:
        requests = workload.requests(WorkloadContext(spec.vocab, max_len, next(seeds), workload.rates()[0]))
        if any(request.arrival for request in requests):
            raise ConfigError(
                f"workload={name}: requests that arrive over time without rates, or after a pause, are not compared "
                "here; run app=bench bench.url=... on both servers"
            )
        return requests

    def write(purpose: str, number: int, requests: Sequence[TimedRequest], most: int | None = None) -> Job:
        path = folder / f"{name.replace('/', '-')}-{purpose.replace(' ', '_')}-{number}.jsonl"
        lines = [asdict(_request(request, most)) for request in requests]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return Job(name, purpose, number, path)

    yield write("warm-up", 0, draw()[:WARMUP_REQUESTS], WARMUP_TOKENS)
    for number in range(rounds):
        requests = draw()
        if one_token and _has_tpot(requests):
            yield write("one token", number, requests, 1)
            requests = draw()
        yield write("whole", number, requests)


def _request(request: TimedRequest, most: int | None) -> Request:
    """Return a request for a peer, with at most `most` output tokens."""
    sampling, grammar = request.sampling, request.sampling.grammar
    options = sampling.model_dump(exclude_defaults=True, exclude=set(FIXED_BY_THE_RUN))
    if grammar is not None and (grammar.kind != "json_schema" or not isinstance(grammar.value, str)):
        raise ConfigError(f"grammars of kind json_schema are compared here, not {grammar.kind}")
    return Request(
        list(request.prompt_ids),
        min(request.output_tokens, most or request.output_tokens),
        {"temperature": sampling.temperature} | options,
        None if grammar is None else grammar.value,
        request.continues,
    )


def _has_tpot(requests: Sequence[TimedRequest]) -> bool:
    """Whether the time per output token of the run is defined: independent requests with equal outputs."""
    lengths = {request.output_tokens for request in requests}
    alone = all(request.continues is None and request.sampling.grammar is None for request in requests)
    return alone and len(lengths) == 1 and lengths != {1}
