"""What an engine counts of its steps."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from dovetail.core.interfaces import Observer, Row, RowResult, StepPlan, StepRecord, StepResult
from dovetail.core.interfaces.plan import DECODE

_DRAFT, _TOKENS = itemgetter(Row._fields.index("draft")), itemgetter(RowResult._fields.index("tokens"))


class StepCounts(NamedTuple):
    """Of one finished step."""

    sampled: int
    """Output tokens gained."""
    drafted: int
    accepted: int


@dataclass(slots=True)
class Counters:
    """Since start. Written by the engine."""

    steps: int = 0
    prompt_tokens: int = 0
    entered_tokens: int = 0
    """Prompt tokens of requests that have entered the device: each request once, at its first entry."""
    cached_tokens: int = 0
    """Of entered_tokens, those found in the prefix cache."""
    output_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_rows: int = 0
    """Rows that could have verified drafts; output per such row is the acceptance length."""
    late_rows: int = 0
    """Rows that sat a step out because their mask came late."""
    schedule_seconds: float = 0.0
    """Host time to decide plans."""
    submit_seconds: float = 0.0
    """Host time to hand plans to the executor; with a synchronous device also the time of the device."""
    wait_seconds: float = 0.0
    """Time in which the host had nothing to do but wait for a result."""
    update_seconds: float = 0.0
    """Host time to take results in."""
    device_seconds: float = 0.0
    """Time the device was at work, where the executor can tell."""
    idle_seconds: float = 0.0
    """Time for which the device had nothing to do while there were requests: it waited for the host."""

    def finish_step(self, plan: StepPlan, result: StepResult, lookahead: int) -> StepCounts:
        """`lookahead`: most drafts of a row; 0 = speculation off."""
        # Decode rows come first. What follows is one pass in C each: a step asks every row.
        decodes = bisect_left(plan.rows, True, key=lambda row: not row.flags & DECODE)
        drafted = sum(map(_DRAFT, plan.rows)) if lookahead else 0
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
    """By name."""

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
