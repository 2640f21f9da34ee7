"""Static batching, as servers did before continuous batching: kept so that its cost can be measured."""

from __future__ import annotations

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import KVAllocator, SchedulerContext, SchedulerLimits, Sequence, StepPlan
from dovetail.plugins.scheduler.config import StaticConfig


class StaticScheduler(PolicyScheduler):
    """A batch forms while sequences wait and it is not full; then nobody enters until everybody has left."""

    config: StaticConfig

    def __init__(self, config: StaticConfig, limits: SchedulerLimits, kv: KVAllocator) -> None:
        super().__init__(config, limits, kv)
        self._size = min(config.batch_size or limits.max_seqs, limits.max_seqs)
        self._forming = True
        self._batch: set[int] = set()

    def schedule(self, ctx: SchedulerContext) -> StepPlan | None:
        if not self.running:
            self._forming, self._batch = True, set()
        plan = super().schedule(ctx)
        if plan is not None and not plan.joins and all(seq.remaining == 1 for seq in self.running.values()):
            self._forming = False  # Full, out of pages, or nobody is left waiting.
        return plan

    def admit(self, seq: Sequence, ctx: SchedulerContext) -> bool:
        if seq.preemptions:
            return True  # It belongs to the batch; it only made room for a moment.
        if not self._forming or len(self._batch) >= self._size:
            return False
        self._batch.add(seq.uid)
        return True
