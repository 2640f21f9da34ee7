"""Means of paired differences with confidence intervals. Pure: no engine, no clock.

Runs of one process share the conditions of its start (memory layout, autotuned kernels), so they are not independent
samples. A round, in which every variant starts once, is. Runs are averaged within their round, and the Student t
interval is taken over rounds (Georges et al., "Statistically Rigorous Java Performance Evaluation", OOPSLA 2007;
Kalibera and Jones, "Rigorous Benchmarking in Reasonable Time", ISMM 2013). Times and rates are compared by the mean of
log ratios, the ratio of geometric means (Fleming and Wallace, CACM 1986): x2 and x0.5 are then equally far from x1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

CONFIDENCE = 0.95

Unit = Literal["rounds", "runs", "windows"]


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    low: float | None
    """None = a single sample, hence no interval."""
    high: float | None
    samples: int
    unit: Unit
    """Unit of the samples. "runs" if there is one round; the interval then excludes the variation between starts."""

    def excludes(self, unchanged: float) -> bool:
        """Whether `unchanged`, the value of no change, is outside the interval."""
        return self.low is not None and self.high is not None and not self.low <= unchanged <= self.high


def deviation(samples: Sequence[float]) -> float:
    """Return the standard deviation of at least two samples."""
    value = math.fsum(samples) / len(samples)
    return math.sqrt(math.fsum((sample - value) ** 2 for sample in samples) / (len(samples) - 1))


def mean(samples: Sequence[float], unit: Unit) -> Estimate:
    n = len(samples)
    value = math.fsum(samples) / n
    if n == 1:
        return Estimate(value, None, None, 1, unit)
    half = t_quantile(n - 1) * deviation(samples) / math.sqrt(n)
    return Estimate(value, value - half, value + half, n, unit)


def changes(
    mine: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]], *, ratio: bool
) -> list[list[float]] | None:
    """Return the log ratios (or differences) between run i of a variant and run i of its baseline, by round. Both
    arguments map a round to the values of its runs. None = no common run, or a ratio of non-positive values."""
    common = [number for number in mine if number in theirs]
    pairs = [list(zip(mine[number], theirs[number], strict=True)) for number in common]
    if not any(pairs) or (ratio and any(a <= 0 or b <= 0 for runs in pairs for a, b in runs)):
        return None
    return [[math.log(a / b) if ratio else a - b for a, b in runs] for runs in pairs if runs]


def by_round(mine: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]], *, ratio: bool) -> list[float]:
    """Return the mean of `changes` in each round; empty if there are none."""
    return [math.fsum(runs) / len(runs) for runs in changes(mine, theirs, ratio=ratio) or ()]


def paired(
    mine: Mapping[int, Sequence[float]], theirs: Mapping[int, Sequence[float]], *, ratio: bool
) -> Estimate | None:
    """Estimate the ratio (or difference) from `changes`; None if there are none."""
    found_changes = changes(mine, theirs, ratio=ratio)
    if found_changes is None:
        return None
    if len(found_changes) > 1:
        found = mean([math.fsum(runs) / len(runs) for runs in found_changes], "rounds")
    else:
        (runs,) = found_changes
        found = mean(runs, "runs" if len(runs) > 1 else "rounds")
    if not ratio:
        return found
    low, high = (None if edge is None else math.exp(edge) for edge in (found.low, found.high))
    return Estimate(math.exp(found.value), low, high, found.samples, found.unit)


def t_within(t: float, df: int) -> float:
    """Return P(|T| <= t) of Student's t for a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3-4)."""
    theta = math.atan2(t, math.sqrt(df))
    cos2 = math.cos(theta) ** 2
    odd = df % 2
    # Both cases are sums of powers of cos(theta); each term is the previous one times cos^2 * k / (k + 1).
    term, total = (math.cos(theta), 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, df, 2):
        total += term
        term *= cos2 * k / (k + 1)
    within = math.sin(theta) * total
    return 2 / math.pi * (theta + within) if odd else within


@lru_cache
def t_quantile(df: int, confidence: float = CONFIDENCE) -> float:
    """Return t such that P(|T| <= t) = confidence."""
    low, high = 0.0, 1.0
    while t_within(high, df) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, df) < confidence else (low, middle)
    return high


def turns(variants: int, number: int) -> list[int]:
    """Return the order of variants in a round: a row of a Williams square (Williams 1949).

    Over `variants` rounds, each variant takes every place once and directly follows every other one equally often (over
    2 * `variants` rounds if the number is odd). Round 0 begins with variant 0.
    """
    row = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(variants)]
    turned = [(place + number) % variants for place in row]
    return turned[::-1] if variants % 2 and (number // variants) % 2 else turned
