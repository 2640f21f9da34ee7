"""Prometheus metrics of a server and of an engine. These classes hold no engine; the code that observes an event
reports it.

Names follow common practice. Times are in seconds; ratios are between 0 and 1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dovetail.core.interfaces import StepRecord

if TYPE_CHECKING:
    from dovetail.core.frontend.messages import EngineStats

SHORT = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Buckets for times between tokens."""
LONG = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
"""Buckets for request times."""
STEP = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 1.0)
POWERS = tuple(float(2**n) for n in range(18))
"""Buckets for token counts."""


M = TypeVar("M", Counter, Gauge)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Record of one prompt that has ended. Times are in seconds."""

    endpoint: str
    """One of completions, chat, responses, embeddings."""
    outcome: str
    """One of stop, length, abort (client disconnected, time limit, refused by the engine), error (the engine died, the
    server stopped or failed)."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    arrival: float
    """`time.perf_counter()` at arrival."""
    ttft: float
    """Arrival to first token; 0 = no token."""
    duration: float
    """Arrival to end."""
    traceparent: str = ""
    """The traceparent header of the request."""

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 = fewer than two tokens."""
        later = self.output_tokens - 1
        return (self.duration - self.ttft) / later if later > 0 and self.ttft else 0.0


COUNTED = {
    "steps": ("engine_steps", "Steps that the engine has finished."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of accepted requests, once for each prompt."),
    "output_tokens": ("generation_tokens", "Output tokens sampled."),
    "preemptions": ("num_preemptions", "Sequences that lost their KV pages to others and are recomputed."),
    "prefix_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "evictions": ("kv_cache_evictions", "Cached KV pages evicted."),
    "drafted": ("spec_decode_num_draft_tokens", "Draft tokens verified."),
    "accepted": ("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    "decode_rows": ("spec_decode_num_drafts", "Rows that could verify drafts; mean length: 1 + accepted / drafts."),
}
"""Field of EngineStats -> (metric, help text)."""


class Tally:
    """Histogram counts by upper bound, and the sum of values."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, values: Iterable[float]) -> None:
        for value in values:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.sum += value

    def add(self, counts: Iterable[int], total: float) -> None:
        """Add the counts of another tally with equal bounds."""
        self.counts = [mine + others for mine, others in zip(self.counts, counts, strict=True)]
        self.sum += total


class TallyCollector(Collector):
    """A histogram for values that occur per token. prometheus_client's own takes 4 us per value, this one a tenth."""

    def __init__(self, name: str, about: str, tally: Tally, labels: Mapping[str, str]) -> None:
        self._name, self._about, self._tally, self._labels = name, about, tally, dict(labels)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._about, labels=tuple(self._labels))
        bounds = [*map(floatToGoString, self._tally.bounds), "+Inf"]
        counts = list(zip(bounds, accumulate(self._tally.counts), strict=True))
        family.add_metric(tuple(self._labels.values()), counts, self._tally.sum)
        yield family


