"""Decides in which steps drafts are verified: those in which they should yield more tokens per second than they cost.
The yield is the acceptance measured over the latest rows with drafts. The cost comes from the cost model, corrected by
the measured times of steps with and without drafts. Both kinds need measurements, so the one that is not in use is
tried from time to time, at growing intervals. After SmartSpec (Liu et al. 2024), except that all rows of a step have
drafts or none: each kind has its own CUDA graphs."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from dovetail.core.interfaces import CostModel, RowWork, StepPlan, StepResult
from dovetail.core.interfaces.plan import DECODE

HALF_LIFE_ROWS = 64
"""Rows with drafts after which the weight of older acceptance counts has halved."""
MIN_INTERVAL, MAX_INTERVAL = 16, 1024
"""Steps between two trials, at first and at most."""
TRIAL_ROWS = 32
"""Rows of one trial with drafts, over as many steps as that takes."""
FRUITLESS_ROWS = 8
"""A trial with drafts ends early once so many rows in a row have accepted none."""
SMOOTHING = 0.3
"""Weight of the newest measured time."""
LENGTH_BUCKET = 512
"""Sequence lengths are rounded to multiples of this for predictions."""


@dataclass(slots=True)
class _TimeRatio:
    """Smoothed ratio of measured to predicted step time. Outliers (kernel compilation, another process) are clamped to
    twice the ratio. A lower second sample replaces the first, which may itself be an outlier."""

    value: float = 1.0
    samples: int = 0

    def add(self, ratio: float) -> None:
        self.samples += 1
        if self.samples == 1 or (self.samples == 2 and ratio < self.value):
            self.value = ratio
        else:
            self.value += SMOOTHING * (min(ratio, 2 * self.value) - self.value)


@dataclass(slots=True)
class _Bucket:
    """Measurements and trials of steps with a similar number of rows."""

    drafts: bool = True
    """Whether these steps have drafts, trials aside."""
    interval: int = MIN_INTERVAL
    """Steps between two trials."""
    left: int = MIN_INTERVAL
    """Steps until the next trial."""
    trials: int = 0
    plain_time: _TimeRatio = field(default_factory=_TimeRatio)
    draft_time: _TimeRatio = field(default_factory=_TimeRatio)

    @property
    def measured(self) -> bool:
        return self.plain_time.samples > 1 and self.draft_time.samples > 1


class Drafting:
    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        # Prior: a row accepts one draft.
        self._accepted = self._rows = 1.0
        self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)
        """Buckets by bit length of the number of rows."""
        self._trial_rows = 0
        """Rows left in the current trial."""
        self._trial_drafts = False
        """Whether the current trial has drafts."""
        self._fruitless = 0
        """Latest rows with drafts, at most those since the last trial began, that all accepted none."""
        self._chosen: tuple[int, int] | None = None
        """(decode rows, mean length) of the plan that the scheduler is building."""
        self._launched: deque[tuple[int, int] | None] = deque()
        """The same of each plan in flight."""
        self._predicted: dict[tuple[int, int, bool], float] = {}
        self._cost: CostModel | None = None

    @property
    def accepted(self) -> float:
        """Expected number of accepted drafts per row."""
        return self._accepted / self._rows

    def choose(self, rows: int, length: int, cost: CostModel) -> int:
        """Return the number of drafts of each decode row in the next step. `length`: mean number of keys per row."""
        self._cost, self._chosen = cost, (rows, length)
        if self._trial_rows > 0:
            self._trial_rows -= rows
            return self._lookahead * self._trial_drafts
        bucket = self._buckets[rows.bit_length()]
        if (drafts := self._gain(rows, length, cost, bucket) > 1) is not bucket.drafts:
            bucket.drafts, bucket.interval, bucket.left = drafts, MIN_INTERVAL, MIN_INTERVAL
        bucket.left -= 1
        if not bucket.left:
            bucket.trials += 1
            # One trial alone is too little evidence: repeat it soon.
            bucket.interval = MIN_INTERVAL if bucket.trials == 1 else min(2 * bucket.interval, MAX_INTERVAL)
            bucket.left = bucket.interval
            self._trial_drafts = not drafts
            # A trial without drafts measures only the step time, for which one step is enough.
            self._trial_rows = TRIAL_ROWS if self._trial_drafts else 1
            self._fruitless = 0
        return self._lookahead * drafts

    def launched(self, plan: StepPlan | None) -> None:
        """Take the plan that the last choice was made for; None = nothing could run."""
        if plan is not None:
            self._launched.append(self._chosen)
        self._chosen = None

    def _gain(self, rows: int, length: int, cost: CostModel, bucket: _Bucket) -> float:
        """Return tokens per second with drafts, relative to those without."""
        plain, drafted = (self._seconds(rows, length, drafts, cost) for drafts in (False, True))
        if bucket.measured:
            plain *= bucket.plain_time.value
            drafted *= bucket.draft_time.value
        return (1 + self.accepted) * plain / drafted if drafted else float("inf")

    def _seconds(self, rows: int, length: int, drafts: bool, cost: CostModel) -> float:
        """Return the predicted step time."""
        key = rows, length // LENGTH_BUCKET, drafts
        if (found := self._predicted.get(key)) is None:
            if len(self._predicted) > 1 << 14:
                self._predicted.clear()
            tokens = 1 + drafts * self._lookahead
            work = RowWork(tokens, (length // LENGTH_BUCKET + 1) * LENGTH_BUCKET, tokens, rows)
            found = self._predicted[key] = cost.step_seconds([work])
        return found

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Take the result of the oldest launched plan."""
        launched = self._launched.popleft()
        drafts = any(row.draft for row in plan.rows)
        if drafts:
            # The yield is that of the whole step: rows without drafts (grammar, near the limit) count as well.
            decodes = [out.tokens for row, out in zip(plan.rows, result.rows, strict=True) if row.flags & DECODE]
            weight = 0.5 ** (len(decodes) / HALF_LIFE_ROWS)
            self._rows = weight * self._rows + len(decodes)
            accepted = sum(max(len(tokens) - 1, 0) for tokens in decodes)
            self._accepted = weight * self._accepted + accepted
            self._fruitless = 0 if accepted else self._fruitless + len(decodes)
            if self._trial_drafts and self._fruitless >= FRUITLESS_ROWS:
                self._trial_rows = 0
        # The time of a step with prefill chunks is not that of its decode rows.
        if launched is None or self._cost is None or not result.device_seconds or not plan.rows[-1].flags & DECODE:
            return
        rows, length = launched
        if (predicted := self._seconds(rows, length, drafts, self._cost)) > 0:
            bucket = self._buckets[rows.bit_length()]
            # All rows ran before this step, so idle time before it was host time: drafting on the host, for one.
            measured = result.device_seconds + result.idle_seconds
            (bucket.draft_time if drafts else bucket.plain_time).add(measured / predicted)
