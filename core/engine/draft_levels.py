"""Levels of drafting, among which steps choose: a mean number of drafts per row, and the most of a row, since a drafter
that makes one draft after the other needs as many passes as that."""

from __future__ import annotations

from collections.abc import Sequence

MEANS = 0.5, 1, 2, 3, 4, 6, 8, 12, 16
"""Mean drafts per row of the levels between none and all."""


class Levels:
    def __init__(self, lookahead: int, counts: Sequence[int] = ()) -> None:
        """`counts`: SchedulerLimits.draft_counts. Level 0 has no drafts; the last one all."""
        self._lookahead, self._counts = lookahead, counts or (lookahead,)
        # Each count is also a mean: `lowest` finds a level for rows that all have so many drafts.
        means = (*sorted(mean for mean in {*MEANS, *self._counts} if mean < lookahead), lookahead)
        pairs = ((mean, each) for mean in means for each in (self._count(mean), lookahead))
        self._all = [(0.0, 0), *dict.fromkeys(pairs)]
        self._of: dict[int, list[int]] = {}

    def of(self, rows: int) -> list[int]:
        """Return level 0, and those that have drafts for so many rows. No row needs to be allowed more drafts than the
        step has."""
        if (found := self._of.get(rows)) is None:
            found = self._of[rows] = [0]
            for level in range(1, len(self._all)):
                drafts, each = self.drafts(level, rows)
                if drafts and each <= self._count(min(drafts, self._lookahead)):
                    found.append(level)
        return found

    def drafts(self, level: int, rows: int) -> tuple[int, int]:
        """Return the number of drafts of a step, and the most of a row."""
        mean, each = self._all[level]
        return int(mean * rows), each

    def lowest(self, drafts: int, most: int, rows: int) -> int:
        """Return the lowest level of steps with so many drafts, of which a row has `most`."""
        each = self._count(most) if drafts else 0
        return next(i for i, (mean, of) in enumerate(self._all) if of == each and int(mean * rows) >= drafts)

    def _count(self, least: float) -> int:
        """Return the smallest number of drafts for which the drafter has passes, from `least` on."""
        return next(count for count in self._counts if count >= least)
