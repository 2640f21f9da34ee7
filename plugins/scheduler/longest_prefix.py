"""Longest cached prefix first: cache-aware scheduling of SGLang (Zheng et al. 2023), with a limit on waiting."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import SchedulerContext, Sequence
from dovetail.plugins.scheduler.config import LongestPrefixConfig


class LongestPrefixScheduler(PolicyScheduler):
    """Order the `window` oldest sequences by cached prefix length; the others follow by arrival.

    Preempted sequences and those that have waited for max_wait go first, which prevents starvation. Without a prefix
    cache (kv_cache=paged) the order is by arrival.
    """

    config: LongestPrefixConfig

    def order(self, waiting: Iterable[Sequence], ctx: SchedulerContext) -> Iterable[Sequence]:
        waiting = iter(waiting)
        due = ctx.clock - self.config.max_wait

        def found(seq: Sequence) -> int:
            """Return the cached prefix tokens; more than any prompt for a sequence that must not wait longer."""
            if seq.preemptions or seq.request.arrival <= due:
                return self.limits.max_len
            return ctx.kv_view.peek(seq)

        # Sorting is stable: ties stay in order of arrival.
        yield from sorted(islice(waiting, self.config.window), key=found, reverse=True)
        yield from waiting
