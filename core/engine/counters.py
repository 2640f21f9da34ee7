"""Counters of an engine, and its observers."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

from dovetail.core.interfaces import KVStats, Observer, RowResult, SchedulerStats, StepPlan, StepRecord, StepResult
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
    reached_at: list[int] = field(default_factory=list)
    """Drafts by position that were verified, and whose predecessors in the row were all accepted."""
    accepted_at: list[int] = field(default_factory=list)
    """Those of them that were accepted."""
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
    draft_seconds: float = 0.0
    """Part of device_seconds that the executor reports as StepResult.draft_seconds."""
    draw_seconds: float = 0.0
    """The same of StepResult.draw_seconds."""

    def finish_step(self, plan: StepPlan, result: StepResult, lookahead: int) -> StepCounts:
        """Count a step. `lookahead`: maximum number of drafts per row; 0 = no speculation."""
        # Decode rows come first. Each of these passes over all rows runs in C.
        decodes = bisect_left(plan.rows, True, key=lambda row: not row.flags & DECODE)
        drafted = sum(map(_DRAFTED, result.rows)) if lookahead else 0
        accepted = self._count_drafts(result.rows[:decodes], lookahead) if drafted else 0
        sampled = sum(map(len, map(_TOKENS, result.rows)))
        self.steps += 1
        self.output_tokens += sampled
        self.drafted += drafted
        self.accepted += accepted
        self.decode_rows += decodes
        self.device_seconds += result.device_seconds
        self.draft_seconds += result.draft_seconds
        self.draw_seconds += result.draw_seconds
        return StepCounts(sampled, drafted, accepted)

    def _count_drafts(self, rows: Sequence[RowResult], lookahead: int) -> int:
        """Count drafts by position. Return the number of accepted ones."""
        reached, taken = [0] * lookahead, [0] * lookahead
        # Few pairs differ. Both passes over the rows run in C.
        pairs = Counter(zip(map(_DRAFTED, rows), map(len, map(_TOKENS, rows)), strict=True))
        for (drafted, tokens), times in pairs.items():
            for at in range(min(drafted, tokens, lookahead)):
                reached[at] += times
                taken[at] += times * (at < tokens - 1)
        # New lists, so that a copy of the counters keeps its values.
        self.reached_at, self.accepted_at = add_up([self.reached_at, reached]), add_up([self.accepted_at, taken])
        return sum(taken)

    @classmethod
    def total(cls, each: Iterable[Counters]) -> Counters:
        """Return the sums over several engines."""
        columns = zip(*([getattr(one, name.name) for name in fields(cls)] for one in each), strict=True)
        sums: Iterable[Any] = (add_up(column) if isinstance(column[0], list) else sum(column) for column in columns)
        return cls(*sums)


def add_up(lists: Iterable[Sequence[int]]) -> list[int]:
    """Return the sums by position; shorter lists end in zeros."""
    return list(map(sum, zip_longest(*lists, fillvalue=0)))


log = logging.getLogger(__name__)


class StepTimes(NamedTuple):
    """Seconds of a step on the host."""

    clock: float
    """When its result was taken."""
    schedule: float


def step_record(
    plan: StepPlan,
    result: StepResult,
    counts: StepCounts,
    times: StepTimes,
    scheduler: SchedulerStats,
    kv: KVStats,
) -> StepRecord:
    """Return the record of a finished step for observers."""
    busiest, mean = result.expert_loads or (0.0, 0.0)
    return StepRecord(
        step=result.step,
        clock=times.clock,
        rows=len(plan.rows),
        tokens=plan.num_tokens,
        sampled=counts.sampled,
        drafted=counts.drafted,
        accepted=counts.accepted,
        waiting=scheduler.waiting,
        running=scheduler.running,
        kv_used=kv.owned / kv.pages if kv.pages else 0.0,
        schedule_seconds=times.schedule,
        device_seconds=result.device_seconds,
        expert_load=busiest,
        mean_expert_load=mean,
    )


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
