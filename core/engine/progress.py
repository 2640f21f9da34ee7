"""ProgressWatch: detects a scheduler that launches plans forever without ever getting a token out of them."""

from __future__ import annotations

from collections.abc import Container

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import SchedulerLimits, StepPlan

MOST_TURNOVERS = 200
"""How often in a row the running sequences may all be preempted without a token. Sound policies reach one or two."""
SLACK_STEPS = 1000


class ProgressWatch:
    """A livelock takes one of two forms. Either sequences preempt each other before any of them yields a token, so that
    no sequence keeps its slot: the watch counts these turnovers. Or the running sequences keep their slots and feed
    less than a token each per step: then the number of steps passes what feeding a whole context takes. A prompt of
    any length is fed within both limits, since it stays in its slot. Steps that wait for a grammar's mask, and steps in
    which the scheduler has nothing to launch, do not count."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.most_steps = SLACK_STEPS + limits.max_len * ceil_div(limits.max_seqs, limits.token_budget)
        self._holders: dict[int, int] = {}
        """Slot -> uid."""
        self._staying: set[int] = set()
        """Slots that no sequence has left since the last turnover."""
        self._ended = False
        """Whether a sequence that left since the last turnover had ended."""
        self._turnovers = self._steps = 0

    def progressed(self) -> None:
        """Note that a step yielded a token or an embedding."""
        self._turnovers = self._steps = 0

    def launched(self, plan: StepPlan, unfinished: Container[int], waits: bool) -> str | None:
        """Note a plan. Return how the scheduler makes no progress, or None. `unfinished`: uids that have not ended.
        `waits`: rows of the plan need a grammar's mask."""
        if plan.leaves:
            self._leave(plan.leaves, unfinished)
        for slot, uid, *_ in plan.joins:
            self._holders[slot] = uid
        if not self._staying:
            self._staying = set(self._holders)
            self._turnovers += not self._ended
            self._ended = False
        self._steps += not waits
        if self._turnovers > MOST_TURNOVERS:
            return (
                f"all running sequences were preempted {MOST_TURNOVERS} times in a row before any of them yielded a "
                "token: sequences that displace each other never end (gives_way and order must agree on a rank that "
                "changes only when a sequence receives a token)"
            )
        if self._steps > self.most_steps:
            return f"{self.most_steps} steps in a row yielded no token"
        return None

    def _leave(self, slots: list[int], unfinished: Container[int]) -> None:
        for slot in slots:
            self._ended |= self._holders.pop(slot, None) not in unfinished
        self._staying.difference_update(slots)
