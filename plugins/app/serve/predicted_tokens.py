"""Counts how much of a predicted output (`prediction` of a chat request) the output contains."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

RUN = 3
"""Consecutive tokens that find an output again in its prediction after they differed."""


class PredictedTokens:
    """Follows each sample's output through the prediction, in its order: what both have is accepted, as in a diff.
    Each token takes constant time, plus a binary search where output and prediction differ."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = tuple(prediction)
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        """End of each run of RUN tokens in the prediction."""
        for end in range(RUN, len(self._prediction) + 1):
            self._places[self._prediction[end - RUN : end]].append(end)
        self._samples: defaultdict[int, _Position] = defaultdict(_Position)
        self.accepted = 0
        """Tokens of the prediction that are in the output, over all samples."""

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that are not in the output so far, over all samples."""
        return len(self._samples) * len(self._prediction) - self.accepted

    def add(self, sample: int, tokens: Sequence[int]) -> None:
        """Take new output of a sample."""
        position = self._samples[sample]
        for token in tokens:
            position.latest = (*position.latest[1 - RUN :], token)
            at = position.at
            if position.follows and at < len(self._prediction) and self._prediction[at] == token:
                position.at += 1
                self.accepted += 1
                continue
            ends = self._places.get(position.latest, ())
            found = bisect_left(ends, at + 1)
            position.follows = found < len(ends)
            if position.follows:
                self.accepted += min(ends[found] - at, RUN)
                position.at = ends[found]


class _Position:
    """Place of one sample's output in the prediction."""

    __slots__ = ("at", "follows", "latest")

    def __init__(self) -> None:
        self.at = 0
        """Tokens of the prediction that are passed. Those behind them may still be accepted."""
        self.follows = True
        """Whether the output goes on as the prediction does at `at`."""
        self.latest: tuple[int, ...] = ()
        """The last RUN tokens of the output."""
