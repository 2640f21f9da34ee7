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
        survival_N = np.where(wanted_RK, acceptance.survival(slots_R, uids_R), 0.0).reshape(-1)
        self._order_N = np.argsort(-survival_N, kind="stable")
        self._gain_N: NDArray[np.float64] = np.cumsum(survival_N[self._order_N])
        self.possible = int(self._most_R.sum())
        """Number of drafts that the rows may have."""

    def gain(self, drafts: int) -> float:
        """Return the expected number of accepted drafts among the first `drafts`."""
        return float(self._gain_N[min(drafts, self.possible) - 1]) if drafts and self.possible else 0.0

    def first(self, drafts: int) -> Mapping[int, int]:
        """Return the number of drafts of each row that is among the first `drafts`, by uid."""
        if not (drafts := min(drafts, self.possible)):
            return {}
        counts_R = np.bincount(self._order_N[:drafts] // self._lookahead, minlength=len(self._most_R))
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
