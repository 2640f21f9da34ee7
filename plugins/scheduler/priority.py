"""Preemptive priority scheduling with optional aging."""

from __future__ import annotations

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import SchedulerContext, Sequence
from dovetail.plugins.scheduler.config import PriorityConfig


class PriorityScheduler(PolicyScheduler):
    """Lower Request.priority first, ties by arrival.

    Aging needs no clock: all sequences age at the same rate, so their order never changes, and a level equals a fixed
    number of seconds of arrival time. Preemption considers priority alone. Age only decides about the next free slot,
    which is enough to prevent starvation; and two sequences cannot preempt each other in turn.
    """

    config: PriorityConfig

    def rank(self, seq: Sequence) -> tuple[float, int]:
        request, age = seq.request, self.config.age_seconds
        level = request.priority if age is None else request.arrival + request.priority * age
        return level, seq.uid

    def victim(self, candidates: list[Sequence], ctx: SchedulerContext) -> Sequence:
        return max(candidates, key=self.rank)

    def gives_way(self, seq: Sequence, candidates: list[Sequence], ctx: SchedulerContext) -> Sequence | None:
        last = max(candidates, key=self.rank)
        outranked = last.request.priority > seq.request.priority and self.rank(last) > self.rank(seq)
        return last if outranked else None
