"""Measures a server that speaks the OpenAI API (`/v1/completions`, streamed), over one connection a request."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Progress, TimedRequest
from dovetail.plugins.app.bench.metrics import Timeline, spread
from dovetail.plugins.app.bench.target import OnDone, Target

if TYPE_CHECKING:
    import httpx

    from dovetail.core.compose import Composition
    from dovetail.plugins.app.bench.config import BenchConfig


class ServerError(Exception):
    """One request went wrong; the message says how."""


class ServerTarget(Target):
    """A client of one thread. The client's own delay is part of the figures and is reported beside them."""

    def __init__(self, composition: Composition, config: BenchConfig) -> None:
        super().__init__(composition)
        self.config = config
        assert config.url is not None
        self.url = config.url.rstrip("/")

    def start(self, progress: Progress) -> dict[str, Any]:
        progress("ask the server for its models", None)
        self._texts = self.tokenizer if self.config.send == "text" else None
        self.model = self.config.model or asyncio.run(self._first_model())
        return {"target": "server", "url": self.url, "model": self.model, "send": self.config.send}

    def run(self, requests: Sequence[TimedRequest], on_done: OnDone) -> tuple[list[Timeline], dict[str, Any]]:
        return asyncio.run(self._run(requests, on_done))

    def close(self) -> None:
        """Connections end with each run."""

    def _client(self) -> httpx.AsyncClient:
        try:
            import httpx
        except ModuleNotFoundError:
            raise ConfigError("bench.url needs httpx: pip install 'dovetail[bench]'") from None
        key = os.environ.get("OPENAI_API_KEY")
        # Every request may be under way at once: a pool would make them wait here, and that would be measured.
        return httpx.AsyncClient(
            timeout=self.config.timeout,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def _first_model(self) -> str:
        import httpx

        async with self._client() as client:
            try:
                answer = await client.get(f"{self.url}/models")
                answer.raise_for_status()
                return str(answer.json()["data"][0]["id"])
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
                reason = str(error) or type(error).__name__
                raise ConfigError(
                    f"bench.url={self.config.url}: {self.url}/models names no model ({reason}); is the server up, and "
                    "does the address end with /v1? bench.model=<name> asks nobody"
                ) from None

    async def _run(self, requests: Sequence[TimedRequest], on_done: OnDone) -> tuple[list[Timeline], dict[str, Any]]:
        timelines = [Timeline(r.arrival, len(r.prompt_ids), r.slo) for r in requests]
        bodies = [json.dumps(self._body(request)).encode() for request in requests]
        lags: list[float] = []
        done = 0

        async def one(request: TimedRequest, body: bytes, line: Timeline) -> None:
            nonlocal done
            await asyncio.sleep(began + request.arrival - time.perf_counter())
            lags.append(max(0.0, time.perf_counter() - began - request.arrival))
            try:
                await self._complete(client, body, request.output_tokens, line, began)
            except ServerError as error:
                line.failure = str(error)
            done += 1
            on_done(done)

        async with self._client() as client:
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for job in zip(requests, bodies, timelines, strict=True):
                    group.create_task(one(*job))
        return timelines, {"client_lag_ms": spread(lags)}

    def _body(self, request: TimedRequest) -> dict[str, Any]:
        ids = list(request.prompt_ids)
        body = {
            "model": self.model,
            "prompt": ids if self._texts is None else self._texts.decode(ids),
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # Beyond OpenAI's own API: only sent where the workload says something.
        for name in ("priority", "user", "cache_salt"):
            if value := getattr(request, name):
                body[name] = value
        return body

    async def _complete(
        self, client: httpx.AsyncClient, body: bytes, wanted: int, line: Timeline, began: float
    ) -> None:
        """Each piece of text is taken for one token until the usage at the end says how many there were."""
        import httpx

        usage: dict[str, Any] = {}
        sent = {"content": body, "headers": {"Content-Type": "application/json"}}
        try:
            async with client.stream("POST", f"{self.url}/completions", **sent) as answer:  # type: ignore[arg-type]
                if answer.status_code != 200:
                    told = (await answer.aread()).decode(errors="replace")[:500]
                    hint = " (bench.send=text for a server that takes no token ids)" if self._texts is None else ""
                    raise ServerError(f"status {answer.status_code}: {told}{hint}")
                async for piece in _pieces(answer):
                    if piece.get("error"):
                        raise ServerError(str(piece["error"]))
                    if piece.get("choices"):
                        line.came(time.perf_counter() - began, 1)
                    usage = piece.get("usage") or usage
        except httpx.HTTPError as error:
            raise ServerError(f"{type(error).__name__}: {error}") from None
        settle(line, usage, wanted)


async def _pieces(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events that hold JSON objects, to the mark of the end."""
    async for text in answer.aiter_lines():
        if not text.startswith("data:"):
            continue
        data = text[len("data:") :].strip()
        if data == "[DONE]":
            return
        try:
            piece = json.loads(data)
        except ValueError:
            raise ServerError(f"not JSON in the stream: {data[:200]}") from None
        if not isinstance(piece, dict):
            raise ServerError(f"not an object in the stream: {data[:200]}")
        yield piece


def settle(line: Timeline, usage: dict[str, Any], wanted: int) -> None:
    """Give each arrival its share of the tokens: a piece may hold several, or (half of a character) none.

    Who was to produce exactly `wanted` tokens and did not is no fair comparison: that fails.
    """
    if not line.times:
        raise ServerError("the stream ended without any output")
    tokens = usage.get("completion_tokens")
    if not isinstance(tokens, int):
        raise ServerError("the stream has no usage.completion_tokens, so nobody knows how many tokens came")
    if tokens != wanted:
        raise ServerError(f"{tokens} tokens came and {wanted} were asked for: the server does not obey ignore_eos")
    # There cannot be more arrivals than tokens: the last piece of some servers only says that it was the last.
    del line.times[tokens:]
    pieces = len(line.times)
    ends = [round(tokens * (i + 1) / pieces) for i in range(pieces)]
    line.counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
