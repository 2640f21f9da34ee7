"""First come, first served: continuous batching (Orca, Yu et al. 2022) with chunked prefill."""

from __future__ import annotations

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import SchedulerContext, Sequence
from dovetail.plugins.scheduler.config import FCFSConfig


class FCFSScheduler(PolicyScheduler):
    config: FCFSConfig

    def chunk(self, seq: Sequence, budget: int, ctx: SchedulerContext) -> int:
        return min(seq.remaining, budget, self.config.max_chunk or budget)
