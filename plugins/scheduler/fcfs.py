"""First come, first served: continuous batching (Orca, Yu et al. 2022) with chunked prefill, or without."""

from __future__ import annotations

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import KVAllocator, SchedulerContext, SchedulerLimits, Sequence
from dovetail.plugins.scheduler.config import FCFSConfig


class FCFSScheduler(PolicyScheduler):
    config: FCFSConfig

    def __init__(self, config: FCFSConfig, limits: SchedulerLimits, kv: KVAllocator) -> None:
        super().__init__(config, limits, kv)
        self._full_step = -1
        """Step in which a whole prompt found no room; later sequences may not overtake it."""

    def chunk(self, seq: Sequence, budget: int, ctx: SchedulerContext) -> int:
        count = min(seq.remaining, budget, self.config.max_chunk or budget)
        # Prompts that no step can hold are split, and continued in chunks.
        if self.config.chunked or seq.remaining > self.limits.token_budget or seq.computed:
            return count
        if count < seq.remaining:
            self._full_step = ctx.step
        return 0 if ctx.step == self._full_step else count