class Metrics:
    """Metrics of a server with one model. Engine metrics have a label `replica`."""

    def __init__(self, model: str, registry: CollectorRegistry | None = None, replicas: int = 1) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._model = model
        self._last: dict[tuple[str, int], int] = {}
        ProcessCollector(registry=self.registry)
        self._running = self._engine(Gauge, "num_requests_running", "Samples that own KV pages.")
        self._waiting = self._engine(Gauge, "num_requests_waiting", "Samples that wait for their first or next step.")
        self._kv_usage = self._engine(Gauge, "kv_cache_usage_ratio", "Fraction of KV pages owned by running samples.")
        self._counters = {field: self._engine(Counter, name, about) for field, (name, about) in COUNTED.items()}
        self._restarts = self._engine(Counter, "engine_restarts", "Engines started in place of one that died.")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", LONG)
        self._itl = Tally(SHORT)
        self.registry.register(
            TallyCollector(
                "dovetail_inter_token_latency_seconds",
                "Between two deliveries of a sample, divided by its new tokens.",
                self._itl,
                {"model_name": model},
            )
        )
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "Mean over a request's tokens after the first.", SHORT
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to the last token.", LONG)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a finished request.", POWERS)
        self._output = self._histogram("request_generation_tokens", "Output tokens of a finished request.", POWERS)
        self._finished = Counter(
            "dovetail_requests_finished",
            "Finished requests, by outcome: stop, length, abort, error.",
            ("model_name", "outcome"),
            registry=self.registry,
        )
        self._refused = Counter(
            "dovetail_request_errors",
            "Requests answered with an error, by HTTP status.",
            ("model_name", "status"),
            registry=self.registry,
        )
        # Create every series at the start.
        for replica in range(replicas):
            for metric in (self._running, self._waiting, self._kv_usage, *self._counters.values(), self._restarts):
                metric.labels(model, str(replica))

    def _engine(self, kind: type[M], name: str, about: str) -> M:
        return kind(f"dovetail_{name}", about, ("model_name", "replica"), registry=self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("model_name",)
        return Histogram(f"dovetail_{name}", about, labels, buckets=buckets, registry=self.registry).labels(self._model)

    # Events.

    def stats(self, replica: int, stats: EngineStats) -> None:
        """Update from an engine's counters, several times per second. A count that decreases is of a new engine."""
        labels = self._model, str(replica)
        self._running.labels(*labels).set(stats.running)
        self._waiting.labels(*labels).set(stats.waiting)
        self._kv_usage.labels(*labels).set(stats.kv_usage)
        for field, counter in self._counters.items():
            now, before = getattr(stats, field), self._last.get((field, replica), 0)
            counter.labels(*labels).inc(now - before if now >= before else now)
            self._last[field, replica] = now

    def request(self, record: RequestRecord) -> None:
        self._finished.labels(self._model, record.outcome).inc()
        if not record.output_tokens:
            return
        self._ttft.observe(record.ttft)
        self._e2e.observe(record.duration)
        self._prompt.observe(record.prompt_tokens)
        self._output.observe(record.output_tokens)
        if record.tpot:
            self._tpot.observe(record.tpot)

    def more_tokens(self, seconds: Iterable[float]) -> None:
        """Record inter-token latencies: time since a sample's previous delivery / number of its new tokens."""
        self._itl.observe(seconds)

    def more_tokens_elsewhere(self, counts: Iterable[int], total: float) -> None:
        """Add inter-token latencies counted in another process by a Tally with bounds SHORT."""
        self._itl.add(counts, total)

    def error(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def engine_restarted(self, replica: int) -> None:
        self._restarts.labels(self._model, str(replica)).inc()


class StepMetrics:
    """Metrics of every step, from the engine's own records. Names begin with `dovetail_step_`, so that a server's
    metrics can be collected together with them without counting anything twice."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"dovetail_step_{name}", about, buckets=buckets, registry=registry)

        self._rows = histogram("rows", "Rows of a plan.", POWERS[:12])
        self._tokens = histogram("tokens", "Tokens fed in a step, drafts included.", POWERS)
        self._sampled = Counter("dovetail_step_output_tokens", "Output tokens produced.", registry=registry)
        self._drafted = Counter("dovetail_step_draft_tokens", "Draft tokens verified.", registry=registry)
        self._accepted = Counter("dovetail_step_accepted_tokens", "Draft tokens accepted.", registry=registry)
        self._schedule = histogram("schedule_seconds", "Host time spent on a plan.", STEP)
        self._device = histogram("device_seconds", "Device time, if the executor measures it.", STEP)
        self._running = Gauge("dovetail_step_running", "Running sequences after a step.", registry=registry)
        self._waiting = Gauge("dovetail_step_waiting", "Waiting sequences after a step.", registry=registry)
        self._kv_usage = Gauge(
            "dovetail_step_kv_usage_ratio", "Fraction of KV pages owned by sequences.", registry=registry
        )
        self._expert_load = Gauge(
            "dovetail_step_expert_load",
            "Pairs of token and routed expert in a step and layer on the busiest expert rank; experts.rebalance > 0.",
            registry=registry,
        )
        self._mean_expert_load = Gauge(
            "dovetail_step_mean_expert_load", "The same on the mean of all expert ranks.", registry=registry
        )

    def step(self, record: StepRecord) -> None:
        self._rows.observe(record.rows)
        self._tokens.observe(record.tokens)
        self._sampled.inc(record.sampled)
        self._drafted.inc(record.drafted)
        self._accepted.inc(record.accepted)
        self._schedule.observe(record.schedule_seconds)
        if record.device_seconds:
            self._device.observe(record.device_seconds)
        self._running.set(record.running)
        self._waiting.set(record.waiting)
        self._kv_usage.set(record.kv_used)
        if record.mean_expert_load:
            self._expert_load.set(record.expert_load)
            self._mean_expert_load.set(record.mean_expert_load)
