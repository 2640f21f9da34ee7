"""Earliest deadline first (Liu and Layland 1973), with admission control by predicted time."""

from __future__ import annotations

import math

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import CostModel, SchedulerContext, Sequence
from dovetail.plugins.scheduler.config import DeadlineConfig
from dovetail.plugins.scheduler.expected import least_output


class DeadlineScheduler(PolicyScheduler):
    """Request.deadline decides which sequence enters next and which keeps its pages. Requests without one come last, by
    arrival.

    Under overload this order alone makes all requests late. With a cost model, a request is rejected at admission when
    its prefill and output are predicted to end past its deadline. The output length is hints["output_tokens"]; without
    the hint it is the least that the request allows, since the output may end early.
    """

    config: DeadlineConfig

    def rank(self, seq: Sequence) -> float:
        deadline = seq.request.deadline
        return math.inf if deadline is None else deadline

    def victim(self, candidates: list[Sequence], ctx: SchedulerContext) -> Sequence:
        return max(candidates, key=lambda seq: (self.rank(seq), seq.uid))

    def reject(self, seq: Sequence, ctx: SchedulerContext) -> str | None:
        deadline = seq.request.deadline
        if ctx.cost is None or deadline is None or seq.preemptions:
            return None
        left = deadline - ctx.clock
        output = least_output(seq, seq.limit)
        needed = self.config.margin * self._seconds(seq, output, ctx, ctx.cost)
        if needed <= left:
            return None
        when = f"is {left:.3f} s away" if left > 0 else f"passed {-left:.3f} s ago"
        return (
            f"the deadline {when}, and {seq.prompt_len} prompt tokens and {output:.0f} output tokens are predicted to "
            f"take {needed:.3f} s: allow more time, shorten the prompt, or expect fewer tokens"
        )

    def _seconds(self, seq: Sequence, output: float, ctx: SchedulerContext, cost: CostModel) -> float:
        """Predict the seconds to the last token if `seq` enters the running batch now."""
        prefill = 0.0
        if seq.parent is None:  # Further samples fork the prompt of the first.
            cached = ctx.kv_view.peek(seq)
            prefill = cost.prefill_seconds(seq.known_len - cached, cached)
        steps = math.ceil((output - 1) / (1 + self.limits.lookahead))
        return prefill + steps * cost.decode_seconds(len(self.running) + 1, seq.known_len)
