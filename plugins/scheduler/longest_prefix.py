"""The longest cached prefix first: cache-aware scheduling of SGLang (Zheng et al. 2023), with a limit to waiting."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import SchedulerContext, Sequence
from dovetail.plugins.scheduler.config import LongestPrefixConfig


class LongestPrefixScheduler(PolicyScheduler):
    """Of the `window` oldest, those enter first that find most of their prompt in the cache; the others by arrival.

    Preempted sequences and those that have waited for max_wait go before, so nobody starves. With a cache that keeps
    nothing (kv_cache=paged) the order is that of arrival.
    """

    config: LongestPrefixConfig

    def order(self, waiting: Iterable[Sequence], ctx: SchedulerContext) -> Iterable[Sequence]:
        waiting = iter(waiting)
        due = ctx.clock - self.config.max_wait

        def found(seq: Sequence) -> int:
            """Cached prefix tokens; past any prompt for who must not wait longer."""
            if seq.preemptions or seq.request.arrival <= due:
                return self.limits.max_len
            return ctx.kv_view.peek(seq)

        # Sorting is stable: equals stay in order of arrival.
        yield from sorted(islice(waiting, self.config.window), key=found, reverse=True)
        yield from waiting
