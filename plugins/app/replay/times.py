"""Step times of a simulation, fitted to those of a recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from dovetail.core.interfaces import Row
from dovetail.core.interfaces.plan import DECODE
from dovetail.core.recording.recording import Recording

LEAST_STEPS = 8
"""Fewer steps only give a mean."""


class StepTimes:
    """Seconds = a + b x decode rows + c x prompt tokens + d x KV tokens read, with coefficients of at least 0. They are
    fitted by least squares, twice: the second time without the 2 % of the steps that took longest in proportion to
    the first fit, since these compiled a kernel or were disturbed."""

    def __init__(self, recording: Recording) -> None:
        spans = list(_durations(recording))
        seconds = np.array([taken for _, taken in spans] or [0.0])
        facts = np.array([_facts(rows) for rows, _ in spans] or [_facts([])])
        excess = seconds / np.maximum(facts @ _fit(facts, seconds), 1e-9)
        kept = excess <= np.quantile(excess, 0.98)
        self._coefficients = _fit(facts[kept], seconds[kept])
        predicted = facts[kept] @ self._coefficients
        errors = np.abs(predicted - seconds[kept]) / np.maximum(seconds[kept], 1e-9)
        self.error: float = median(errors.tolist())
        """Median relative error of the steps that were fitted."""

    def seconds(self, rows: Sequence[Row]) -> float:
        return float(np.dot(_facts(rows), self._coefficients))


def _durations(recording: Recording) -> Iterator[tuple[Sequence[Row], float]]:
    """Yield (rows, seconds) of each step: its device time, or else the time that it took the engine, host included."""
    free = recording.header.clock
    for plan, result in zip(recording.plans, recording.results, strict=False):
        yield plan.rows, result.device_seconds or result.clock - max(free, plan.clock)
        free = result.clock


def _facts(rows: Sequence[Row]) -> tuple[float, float, float, float]:
    decodes = sum(1 for row in rows if row.flags & DECODE)
    return 1.0, decodes, sum(row.count for row in rows) - decodes, sum(row.bound for row in rows)


def _fit(facts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares without negative coefficients: the most negative one is fixed at 0 until none is left."""
    found, free = np.zeros(facts.shape[1]), list(range(facts.shape[1]))
    if len(seconds) < LEAST_STEPS:
        free = [0]
    scale = np.maximum(facts.max(axis=0), 1.0)
    while free:
        solution, *_ = np.linalg.lstsq(facts[:, free] / scale[free], seconds, rcond=None)
        if solution.min() >= 0:
            found[free] = solution / scale[free]
            return found
        free.pop(int(solution.argmin()))
    return found
