"""Figures of a run, computed from the arrival times of its tokens. Pure functions: no engine, no server, no clock.

TTFT  arrival to first token                   E2E   arrival to last token
TPOT  first to last token, per token after it  ITL   between consecutive arrivals of tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.core.interfaces import SLO


@dataclass(slots=True)
class Timeline:
    """One request of a run. Times are seconds since the start of the run. Written by the driver of the run."""

    arrival: float
    """Scheduled arrival. If the driver sends the request late, the delay counts as latency."""
    prompt_tokens: int
    slo: SLO | None = None
    times: list[float] = field(default_factory=list)
    """Arrival times of tokens."""
    counts: list[int] = field(default_factory=list)
    """Number of tokens at each of these times."""
    failure: str = ""
    """Reason why the output is incomplete; empty: it is complete."""

    def came(self, clock: float, tokens: int) -> None:
        self.times.append(clock)
        self.counts.append(tokens)

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    @property
    def e2e(self) -> float:
        return self.times[-1] - self.arrival

    @property
    def tpot(self) -> float | None:
        """None if all tokens arrived at once."""
        later = self.tokens - self.counts[0]
        return (self.times[-1] - self.times[0]) / later if later else None

    @property
    def gaps(self) -> Iterable[float]:
        return (after - before for before, after in zip(self.times, self.times[1:], strict=False))

    def keeps(self, slo: SLO) -> bool:
        """Whether the request meets its own objective, or else `slo`. A request without a TPOT meets any TPOT limit."""
        slo = self.slo or slo
        late = slo.ttft is not None and self.ttft > slo.ttft
        slow = slo.tpot is not None and self.tpot is not None and self.tpot > slo.tpot
        return not (late or slow)


def spread(seconds: Iterable[float]) -> dict[str, float] | None:
    """Return mean, percentiles (interpolated) and maximum in milliseconds; None = no values."""
    values = np.fromiter(seconds, float) * 1e3
    if not len(values):
        return None
    p50, p90, p95, p99 = np.percentile(values, [50, 90, 95, 99])
    found = {"mean": values.mean(), "median": p50, "p90": p90, "p95": p95, "p99": p99, "max": values.max()}
    return {name: round(float(value), 4) for name, value in found.items()}


def measure(timelines: Sequence[Timeline], slo: SLO) -> dict[str, Any]:
    """Return the figures of one run, which lasts from 0 to the last token."""
    complete = [line for line in timelines if not line.failure]
    seconds = max((line.times[-1] for line in complete), default=0.0)
    output = sum(line.tokens for line in complete)
    prompt = sum(line.prompt_tokens for line in complete)

    def rate(amount: float) -> float:
        return round(amount / seconds, 3) if seconds else 0.0

    return {
        "seconds": round(seconds, 6),
        "requests": len(timelines),
        "failed": len(timelines) - len(complete),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_s": rate(len(complete)),
        "output_tokens_per_s": rate(output),
        "total_tokens_per_s": rate(prompt + output),
        "ttft_ms": spread(line.ttft for line in complete),
        "tpot_ms": spread(tpot for line in complete if (tpot := line.tpot) is not None),
        "itl_ms": spread(gap for line in complete for gap in line.gaps),
        "e2e_ms": spread(line.e2e for line in complete),
        "goodput": _goodput(timelines, complete, slo, rate),
    }


def _goodput(timelines: Sequence[Timeline], complete: Sequence[Timeline], slo: SLO, rate: Any) -> dict[str, Any] | None:
    """Return rate and share of requests that meet their objective (DistServe, Zhong et al. 2024)."""
    if slo == SLO() and not any(line.slo for line in timelines):
        return None
    good = sum(line.keeps(slo) for line in complete)
    return {"requests_per_s": rate(good), "share": round(good / len(timelines), 4)}


def per_token_of_run(whole: float, one_token: float, output_tokens: int) -> float:
    """Return ms per output token: (seconds of the run - seconds with one output token per request) / (tokens - 1)."""
    return (whole - one_token) / (output_tokens - 1) * 1e3


SUMMARY = (
    *("seconds", "requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "run_tpot_ms"),
    *(f"{latency}_ms.{figure}" for latency in ("ttft", "tpot", "itl", "e2e") for figure in ("median", "p99")),
    *("goodput.requests_per_s", "goodput.share", "prefix_hit_rate"),
)
"""Dotted paths of the figures of a run that are compared over repeats."""


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return path, such as "ttft_ms.median" -> median, minimum and maximum over the runs that have the value."""
    found = {}
    for path in SUMMARY:
        values = [value for run in runs if (value := at(run, path)) is not None]
        if values:
            found[path] = {"median": float(np.median(values)), "min": min(values), "max": max(values)}
    return found


def at(record: Any, path: str) -> float | None:
    """Return the value at a dotted path of nested records; None if one of them is missing."""
    for name in path.split("."):
        record = record.get(name) if record is not None else None
    return record


@dataclass(frozen=True, slots=True)
class Knee:
    """Knee of a load curve."""

    rate: float | None
    """Requests/s; None = no rate qualifies."""
    rule: str
    """Description of the rule that found it."""


def knee(points: Sequence[dict[str, Any]], slo: SLO, share: float) -> Knee | None:
    """Find the knee of a load curve, given its summaries, each with its offered `rate`. None = fewer than three rates
    at which requests completed, or no bend.

    With an objective: the highest rate up to which at every rate at least `share` of the requests meet it. Without:
    Kneedle (Satopaa et al. 2011) on the median end-to-end latency, that is, the rate at which the curve, scaled to the
    unit square, is farthest below its chord.
    """
    points = sorted(points, key=lambda point: point["rate"])
    if slo != SLO():
        served = None
        for point in points:
            if point["goodput.share"]["median"] < share:
                break
            served = point["rate"]
        return Knee(served, f"highest rate at which {share:.0%} of requests meet the objective")
    # A rate at which every request failed has no latency.
    points = [point for point in points if "e2e_ms.median" in point]
    if len(points) < 3:
        return None
    x = np.array([point["rate"] for point in points], float)
    y = np.array([point["e2e_ms.median"]["median"] for point in points], float)
    if y[-1] <= y[0]:
        return None
    below = (x - x[0]) / (x[-1] - x[0]) - (y - y[0]) / (y[-1] - y[0])
    best = int(np.argmax(below))
    if below[best] <= 0:
        return None
    return Knee(float(x[best]), "farthest below the chord of median end-to-end latency (Kneedle)")
