"""Which rows a drafter can draft for, if it must have followed their text. Shapes: R rows, S slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.core.engine.draft_pages import DraftPages
from dovetail.core.interfaces.plan import DECODE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.interfaces import KVGroup, SchedulerLimits, Sequence, StepPlan

_LOST = -(1 << 40)


class Following:
    """How many tokens of each row the drafter has fed to its own layers. It feeds prompts together with the target, in
    plans that say so (StepPlan.follows), in each step with drafts up to `window` further tokens of every decode
    row, and chunks of earlier tokens (StepPlan.catch_up). Other steps leave rows behind."""

    def __init__(self, limits: SchedulerLimits, group: KVGroup | None) -> None:
        """`group`: see DraftPages; None = no sequence takes over pages of another."""
        self._window, self._resumes = limits.draft_window, limits.draft_resumes
        self._known_S = np.zeros(limits.max_seqs, np.int64)
        """Tokens of the sequence in each slot that the drafter knows, an upper bound while results are missing."""
        self._certain_S = np.zeros(limits.max_seqs, np.int64)
        """Tokens of it that the drafter surely knows, as long as `_known_S` says no better."""
        self._uncertain = limits.depth * (self._window or 0)
        """Tokens of a decode row, at most, that count as known and are not, while results are missing."""
        self._pages = None
        if self._window is not None and group is not None:
            self._pages = DraftPages(group, limits.max_seqs)

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

    def lacking(self, rows: list[Sequence]) -> NDArray[np.int64]:
        """Return how many tokens of each decode row, its last one included, the drafter lacks, [R]."""
        slots_R, computed_R = self._look_at(rows)
        lacking_R: NDArray[np.int64] = computed_R + 1 - self._known_S[slots_R]
        return lacking_R

    def certain(self, slot: int) -> int:
        """Return how many tokens of the slot the drafter surely knows."""
        return max(int(self._certain_S[slot]), int(self._known_S[slot]) - self._uncertain)

    def caught_up(self, slot: int, end: int, exist: int) -> None:
        """Note that a plan feeds the slot's tokens before index `end`, as far as they exist when it runs: `exist` of
        them do for certain."""
        self._certain_S[slot] = max(self.certain(slot), min(end, exist))
        self._known_S[slot] = max(int(self._known_S[slot]), end)

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

    def planned(self, plan: StepPlan) -> None:
        """Note a plan's joins and chunks of prompts. Write Join.lacking."""
        if self._pages is not None:
            self._move_pages(plan, self._pages)
        for i, join in enumerate(plan.joins):
            known = join.computed
            if self._pages is not None and known:
                known = self._pages.known(join.slot, known)
                if known < join.computed:
                    plan.joins[i] = join._replace(lacking=join.computed - known)
            self._known_S[join.slot] = self._certain_S[join.slot] = known
        if not plan.follows:
            return
        for row in reversed(plan.rows):
            if row.flags & DECODE:
                break
            # The KV after a gap is wrong.
            if self._known_S[row.slot] >= row.bound - row.count:
                self._known_S[row.slot] = self._certain_S[row.slot] = row.bound
                if self._pages is not None:
                    self._pages.fill(row.slot, row.bound)

    def _move_pages(self, plan: StepPlan, pages: DraftPages) -> None:
        """Note which sequence has which pages from this plan on."""
        for slot in plan.leaves:
            pages.fill(slot, int(self._known_S[slot]) - self._uncertain)
            pages.leave(slot)
        pages.copy(plan.ops)
        joining = {join.slot: join.computed for join in plan.joins}
        for slot in pages.take(plan.pages, joining) - joining.keys():
            pages.fill(slot, int(self._known_S[slot]) - self._uncertain)

    def had_none(self, slot: int) -> bool:
        """Note that a row had no drafts where some were planned. Return whether the drafter had fallen behind: it has
        drafts for each row that it follows."""
        if self._window is None:
            return False
        if not self._resumes:
            self._known_S[slot] = _LOST
        return True

    def _look_at(self, rows: list[Sequence]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return slots and computed tokens of the rows."""
        slots_R, computed_R = np.array([(seq.slot, seq.computed) for seq in rows], np.int64).T
        # Drafts that were rejected since are known no longer.
        self._known_S[slots_R] = np.minimum(self._known_S[slots_R], computed_R)
        return slots_R, computed_R
