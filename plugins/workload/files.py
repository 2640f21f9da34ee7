"""Workloads read from files. Files are untrusted: every error names the file and the line."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import RequestOptions, TimedRequest, Workload, WorkloadContext
from dovetail.plugins.workload.config import ShareGPTConfig, TraceConfig
from dovetail.plugins.workload.synthetic import check_length, poisson_arrivals


def read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload.path={path}: cannot be read ({error})") from None


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class _Line(RequestOptions):
    """One line of a trace."""

    prompt_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    output_tokens: int = Field(ge=1)
    arrival: float = Field(0.0, ge=0, allow_inf_nan=False)
    deadline: float | None = Field(None, gt=0, allow_inf_nan=False, kw_only=True)
    pooling: None = field(default=None, kw_only=True)


_LINE = TypeAdapter(_Line)


class Trace(Workload):
    config: TraceConfig

    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        found = [self._request(line, number, ctx) for number, line in self._lines()]
        if not found:
            raise ConfigError(f"workload.path={self.config.path}: no requests in it")
        return sorted(found, key=lambda request: request.arrival)

    def _lines(self) -> Iterator[tuple[int, str]]:
        for number, line in enumerate(read(self.config.path).splitlines(), 1):
            if line.strip():
                yield number, line

    def _request(self, text: str, number: int, ctx: WorkloadContext) -> TimedRequest:
        where = f"{self.config.path}:{number}"
        try:
            line = _LINE.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{where}: {place + ': ' if place else ''}{first['msg']}") from None
        outside = [token for token in line.prompt_ids if token >= ctx.vocab]
        if outside:
            raise ConfigError(f"{where}: token id {outside[0]} is not in the model's vocabulary of {ctx.vocab}")
        check_length(f"trace ({where})", len(line.prompt_ids), line.output_tokens, ctx)
        values = {one.name: getattr(line, one.name) for one in fields(line)}
        return TimedRequest(**values | {"arrival": line.arrival / self.config.speed})


class ShareGPT(Workload):
    config: ShareGPTConfig

    def rates(self) -> Sequence[float | None]:
        return tuple(dict.fromkeys(self.config.rates)) or (None,)

    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        config, rng = self.config, random.Random(ctx.seed)
        turns = self._turns()
        rng.shuffle(turns)
        arrivals = poisson_arrivals(rng, ctx.rate)
        found: list[TimedRequest] = []
        for question, answer in turns:
            prompt, output = self._ids(question, ctx), len(self._ids(answer, ctx))
            if min(len(prompt), output) >= config.min_tokens and len(prompt) + output <= ctx.max_len:
                found.append(TimedRequest(tuple(prompt), output, next(arrivals)))
            if len(found) == config.requests:
                return found
        raise ConfigError(
            f"workload.requests={config.requests}: {config.path} has {len(found)} conversations of at least "
            f"{config.min_tokens} tokens a side that fit into a context of {ctx.max_len}"
        )

    @staticmethod
    def _ids(text: str, ctx: WorkloadContext) -> Sequence[int]:
        try:
            return ctx.encode(text)
        except ValueError as error:
            raise ConfigError(f"workload=sharegpt has texts: {error}; use a model folder with tokenizer.json") from None

    def _turns(self) -> list[tuple[str, str]]:
        """Return the first question and answer of each conversation that begins with a question."""
        path = self.config.path
        text = read(path)
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"workload.path={path}: not JSON ({error})") from None
        if not isinstance(data, list):
            raise ConfigError(f"workload.path={path}: expected a list of conversations, not {type(data).__name__}")
        found = []
        for number, item in enumerate(data):
            turns = self._conversation(item, f"{path}: conversation {number}")
            if len(turns) >= 2 and turns[0][0] in ("human", "user") and turns[1][0] in ("gpt", "chatgpt", "assistant"):
                found.append((turns[0][1], turns[1][1]))
        return found

    @staticmethod
    def _conversation(item: Any, where: str) -> list[tuple[str, str]]:
        turns = item.get("conversations") if isinstance(item, dict) else None
        if not isinstance(turns, list):
            raise ConfigError(f'{where}: not an object with a list "conversations"')
        for turn in turns[:2]:
            texts = [turn.get(key) for key in ("from", "value")] if isinstance(turn, dict) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ConfigError(f'{where}: a turn is not an object with texts "from" and "value"')
        return [(turn["from"], turn["value"]) for turn in turns[:2]]
