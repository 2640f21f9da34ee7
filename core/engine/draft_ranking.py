"""Drafts of all rows of a step, the most likely to be accepted first. Shapes: R rows, K drafts of a row, N = R * K."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from dovetail.core.engine.acceptance import Acceptance
from dovetail.core.interfaces import Sequence

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Ranking:
    """Drafts of all rows of a step, the most likely to be accepted first."""

    def __init__(
        self,
        acceptance: Acceptance,
        rows: list[Sequence],
        lookahead: int,
        depth: int,
        able_R: NDArray[np.bool_] | None,
    ) -> None:
        """`able_R`: which rows the drafter can draft for; None = all, and as if each had room for all drafts."""
        self._uids, self._lookahead = [seq.uid for seq in rows], lookahead
        slots_R, uids_R = np.array([seq.slot for seq in rows]), np.array(self._uids)
        self._most_R = np.full(len(rows), lookahead)
        if able_R is not None:
            # No drafts past a sequence's limit.
            self._most_R = np.where(able_R, [_most_drafts(seq, lookahead, depth) for seq in rows], 0)
        self._last_R = acceptance.last_drafted(slots_R, uids_R)
        wanted_RK = np.arange(lookahead) < self._most_R[:, None]
        self._survival_N = np.where(wanted_RK, acceptance.survival(slots_R, uids_R), 0.0).reshape(-1)
        self._order_N = np.argsort(-self._survival_N, kind="stable")[: self._most_R.sum()]
        self._within: dict[int, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        self.possible = len(self._order_N)
        """Number of drafts that the rows may have."""

    def _each_at_most(self, each: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the drafts in their order, and the expected number of accepted ones among the first 0, 1, ... of them,
        if a row has at most `each`."""
        if (found := self._within.get(each)) is None:
            order_M = self._order_N
            if each < self._lookahead:
                order_M = order_M[order_M % self._lookahead < each]
            found = self._within[each] = order_M, np.concatenate(([0.0], self._survival_N[order_M].cumsum()))
        return found

    def gain(self, drafts: int, each: int) -> float:
        """Return the expected number of accepted drafts among the first `drafts`, with at most `each` of a row."""
        gain_M1 = self._each_at_most(each)[1]
        return float(gain_M1[min(drafts, len(gain_M1) - 1)])

    def first(self, drafts: int, each: int) -> Mapping[int, int]:
        """Return the number of drafts of each row that is among the first `drafts`, by uid, with at most `each` of a
        row."""
        order_M = self._each_at_most(each)[0][:drafts]
        if not len(order_M):
            return {}
        counts_R = np.bincount(order_M // self._lookahead, minlength=len(self._most_R))
        return {uid: count for uid, count in zip(self._uids, counts_R.tolist(), strict=True) if count}

    def least_known(self, drafts: int) -> Mapping[int, int]:
        """Return one draft for each of the `drafts` rows that had none for longest."""
        order_R = np.argsort(self._last_R, kind="stable")
        order_R = order_R[self._most_R[order_R] > 0][:drafts]
        return {self._uids[i]: 1 for i in order_R.tolist()}


def _most_drafts(seq: Sequence, lookahead: int, depth: int) -> int:
    if depth < lookahead and seq.request.params.grammar is not None:
        return 0  # Masks of the grammar are for chains.
    room = seq.limit - seq.max_len
    # A tree of fewer drafts than the room is not deeper.
    return lookahead if depth < room else max(room - 1, 0)
