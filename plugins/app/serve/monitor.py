"""What the server tells about itself: one record a request, the engine's counters, and whoever listens to them.

With several processes, each has a Reporter, and the one that owns the engines the Monitor of them all.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from dovetail.core.frontend.messages import EngineStats, total
from dovetail.core.frontend.process_rpc import Peer
from dovetail.core.metrics import SHORT, Metrics, Tally
from dovetail.core.traces import Traces

log = logging.getLogger(__name__)

_WINDOW = 60.0
"""Seconds that live figures look back."""
_TELL_SECONDS = 0.25
"""How long a process keeps what it saw to itself."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One prompt's way through the server. Times in seconds."""

    endpoint: str
    """"completions", "chat", "responses", "embeddings"."""
    outcome: str
    """"stop", "length"; "abort" (the client left, or time was up), "error"."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    arrival: float
    """time.perf_counter()."""
    ttft: float
    """Arrival to first token; 0 where none came."""
    duration: float
    """Arrival to end."""
    traceparent: str = ""
    """The client's header of that name."""

    @property
    def tpot(self) -> float:
        """Per output token after the first; 0 where there are fewer than two."""
        later = self.output_tokens - 1
        return (self.duration - self.ttft) / later if later > 0 and self.ttft else 0.0


class Listener(Protocol):
    """Metrics and the like. Called in the event loop: be quick."""

    def request(self, record: RequestRecord) -> None: ...

    def stats(self, replica: int, stats: EngineStats) -> None: ...


class Tracer:
    """A span for every request."""

    def __init__(self, endpoint: str, model: Callable[[], str]) -> None:
        self._traces, self._model = Traces(endpoint), model

    def request(self, record: RequestRecord) -> None:
        self._traces.request(
            record.endpoint,
            arrival=record.arrival,
            first_token=record.arrival + record.ttft if record.ttft else None,
            finished=record.arrival + record.duration,
            attributes={
                "gen_ai.response.model": self._model(),
                "gen_ai.response.finish_reasons": record.outcome,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.output_tokens,
                "gen_ai.usage.cached_tokens": record.cached_tokens,
            },
            error=record.outcome if record.outcome == "error" else None,
            traceparent=record.traceparent,
        )

    def stats(self, replica: int, stats: EngineStats) -> None:
        """Metrics are for these."""

    def close(self) -> None:
        """Send what is left; takes seconds where nobody listens."""
        self._traces.close()


class Exposition(msgspec.Struct):
    """What /metrics shows."""

    text: str
    content_type: str


class Seen(msgspec.Struct):
    """By one process, since it told of it last."""

    requests: list[RequestRecord]
    errors: list[int]
    """Statuses."""
    gaps: list[int]
    """Times between tokens, as counted by a Tally of SHORT."""
    gap_seconds: float


