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
from dovetail.core.interfaces import Progress, TimedRequest
from dovetail.plugins.app.bench.http import Address, Answer, HttpError, new_loop
from dovetail.plugins.app.bench.metrics import Timeline, spread
from dovetail.plugins.app.bench.target import OnDone, Target

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
        """Send all requests. Bytes are stored with their arrival time and parsed after the run."""
        bodies = [msgspec.json.encode(self._body(request)) for request in requests]
        streams = [StreamedAnswer() for _ in requests]
        lags: list[float] = []
        done = 0

        async def one(request: TimedRequest, body: bytes, stream: StreamedAnswer) -> None:
            nonlocal done
            await asyncio.sleep(began + request.arrival - time.perf_counter())
            lags.append(max(0.0, time.perf_counter() - began - request.arrival))
            await self._complete(body, stream, began)
            done += 1
            on_done(done)

        began, cpu = time.perf_counter(), time.process_time()
        async with asyncio.TaskGroup() as group:
            for job in zip(requests, bodies, streams, strict=True):
                group.create_task(one(*job))
        busy = (time.process_time() - cpu) / (time.perf_counter() - began)
        timelines = [stream.timeline(request) for stream, request in zip(streams, requests, strict=True)]
        return timelines, {"client_lag_ms": spread(lags), "client_busy": round(busy, 4)}

    def _body(self, request: TimedRequest) -> dict[str, Any]:
        ids = list(request.prompt_ids)
        body = {
            "model": request.adapter or self.model,
            "prompt": ids if self._texts is None else self._texts.decode(ids),
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
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


class StreamError(Exception):
    """The stream holds no complete output; the message gives the reason."""


@dataclass(slots=True)
class StreamedAnswer:
    """One streamed answer, as the pieces that arrived."""

    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    """(seconds since the run began, bytes)"""
    failure: str = ""

    def timeline(self, request: TimedRequest) -> Timeline:
        line = Timeline(request.arrival, len(request.prompt_ids), request.slo, failure=self.failure)
        if not self.failure:
            try:
                line.times, line.counts = self._arrivals(request.output_tokens)
            except StreamError as error:
                line.failure = str(error)
        return line

    def _arrivals(self, wanted: int) -> tuple[list[float], list[int]]:
        """Return the arrival times of tokens, and the number of tokens at each.

        The usage at the end states the total. It is divided evenly over the events, since one may hold several tokens
        or, for an incomplete character, none. Simultaneous events are one arrival.

        A server that did not produce exactly `wanted` tokens cannot be compared: raises StreamError.
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
        if tokens != wanted:
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
