"""The most urgent first, and running ones give way: preemptive priority scheduling with optional aging."""

from __future__ import annotations

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import SchedulerContext, Sequence
from dovetail.plugins.scheduler.config import PriorityConfig


class PriorityScheduler(PolicyScheduler):
    """Lower Request.priority first, ties by arrival.

    Aging as in multilevel feedback queues, without their clock: everybody grows older at the same pace, so who is ahead
    of whom never changes, and a level is worth so many seconds of arrival. Running sequences are displaced by urgency
    alone; age only decides about the next free slot, which is enough to starve nobody, and nobody can displace back.
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