class Monitor:
    """`registry` is what /metrics shows; listeners fill it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics: Metrics | None = None
        """Once the model's name is known, which labels them."""
        self.listeners: list[Listener] = []
        self._latest: dict[int, EngineStats] = {}
        self._samples: deque[tuple[float, EngineStats]] = deque()
        self._ttft: deque[tuple[float, float]] = deque()

    def engine_ready(self, model: str, replicas: int) -> None:
        """The name of the model is known."""
        self.metrics = Metrics(model, self.registry, replicas)
        self.listeners.append(self.metrics)

    def restarted(self, replica: int) -> None:
        """There is an engine again in place of one that died."""
        if self.metrics is not None:
            self.metrics.engine_restarted(replica)

    def more(self, seconds: Sequence[float]) -> None:
        if self.metrics is not None:
            self.metrics.more_tokens(seconds)

    def answered(self, status: int) -> None:
        if status >= 400 and self.metrics is not None:
            self.metrics.error(status)

    def request(self, record: RequestRecord) -> None:
        now = time.perf_counter()
        if record.ttft:
            self._ttft.append((now, record.ttft))
        for listener in self.listeners:
            listener.request(record)

    def stats(self, replica: int, stats: EngineStats) -> None:
        self._latest[replica] = stats
        self._samples.append((time.perf_counter(), self.latest))
        for listener in self.listeners:
            listener.stats(replica, stats)

    @property
    def latest(self) -> EngineStats:
        """Over all replicas."""
        return total(self._latest.values())

    def saw(self, seen: Seen) -> None:
        """Another process."""
        for record in seen.requests:
            self.request(record)
        for status in seen.errors:
            self.answered(status)
        if self.metrics is not None:
            self.metrics.more_tokens_elsewhere(seen.gaps, seen.gap_seconds)

    async def exposition(self, accept: str) -> Exposition:
        """In the form that the header of that name asks for."""
        encode, content_type = choose_encoder(accept)
        return Exposition(encode(self.registry).decode(), content_type)

    async def live(self) -> dict[str, float | int | None]:
        """Figures of the last second or two (rates) and the last minute (TTFT, prefix hits)."""
        now = time.perf_counter()
        for recent in (self._samples, self._ttft):
            while recent and recent[0][0] < now - _WINDOW:
                recent.popleft()
        stats = self.latest
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_usage": stats.kv_usage,
            "tokens_per_second": self._rate(now),
            "ttft_median": self._median(),
            "prefix_hit_rate": self._hit_rate(),
            "preemptions": stats.preemptions,
            "acceptance_length": 1 + stats.accepted / stats.decode_rows if stats.drafted else None,
            "output_tokens": stats.output_tokens,
            "prompt_tokens": stats.prompt_tokens,
        }

    def _rate(self, now: float) -> float:
        recent = [(at, stats.output_tokens) for at, stats in self._samples if at >= now - 2.0]
        if len(recent) < 2 or recent[-1][0] == recent[0][0]:
            return 0.0
        return max(0.0, (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0]))

    def _median(self) -> float | None:
        values = sorted(ttft for _, ttft in self._ttft)
        return values[len(values) // 2] if values else None

    def _hit_rate(self) -> float | None:
        if not self._samples:
            return None
        oldest, newest = self._samples[0][1], self._samples[-1][1]
        queries = newest.prefix_queries - oldest.prefix_queries
        return (newest.prefix_hits - oldest.prefix_hits) / queries if queries > 0 else None


class Reporter:
    """Of a process that does not own the engines: what it sees goes to the Monitor of the one that does, which knows
    what all have seen."""

    def __init__(self, owner: Peer) -> None:
        self.listeners: list[Listener] = []
        """To requests that came to this process."""
        self._owner = owner
        owner.handlers["tell_all"] = self._tell
        self._timer: asyncio.TimerHandle | None = None
        self._begin()

    def _begin(self) -> None:
        self._requests: list[RequestRecord] = []
        self._errors: list[int] = []
        self._gaps = Tally(SHORT)

    def more(self, seconds: Sequence[float]) -> None:
        self._gaps.observe(seconds)
        self._soon()

    def answered(self, status: int) -> None:
        if status >= 400:
            self._errors.append(status)
            self._soon()

    def request(self, record: RequestRecord) -> None:
        for listener in self.listeners:
            listener.request(record)
        self._requests.append(record)
        self._soon()

    def _soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_TELL_SECONDS, self._tell)

    def _tell(self) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        seen = Seen(self._requests, self._errors, self._gaps.counts, self._gaps.sum)
        self._begin()
        self._owner.tell("seen", seen=msgspec.to_builtins(seen))

    def close(self) -> None:
        """The last is told."""
        self._tell()

    async def exposition(self, accept: str) -> Exposition:
        """Of all processes."""
        return msgspec.convert(await self._owner.ask("exposition", accept=accept), Exposition)

    async def live(self) -> dict[str, Any]:
        return dict(await self._owner.ask("live"))
