"""How long the next launch may wait without the device running dry: requests that come meanwhile are in that step.

A plan that is made as early as possible knows nothing of a request that comes a moment later: that one waits for the
step that runs and for the one enqueued behind it. Made just before the device needs it, the plan has the request, and
what it costs is one wait less.
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter

from dovetail.core.interfaces import Row, StepPlan, StepResult
from dovetail.core.interfaces.plan import DECODE

SEEN = 16
"""Steps whose time is remembered."""
SHORTEST = 2e-4
"""Seconds that it is worth to wait."""
ANCHOR = 50e-6
"""Seconds for which a result must have been waited for: one that was there already may be any time old."""
LEAST_SLACK, MOST_SLACK = 200e-6, 2e-3
"""Seconds before the device's end at which a plan is there."""
EASING = 0.97
"""Of the slack and of what a launch takes, from one step to the next."""
_BOUND, _COUNT = itemgetter(Row._fields.index("bound")), itemgetter(Row._fields.index("count"))


class LaunchTimer:
    """Of one engine with two plans in flight. Told of every launch and every result; clocks are time.perf_counter's."""

    def __init__(self) -> None:
        self._decodes: deque[tuple[int, int, float]] = deque(maxlen=SEEN)
        """(tokens, keys, seconds on the device) of steps that fed no prompt."""
        self._free_at = 0.0
        """When the device will have ended all that it was given, at the earliest; 0 = unknown."""
        self._launch = 0.0
        """Seconds that a launch takes the host: the most of late."""
        self._slack = LEAST_SLACK
        self._waited = False
        """The next launch was put off."""

    def delay(self, now: float) -> float:
        """Seconds for which a launch is to wait; 0 = launch now."""
        seconds = self._free_at - now - self._launch - self._slack
        if seconds < SHORTEST:
            return 0.0
        self._waited = True
        return seconds

    def launched(self, plan: StepPlan, seconds: float) -> bool:
        """Whether the launch, which took so long, was put off."""
        if _decodes(plan):
            self._launch = max(seconds, self._launch * EASING)
        self._free_at = 0.0
        waited, self._waited = self._waited, False
        return waited

    def observe(
        self, plan: StepPlan, result: StepResult, put_off: bool, waited: float, now: float, left: StepPlan | None
    ) -> None:
        """A result that was waited for so many seconds, until now; `left`: the plan that the device still has.
        `put_off`: what `launched` said of this one, where the device had work before it."""
        if _decodes(plan) and result.device_seconds:
            self._decodes.append((_tokens(plan), _keys(plan), result.device_seconds))
        self._waited = False
        # Where the device had nothing to do before it, launches are to come earlier by as much, and twice that.
        late = result.idle_seconds if put_off else 0.0
        self._slack = min(max(self._slack * EASING, LEAST_SLACK) + 2.0 * late, MOST_SLACK)
        # The device ends steps in order: it begins the next one as this one's result is there.
        seconds = 0.0 if left is None or waited < ANCHOR else self._at_least(left)
        self._free_at = now + seconds if seconds else 0.0

    def _at_least(self, plan: StepPlan) -> float:
        """Seconds: the quickest of the steps seen last that had no more tokens and keys; 0 = unknown."""
        count, length = _tokens(plan), _keys(plan)
        seen = self._decodes
        return min((seconds for tokens, keys, seconds in seen if tokens <= count and keys <= length), default=0.0)


def _decodes(plan: StepPlan) -> bool:
    """Whether it feeds no prompt: decode rows come first."""
    return bool(plan.rows) and bool(plan.rows[-1].flags & DECODE)


def _tokens(plan: StepPlan) -> int:
    """One a row, and its drafts, which some steps have and others not."""
    return sum(map(_COUNT, plan.rows))


def _keys(plan: StepPlan) -> int:
    return sum(map(_BOUND, plan.rows))
