"""Counters of an engine, and its observers."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from dovetail.core.interfaces import Observer, RowResult, StepPlan, StepRecord, StepResult
from dovetail.core.interfaces.plan import DECODE

_DRAFTED, _TOKENS = (itemgetter(RowResult._fields.index(name)) for name in ("drafted", "tokens"))


class StepCounts(NamedTuple):
    """Token counts of one finished step."""

    sampled: int
    """Output tokens."""
    drafted: int
    """Drafts verified."""
    accepted: int


@dataclass(slots=True)
class Counters:
    """Totals since start. Written by the engine."""

    steps: int = 0
    prompt_tokens: int = 0
    entered_tokens: int = 0
    """Prompt tokens of requests that have entered the device. Each request counts once, at its first entry."""
    cached_tokens: int = 0
    """Part of entered_tokens that was found in the prefix cache."""
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_rows: int = 0
    """Rows that could have verified drafts. Output tokens per such row are the acceptance length."""
    late_rows: int = 0
    """Rows that yielded no token in a step because their grammar mask was not ready."""
    schedule_seconds: float = 0.0
    """Host time to decide plans."""
    submit_seconds: float = 0.0
    """Host time to hand plans to the executor. With a synchronous device it includes the device time."""
    wait_seconds: float = 0.0
    """Host time spent waiting for results."""
    update_seconds: float = 0.0
    """Host time to process results."""
    device_seconds: float = 0.0
    """Time that the device was busy, if the executor reports it."""
    idle_seconds: float = 0.0
    """Time that the device was idle while there were requests: it waited for the host."""

    def finish_step(self, plan: StepPlan, result: StepResult, lookahead: int) -> StepCounts:
        """Count a step. `lookahead`: maximum number of drafts per row; 0 = no speculation."""
        # Decode rows come first. Each of these passes over all rows runs in C.
        decodes = bisect_left(plan.rows, True, key=lambda row: not row.flags & DECODE)
        drafted = sum(map(_DRAFTED, result.rows)) if lookahead else 0
        accepted = sum(max(len(row.tokens) - 1, 0) for row in result.rows[:decodes]) if drafted else 0
        sampled = sum(map(len, map(_TOKENS, result.rows)))
        self.steps += 1
        self.output_tokens += sampled
        self.drafted += drafted
        self.accepted += accepted
        self.decode_rows += decodes
        self.device_seconds += result.device_seconds
        return StepCounts(sampled, drafted, accepted)


log = logging.getLogger(__name__)


class Observers(dict[str, Observer]):
    """Observers by name. One that raises is logged and removed."""

    def step(self, record: StepRecord) -> None:
        for name, observer in list(self.items()):
            try:
                observer.step(record)
            except Exception:
                log.exception("observer %s failed and was removed", name)
                _close(name, self.pop(name))

    def close(self) -> None:
        for name, observer in self.items():
            _close(name, observer)


def _close(name: str, observer: Observer) -> None:
    try:
        observer.close()
    except Exception:
        log.exception("observer %s failed to close", name)
