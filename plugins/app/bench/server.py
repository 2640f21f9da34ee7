"""Measure a server with the OpenAI API (`/v1/completions`, streamed), over one connection per request."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Grammar, Progress, TimedRequest
from dovetail.plugins.app.bench.http import Address, Answer, HttpError, new_loop
from dovetail.plugins.app.bench.metrics import Timeline, spread
from dovetail.plugins.app.bench.target import OnDone, Target
from dovetail.plugins.app.bench.turns import Turns

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.plugins.app.bench.config import BenchConfig

_T = TypeVar("_T")


class ServerTarget(Target):
    """Single-threaded client. Its own delay is part of the figures and is also reported separately."""

    remembers = True

    def __init__(self, composition: Composition, config: BenchConfig) -> None:
        super().__init__(composition)
        self.config = config
        assert config.url is not None
        self.url = config.url.rstrip("/")
        try:
            self._server = Address(self.url, os.environ.get("OPENAI_API_KEY"))
        except ValueError as error:
            raise ConfigError(f"bench.url={config.url}: {error}") from None

    def start(self, progress: Progress) -> dict[str, Any]:
        progress("ask the server for its models", None)
        self._texts = self.tokenizer if self.config.send == "text" else None
        self.model = self.config.model or self._in_loop(self._first_model())
        return {"target": "server", "url": self.url, "model": self.model, "send": self.config.send}

    def run(self, requests: Sequence[TimedRequest], on_done: OnDone) -> tuple[list[Timeline], dict[str, Any]]:
        return self._in_loop(self._run(requests, on_done))

    def close(self) -> None:
        """Do nothing: connections end with each run."""

    @staticmethod
    def _in_loop(work: Coroutine[Any, Any, _T]) -> _T:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(work)

    async def _first_model(self) -> str:
        try:
            answer = await self._ask("GET", "/models")
            if answer.status != 200:
                raise HttpError(f"status {answer.status}")
            return str(msgspec.json.decode(answer.body)["data"][0]["id"])
        except (HttpError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"bench.url={self.config.url}: {self.url}/models names no model ({error}); is the server up, and "
                "does the address end with /v1? bench.model=<name> skips this query"
            ) from None

    async def _ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Send a request over a new connection. With a pool, time in the client's queue would be measured too."""
        try:
            async with asyncio.timeout(self.config.timeout):
                return await self._server.ask(method, path, body)
        except TimeoutError:
            raise HttpError(f"no complete answer within {self.config.timeout:g} s (bench.timeout)") from None

    async def _run(self, requests: Sequence[TimedRequest], on_done: OnDone) -> tuple[list[Timeline], dict[str, Any]]:
        """Send all requests. Bytes are stored with their arrival time and parsed after the run, except those of answers
        that become part of a prompt."""
        ids: list[tuple[int, ...]] = [request.prompt_ids for request in requests]
        turns: Turns[Any] = Turns(requests, ids if self._texts is None else list(map(self._texts.decode, ids)))

        def body(index: int) -> bytes:
            return msgspec.json.encode(self._body(requests[index], turns.prompts[index], turns.continued(index)))

        bodies = {index: body(index) for index in turns.first}
        streams = [StreamedAnswer() for _ in requests]
        lags: list[float] = []
        done = 0

        async def one(index: int) -> None:
            nonlocal done
            line, stream = turns.timelines[index], streams[index]
            await asyncio.sleep(began + line.arrival - time.perf_counter())
            lags.append(max(0.0, time.perf_counter() - began - line.arrival))
            await self._complete(bodies.pop(index), stream, began)
            done += 1
            if turns.continued(index):
                stream.fill(line, requests[index])
                try:
                    answer = stream.text() if self._texts is not None else stream.token_ids()
                except StreamError as error:
                    line.failure = line.failure or str(error)
                if line.failure:
                    done += turns.broken_off(index)
                else:
                    for after in turns.ended(index, line.times[-1], answer):
                        bodies[after] = body(after)
                        group.create_task(one(after))
            on_done(done)

        began, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for index in turns.first:
                group.create_task(one(index))
        busy = (time.process_time() - cpu) / (time.perf_counter() - began)
        for index, (line, stream) in enumerate(zip(turns.timelines, streams, strict=True)):
            if not turns.continued(index) and not line.failure:
                stream.fill(line, requests[index])
        figures = {"client_lag_ms": spread(lags), "client_busy": round(busy, 4)}
        return turns.timelines, figures | hit_rate(streams)

    def _body(self, request: TimedRequest, prompt: Any, continued: bool) -> dict[str, Any]:
        """Return the body of a request. `continued`: its answer becomes part of another prompt."""
        sampling = request.sampling
        body = {
            "model": request.adapter or self.model,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "temperature": sampling.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= sampling.model_dump(
            exclude_defaults=True, exclude={"temperature", "grammar", "max_tokens", "ignore_eos"}
        )
        if sampling.grammar is not None:
            body |= form(sampling.grammar)
        if continued and self._texts is None:
            body["return_token_ids"] = True
        # Extensions of the OpenAI API: sent only if the workload sets them.
        for name in ("priority", "user", "cache_salt", "hints"):
            if value := getattr(request, name):
                body[name] = value
        if request.deadline is not None:
            body["timeout"] = request.deadline
        return body

    async def _complete(self, body: bytes, stream: StreamedAnswer, began: float) -> None:
        try:
            answer = await self._ask("POST", "/completions", body)
        except HttpError as error:
            stream.failure = str(error)
            return
        if answer.status == 200:
            stream.pieces = [(clock - began, data) for clock, data in answer.pieces]
        else:
            reason = answer.body.decode(errors="replace")[:500]
            refused = self._texts is None and answer.status in (400, 422)
            hint = " (use bench.send=text for a server that takes no token ids)" if refused else ""
            stream.failure = f"status {answer.status}: {reason}{hint}"


def form(grammar: Grammar) -> dict[str, Any]:
    """Return the fields of the OpenAI API for a grammar. Raises ConfigError for a kind for which the API has none."""
    if grammar.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if grammar.kind != "json_schema":
        raise ConfigError(f"a server is measured with grammars of kind json_schema or json_object, not {grammar.kind}")
    assert isinstance(grammar.value, str)
    schema = {"name": "output", "schema": msgspec.json.decode(grammar.value)}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def hit_rate(streams: Sequence[StreamedAnswer]) -> dict[str, float]:
    """Return the share of prompt tokens that the server found in its prefix cache; empty if it does not report them."""
    reported = [stream.cached for stream in streams if stream.cached is not None]
    if len(reported) < len(streams) or not (prompt := sum(tokens for _, tokens in reported)):
        return {}
    return {"prefix_hit_rate": round(sum(cached for cached, _ in reported) / prompt, 4)}


class StreamError(Exception):
    """The stream holds no complete output; the message gives the reason."""


@dataclass(slots=True)
class StreamedAnswer:
    """One streamed answer, as the pieces that arrived."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """(seconds since the run began, bytes)"""
    failure: str = ""

    cached: tuple[int, int] | None = None
    """(prompt tokens found in the prefix cache, prompt tokens), as the server reports them; None = it does not."""

    def fill(self, line: Timeline, request: TimedRequest) -> None:
        """Write the arrival times of the tokens, or the failure."""
        line.failure = self.failure
        if not self.failure:
            try:
                line.times, line.counts = self._arrivals(request.output_tokens, request.sampling.grammar is None)
            except StreamError as error:
                line.failure = str(error)

    def text(self) -> str:
        """Return the whole output. Raises StreamError."""
        return "".join(str(choice.get("text") or "") for choice in self._choices())

    def token_ids(self) -> tuple[int, ...]:
        """Return the whole output. Raises StreamError if the server does not send token ids."""
        found: list[int] = []
        for choice in self._choices():
            ids = choice.get("token_ids")
            if ids is None:
                raise StreamError(
                    "the server ignores return_token_ids; bench.send=text continues conversations as text"
                )
            found += ids
        return tuple(found)

    def _choices(self) -> Iterator[dict[str, Any]]:
        return (choice for _, event in self._events() for choice in event.get("choices") or ())

    def _arrivals(self, wanted: int, exact: bool) -> tuple[list[float], list[int]]:
        """Return the arrival times of tokens, and the number of tokens at each.

        The usage at the end states the total. It is divided evenly over the events, since one may hold several tokens
        or, for an incomplete character, none. Simultaneous events are one arrival.

        A server that did not produce exactly `wanted` tokens cannot be compared: raises StreamError. Without
        `exact` it may have produced fewer.
        """
        clocks: list[float] = []
        usage: dict[str, Any] = {}
        for clock, event in self._events():
            if event.get("error"):
                raise StreamError(str(event["error"]))
            if event.get("choices"):
                clocks.append(clock)
            usage = event.get("usage") or usage
        tokens = usage.get("completion_tokens")
        if not clocks or not isinstance(tokens, int):
            raise StreamError("the stream ended without output or without usage.completion_tokens")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if isinstance(cached, int) and isinstance(usage.get("prompt_tokens"), int):
            self.cached = (cached, usage["prompt_tokens"])
        if tokens > wanted or (exact and tokens < wanted):
            raise StreamError(f"{tokens} tokens arrived instead of {wanted}: the server ignores ignore_eos")
        # At most one arrival per token: the last event of some servers has no token, only the finish reason.
        clocks = clocks[:tokens]
        shares: dict[float, int] = {}
        given = 0
        for i, clock in enumerate(clocks, 1):
            upto = round(tokens * i / len(clocks))
            shares[clock] = shares.get(clock, 0) + upto - given
            given = upto
        return list(shares), list(shares.values())

    def _events(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield (time, JSON object) of the server-sent events, up to the end marker."""
        rest = b""
        for clock, data in self.pieces:
            *lines, rest = (rest + data).split(b"\n")
            for text in lines:
                if not text.startswith(b"data:"):
                    continue
                if (payload := text[len(b"data:") :].strip()) == b"[DONE]":
                    return
                try:
                    event = msgspec.json.decode(payload)
                except ValueError:
                    event = None
                if not isinstance(event, dict):
                    raise StreamError(f"not a JSON object in the stream: {payload[:200]!r}")
                yield clock, event
