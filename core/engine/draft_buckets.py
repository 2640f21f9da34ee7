"""Measured times, the level in use, and trials of drafts, in steps with a similar number of rows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

MIN_INTERVAL = 16
"""Steps between two trials at first."""
SMOOTHING = 0.3
"""Weight of the newest measured time."""


@dataclass(slots=True)
class TimeRatio:
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
class Bucket:
    """Measurements and trials of steps with a similar number of rows."""

    level: int = -1
    """Level in use, trials aside; -1 = none was chosen yet."""
    interval: int = MIN_INTERVAL
    """Steps between two trials."""
    left: float = MIN_INTERVAL
    """Steps until the next trial."""
    hold: int = 0
    """Steps for which no drafts remain the choice."""
    latest: int | None = None
    """Uid of the latest row if the rows, not their acceptance, were the reason for `hold`: another one may have drafts,
    and if the drafter must follow it, at once or never."""
    trials: int = 0
    pays: bool = True
    """Whether drafts would pay if all rows could have them."""
    saved: float = float("inf")
    """Seconds per output token that they would save then."""
    length: int = 0
    """Mean length of the rows to which `saved` applies; 0 = none was measured."""
    prepared: bool = False
    """Whether the drafter has followed a prompt for the next trial, which begins with that row."""
    skip: float = 0.0
    """Further steps with prompts that the drafter does not follow: trials delay few of them."""
    times: defaultdict[int, TimeRatio] = field(default_factory=lambda: defaultdict(TimeRatio))
    """Time ratios by level."""

    def ratio(self, level: int) -> float:
        """Return the ratio of the level. If it is not measured, return that of the nearest level, those with drafts
        first."""
        known = [other for other, time in self.times.items() if time.samples > 1]
        nearest = min(known, key=lambda other: (other != level, not other, abs(other - level)), default=None)
        return 1.0 if nearest is None else self.times[nearest].value
