"""Monitoring: one record per request and the engine's counters, passed to metrics and traces. With several processes,
each front-end process has a Reporter; it reports to the Monitor in the process that owns the engines."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median_high
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from dovetail.core.frontend.messages import EngineStats, total
from dovetail.core.frontend.process_rpc import ProcessRPC
from dovetail.core.metrics import SHORT, Metrics, RequestRecord, Tally
from dovetail.core.traces import Traces

log = logging.getLogger(__name__)

_WINDOW = 60.0
"""Time window of live figures, seconds."""
_REPORT_SECONDS = 0.25
"""Interval between reports of a front-end process."""


Listener = Callable[[RequestRecord], None]
"""Consumer of finished requests. Called in the event loop, so it must not block."""


class Tracer:
    """Exports one span per request."""

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

    def close(self) -> None:
        """Send the remaining spans; takes seconds if the collector does not answer."""
        self._traces.close()


class Exposition(msgspec.Struct):
    """Response of /metrics."""

    text: str
    content_type: str


class ProcessReport(msgspec.Struct):
    """Observations of one process since its previous report."""

    requests: list[RequestRecord]
    errors: list[int]
    """Status codes of error responses."""
    gaps: list[int]
    """Bucket counts of the times between tokens, from a Tally of SHORT."""
    gap_seconds: float


class Monitor:
    """State of /metrics and /stats."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics: Metrics | None = None
        """Set once the model's name, which is a label, is known."""
        self.listeners: list[Listener] = []
        self._latest: dict[int, EngineStats] = {}
        self._samples: deque[tuple[float, EngineStats]] = deque()
        self._ttft: deque[tuple[float, float]] = deque()

    def engine_ready(self, model: str, replicas: int) -> None:
        """Create the metrics, now that the model's name is known."""
        self.metrics = Metrics(model, self.registry, replicas)
        self.listeners.append(self.metrics.request)

    def restarted(self, replica: int) -> None:
        """Count a restart of an engine that had died."""
        if self.metrics is not None:
            self.metrics.engine_restarted(replica)

    def token_gaps(self, seconds: Sequence[float]) -> None:
        if self.metrics is not None:
            self.metrics.more_tokens(seconds)

    def response_sent(self, status: int) -> None:
        if status >= 400 and self.metrics is not None:
            self.metrics.error(status)

    def request(self, record: RequestRecord) -> None:
        now = time.perf_counter()
        if record.ttft:
            self._ttft.append((now, record.ttft))
        for listener in self.listeners:
            listener(record)

    def stats(self, replica: int, stats: EngineStats) -> None:
        self._latest[replica] = stats
        self._samples.append((time.perf_counter(), self.latest))
        if self.metrics is not None:
            self.metrics.stats(replica, stats)

    @property
    def latest(self) -> EngineStats:
        """Latest counters, summed over all replicas."""
        return total(self._latest.values())

    def merge(self, report: ProcessReport) -> None:
        """Add the observations of another process."""
        for record in report.requests:
            self.request(record)
        for status in report.errors:
            self.response_sent(status)
        if self.metrics is not None:
            self.metrics.more_tokens_elsewhere(report.gaps, report.gap_seconds)

    async def exposition(self, accept: str) -> Exposition:
        """Return the metrics in the format that the Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return Exposition(encode(self.registry).decode(), content_type)

    async def live(self) -> dict[str, float | int | None]:
        """Return live figures: rates over the last two seconds; TTFT and prefix hits over the last minute."""
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
            "ttft_median": median_high(ttft for _, ttft in self._ttft) if self._ttft else None,
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

    def _hit_rate(self) -> float | None:
        if not self._samples:
            return None
        oldest, newest = self._samples[0][1], self._samples[-1][1]
        queries = newest.prefix_queries - oldest.prefix_queries
        return (newest.prefix_hits - oldest.prefix_hits) / queries if queries > 0 else None


class Reporter:
    """Monitor of a front-end process. It sends its observations to the Monitor in the process that owns the engines."""

    def __init__(self, owner: ProcessRPC) -> None:
        self.listeners: list[Listener] = []
        """Listeners to the requests of this process only."""
        self._owner = owner
        owner.handlers["tell_all"] = self.report
        self._timer: asyncio.TimerHandle | None = None
        self._begin()

    def _begin(self) -> None:
        self._requests: list[RequestRecord] = []
        self._errors: list[int] = []
        self._gaps = Tally(SHORT)

    def token_gaps(self, seconds: Sequence[float]) -> None:
        self._gaps.observe(seconds)
        self._schedule_report()

    def response_sent(self, status: int) -> None:
        if status >= 400:
            self._errors.append(status)
            self._schedule_report()

    def request(self, record: RequestRecord) -> None:
        for listener in self.listeners:
            listener(record)
        self._requests.append(record)
        self._schedule_report()

    def _schedule_report(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_REPORT_SECONDS, self.report)

    def report(self) -> None:
        """Send the observations since the last report."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        report = ProcessReport(self._requests, self._errors, self._gaps.counts, self._gaps.sum)
        self._begin()
        self._owner.notify("seen", seen=msgspec.to_builtins(report))

    async def exposition(self, accept: str) -> Exposition:
        """Return the metrics of all processes."""
        return msgspec.convert(await self._owner.call("exposition", accept=accept), Exposition)

    async def live(self) -> dict[str, Any]:
        return dict(await self._owner.call("live"))
