"""Which rows a drafter can draft for, if it must have followed their text. Shapes: R rows, S slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.interfaces import Sequence

_LOST = -(1 << 40)


class Following:
    """How many tokens of each row the drafter has fed to its own layers. It feeds prompts together with the target, and
    in each step with drafts up to `window` further tokens of every decode row. Steps without drafts leave it behind."""

    def __init__(self, slots: int, window: int | None, *, resumes: bool) -> None:
        """`window`, `resumes`: those of the drafter (Drafter.window, Drafter.resumes)."""
        self._window, self._resumes = window, resumes
        self._entry_S2 = np.full((slots, 2), -1, np.int64)
        """(uid, epoch) of the sequence in each slot."""
        self._known_S = np.zeros(slots, np.int64)
        """Its tokens that the drafter knows, an upper bound while results are missing."""

    @property
    def needed(self) -> bool:
        """Whether steps without drafts leave rows behind."""
        return self._window is not None

    def able(self, rows: list[Sequence], steps: int = 0) -> NDArray[np.bool_]:
        """Return which decode rows the drafter can draft for after `steps` steps without drafts, [R]."""
        if self._window is None:
            return np.ones(len(rows), np.bool_)
        slots_R, computed_R = self._look_at(rows)
        return computed_R + steps - self._known_S[slots_R] < self._window

    def drafted(self, rows: list[Sequence]) -> None:
        """Note that the next step has drafts. `rows`: all its decode rows, not planned yet."""
        if self._window is None:
            return
        slots_R, computed_R = self._look_at(rows)
        known_R = self._known_S[slots_R]
        reached_R = np.minimum(known_R + self._window, computed_R + 1)
        if not self._resumes:
            reached_R = np.where(computed_R - known_R < self._window, reached_R, _LOST)
        self._known_S[slots_R] = reached_R

    def had_none(self, slot: int) -> bool:
        """Note that a row had no drafts where some were planned. Return whether the drafter had fallen behind: it has
        drafts for each row that it follows."""
        if self._window is None:
            return False
        if not self._resumes:
            self._known_S[slot] = _LOST
        return True

    def _look_at(self, rows: list[Sequence]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return slots and computed tokens of the rows, after sequences that are new in their slots are noted."""
        columns = [(seq.slot, seq.computed, seq.uid, seq.epoch) for seq in rows]
        slots_R, computed_R, *entry_2R = np.array(columns, np.int64).T
        entry_R2 = np.stack(entry_2R, 1)
        for i in np.flatnonzero((self._entry_S2[slots_R] != entry_R2).any(1)).tolist():
            # The output of a preempted sequence is fed as a prompt. Of others, only the prompt was.
            seq = rows[i]
            self._known_S[seq.slot] = seq.computed if seq.epoch else min(seq.computed, seq.prompt_len)
        self._entry_S2[slots_R] = entry_R2
        # Drafts that were rejected since are known no longer.
        self._known_S[slots_R] = np.minimum(self._known_S[slots_R], computed_R)
        return slots_R, computed_R
