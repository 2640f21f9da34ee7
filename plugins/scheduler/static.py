"""Static batching, as before continuous batching: the baseline for measurements."""

from __future__ import annotations

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import KVAllocator, SchedulerContext, SchedulerLimits, Sequence, StepPlan
from dovetail.plugins.scheduler.config import StaticConfig


class StaticScheduler(PolicyScheduler):
    """A batch fills up while sequences wait; then no sequence enters until all of the batch have ended."""

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
            self._forming = False  # The batch is full, pages ran out, or no sequence waits.
        return plan

    def admit(self, seq: Sequence, ctx: SchedulerContext) -> bool:
        if seq.preemptions:
            return True  # It already belongs to the batch.
        if not self._forming or len(self._batch) >= self._size:
            return False
        self._batch.add(seq.uid)
        return True
