"""Least work first, by the output length that a client or an annotator predicts (as in SSJF, Qiu et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, takewhile

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import SchedulerContext, Sequence
from dovetail.plugins.scheduler.config import ShortestJobConfig
from dovetail.plugins.scheduler.expected import expected_output


class ShortestJobScheduler(PolicyScheduler):
    """Work is the number of known tokens plus hints["output_tokens"], or max_tokens without the hint.

    Preempted sequences go first, then those that have waited for max_wait, oldest first, so that long ones do not
    starve; then the others by work.
    """

    config: ShortestJobConfig

    def rank(self, seq: Sequence) -> float:
        return seq.known_len + expected_output(seq, seq.limit)

    def order(self, waiting: Iterable[Sequence], ctx: SchedulerContext) -> Iterable[Sequence]:
        due = ctx.clock - self.config.max_wait
        overdue = takewhile(lambda seq: seq.request.arrival <= due, self.waiting.values())
        early = set()
        for seq in chain(self.resuming.values(), overdue):
            early.add(seq.uid)
            yield seq
        yield from (seq for seq in waiting if seq.uid not in early)
