"""Decides how long the next launch can be delayed without the device becoming idle (engine.late_launch). A plan made as
early as possible misses a request that arrives a moment later: that one waits for the step that runs and for the one
queued behind it. A plan made just before the device needs it includes the request, which then waits for one step
less."""

from __future__ import annotations

from collections import deque
from operator import itemgetter

from dovetail.core.interfaces import Row, StepPlan, StepResult
from dovetail.core.interfaces.plan import DECODE

HISTORY = 16
"""Number of measured steps that predict the next one."""
MIN_DELAY = 2e-4
"""Seconds; a shorter delay is not worth a wait."""
MIN_WAIT = 50e-6
"""Seconds that the host must have waited for a result. Otherwise it is unknown how long ago the step ended."""
MIN_SLACK, MAX_SLACK = 200e-6, 2e-3
"""Seconds between a launch and the predicted end of the device's work."""
DECAY = 0.97
"""Factor per step for the slack and the launch time."""
_BOUND, _COUNT = itemgetter(Row._fields.index("bound")), itemgetter(Row._fields.index("count"))


class LaunchTimer:
    """Timer of one engine with two plans in flight, fed with every launch and result. Times: time.perf_counter's."""

    def __init__(self) -> None:
        self._history: deque[tuple[int, int, float]] = deque(maxlen=HISTORY)
        """(tokens, keys, seconds on the device) of steps without prefill."""
        self._idle_at = 0.0
        """Earliest time at which the device finishes its work; 0 = unknown."""
        self._launch_seconds = 0.0
        """Host time of a launch: decaying maximum."""
        self._slack = MIN_SLACK
        self._delayed = False
        """Whether the next launch was delayed."""

    def delay(self, now: float) -> float:
        """Return the seconds by which to delay a launch; 0 = launch now."""
        seconds = self._idle_at - now - self._launch_seconds - self._slack
        if seconds < MIN_DELAY:
            return 0.0
        self._delayed = True
        return seconds

    def launched(self, plan: StepPlan, seconds: float) -> bool:
        """Take a launch that took `seconds`. Return whether it was delayed."""
        if _decodes_only(plan):
            self._launch_seconds = max(seconds, self._launch_seconds * DECAY)
        self._idle_at = 0.0
        delayed, self._delayed = self._delayed, False
        return delayed

    def observe(
        self, plan: StepPlan, result: StepResult, delayed: bool, waited: float, now: float, running: StepPlan | None
    ) -> None:
        """Take a result that arrived `now`, after the host waited for it for `waited` seconds. `delayed`: `launched`
        returned True for this plan and the device had work before it. `running`: the plan that the device runs now."""
        if _decodes_only(plan) and result.device_seconds:
            self._history.append((_tokens(plan), _keys(plan), result.device_seconds))
        self._delayed = False
        # If the delay made the device idle, later launches come earlier by twice the idle time.
        missed = result.idle_seconds if delayed else 0.0
        self._slack = min(max(self._slack * DECAY, MIN_SLACK) + 2.0 * missed, MAX_SLACK)
        # The device runs steps in order: it began the next one when it finished this one.
        seconds = 0.0 if running is None or waited < MIN_WAIT else self._min_seconds(running)
        self._idle_at = now + seconds if seconds else 0.0

    def _min_seconds(self, plan: StepPlan) -> float:
        """Return the time of the fastest measured step with no more tokens and keys than `plan`; 0 = unknown."""
        most_tokens, most_keys = _tokens(plan), _keys(plan)
        return min((s for tokens, keys, s in self._history if tokens <= most_tokens and keys <= most_keys), default=0.0)


def _decodes_only(plan: StepPlan) -> bool:
    """Whether the plan feeds no prompt: decode rows come first."""
    return bool(plan.rows) and bool(plan.rows[-1].flags & DECODE)


def _tokens(plan: StepPlan) -> int:
    return sum(map(_COUNT, plan.rows))


def _keys(plan: StepPlan) -> int:
    return sum(map(_BOUND, plan.rows))
