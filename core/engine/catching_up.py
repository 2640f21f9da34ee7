"""Chooses the rows with which a drafter catches up by chunks: rows that have fallen behind, where their drafts should
save more time than the chunks take, or for a trial. Shapes: R rows."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING

from dovetail.core.interfaces import CatchUp, CostModel, RowWork, SchedulerLimits, Sequence, StepPlan
from dovetail.core.interfaces.plan import DECODE

if TYPE_CHECKING:
    from dovetail.core.engine.following import Following

TRIAL_ROWS = 8
"""Most rows with which the drafter catches up for a trial."""
TRIAL_TOKENS = 16
"""Least tokens that such a row still has to produce."""
LATER = 2.0
"""Drafts of outputs should save this many times the time that the drafter takes for their prompts: it can also catch
up with these rows later, when it is known how many others run."""
LAST = 0.25
"""Share of the rows up to which those that are still behind are the last."""
PATIENCE = 8
"""Steps until rows are examined again that were not worth catching up with."""


class CatchingUp:
    """Rows with which the drafter of one scheduler catches up. Chunks take the tokens of the budget that a plan's rows
    leave, so they delay no prompt, and no step grows past the budget."""

    def __init__(self, limits: SchedulerLimits, following: Following) -> None:
        self._following, self._budget, self._window = following, limits.token_budget, limits.draft_window or 1
        self._tree = limits.draft_depth is not None and limits.draft_depth < limits.lookahead
        self.wanted: list[int] = []
        """Uids of the rows for the plan that the scheduler is building, in the order of their chunks."""
        self._tried: list[int] = []
        """Uids of the rows for the next trial."""
        self._begun: set[int] = set()
        """Uids of the rows that were chosen since drafts save more than chunks."""
        self._pause = 0
        """Steps for which rows are not examined."""

    def where_it_pays(self, decoding: list[Sequence], saved: float, cost: CostModel, *, proposals: bool) -> None:
        """Want those rows whose drafts should save more time than their chunks take. `saved`: seconds per output token.
        `proposals`: whether steps draft for other rows meanwhile, in which rows also catch up by a window each.

        The last rows (LAST) of those that were wanted are wanted until they have caught up. They would decode alone
        once the others, which have drafts, have ended."""
        if self._pause:
            self._pause -= 1
            return
        behind, work = self._behind(decoding)
        self._begun.intersection_update(seq.uid for seq, _ in behind)
        if not behind:
            return
        if self._begun and proposals and len(behind) <= LAST * len(decoding):
            self.wanted = [seq.uid for seq, _ in behind if seq.uid in self._begun]
            return
        first = cost.catch_up_seconds([RowWork(1, work.bound, 0)])
        each = max(cost.catch_up_seconds([work]) - first, 0.0) / (work.tokens * work.times)
        seconds, gain = first, 0.0
        for seq, tokens in behind:
            earlier = tokens / (self._window - 1) if proposals and self._window > 1 else float("inf")
            found = saved * min(seq.limit - seq.max_len, earlier)
            if found > each * tokens:
                self.wanted.append(seq.uid)
                seconds, gain = seconds + each * tokens, gain + found
        if gain <= seconds:
            self.wanted = []
            self._pause = PATIENCE
        self._begun.update(self.wanted)

    def for_trial(self, decoding: list[Sequence], step_seconds: float, cost: CostModel) -> float | None:
        """Want a few rows that are least behind, with chunks that take no longer than a step unless it is one row.
        Return the seconds of their chunks; None = every row is near its end."""
        tried: list[int] = []
        total, seconds, room = 0, 0.0, self._budget - len(decoding)
        for seq, tokens in self._behind(decoding)[0]:
            if seq.limit - seq.max_len < TRIAL_TOKENS:
                continue
            total += tokens
            rows = len(tried) + 1
            found = cost.catch_up_seconds([RowWork(-(-total // rows), seq.computed + 1, 0, rows)])
            if rows > TRIAL_ROWS or (tried and (total > room or found > step_seconds)):
                break
            tried.append(seq.uid)
            seconds = found
        self._tried = tried
        self.wanted = list(tried)
        return seconds if tried else None

    @property
    def trying(self) -> bool:
        """Whether rows for a trial were behind."""
        return bool(self._tried)

    def goes_on(self, decoding: list[Sequence]) -> bool:
        """Want the rows of the next trial that are still behind. Return whether there are some."""
        behind = {seq.uid for seq, _ in self._behind(decoding)[0]} if self._tried else ()
        self.wanted = self._tried = [uid for uid in self._tried if uid in behind]
        return bool(self.wanted)

    def add(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> None:
        """Write StepPlan.catch_up."""
        if not self.wanted:
            return
        rows = {row.uid: row for row in plan.rows if row.flags & DECODE}
        room = self._budget - plan.num_tokens
        for uid in self.wanted:
            if (row := rows.get(uid)) is None:
                continue
            # The row's length when the step begins, at most.
            end = row.bound - row.count + 1
            first = self._following.certain(row.slot)
            if (count := min(end - first, room)) <= 0:
                continue
            plan.catch_up.append(CatchUp(row.slot, first, count))
            self._following.caught_up(row.slot, first + count, sequences[uid].known_len)
            room -= count

    def _behind(self, decoding: list[Sequence]) -> tuple[list[tuple[Sequence, int]], RowWork]:
        """Return the rows that are behind with the number of tokens that the drafter lacks, the fewest first, and the
        work of feeding these as if all rows had equally many."""
        lacking_R = self._following.lacking(decoding)
        each = zip(decoding, lacking_R.tolist(), strict=True)
        lacking = (one for one in each if one[1] > self._window and self._may_have_drafts(one[0]))
        behind = sorted(lacking, key=itemgetter(1))
        rows = max(len(behind), 1)
        bound = sum(seq.computed for seq, _ in behind) // rows + 1
        return behind, RowWork(-(-sum(tokens for _, tokens in behind) // rows), bound, 0, rows)

    def _may_have_drafts(self, seq: Sequence) -> bool:
        """Masks of a grammar are for chains."""
        return not (self._tree and seq.request.params.grammar is not None)
