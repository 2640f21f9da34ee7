"""Whether a step verifies drafts: where they are expected to bring more tokens a second than they cost.

What they bring is counted, over the rows of the latest steps. What they cost the cost model says, corrected by the
device's own time of steps with drafts and of steps without. So whichever is not the rule is tried now and then, ever
less often. After SmartSpec (Liu et al. 2024); here a step has all drafts or none, since steps of either kind have CUDA
graphs of their own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from dovetail.core.interfaces import CostModel, Row, RowFlag, RowResult, RowWork, StepPlan, StepResult

DECODE = int(RowFlag.DECODE)

MEMORY = 64
"""Rows after which what was counted before weighs half."""
SOON, SELDOM = 16, 1024
"""Steps between two trials, at first and at last."""
TRIED = 32
"""Rows of a trial of drafts, in as many steps as it takes; of one without them the time alone is asked."""
SMOOTH = 0.3
"""Weight of the newest step in what the device is said to take."""
BLOCK = 512
"""Keys of a row by which predictions are told apart."""

Kind = tuple[int, bool]
"""Bits of the number of rows, and whether they have drafts."""


class Drafting:
    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        # Before anything is known a row is expected to accept one draft.
        self._accepted = self._rows = 1.0
        self._taken: dict[Kind, float] = {}
        """Seconds that the device took, over those predicted."""
        self._predicted: dict[tuple[int, int, bool], float] = {}
        self._cost: CostModel | None = None
        self._rule = True
        """Whether steps have drafts."""
        self._wait = self._left = SOON
        """Steps between two trials, and to the next."""
        self._trial = 0
        """Steps that the trial has still to run."""

    @property
    def accepted(self) -> float:
        """Drafts that a row is expected to accept."""
        return self._accepted / self._rows

    def choose(self, rows: int, length: int, cost: CostModel) -> int:
        """Drafts of each decode row of the next step; `length`: keys of one of them."""
        self._cost = cost
        if self._trial:
            self._trial -= 1
            return 0 if self._rule else self._lookahead
        kinds = (rows.bit_length(), False), (rows.bit_length(), True)
        known = all(kind in self._taken for kind in kinds)
        drafts = self._gain(rows, length, cost, known) > 1
        if drafts is not self._rule:
            self._rule, self._wait, self._left = drafts, SOON, SOON
        self._left = (self._left if known else min(self._left, SOON)) - 1
        if not self._left:
            self._wait = min(2 * self._wait, SELDOM)
            self._left, self._trial = self._wait, 2 if self._rule else -(-TRIED // rows)
        return self._lookahead if self._rule else 0

    def _gain(self, rows: int, length: int, cost: CostModel, known: bool) -> float:
        """Tokens a second with drafts, over those without."""
        without, drafts = (self._seconds(rows, length, drafts, cost) for drafts in (False, True))
        if known:
            without *= self._taken[rows.bit_length(), False]
            drafts *= self._taken[rows.bit_length(), True]
        return (1 + self.accepted) * without / drafts

    def _seconds(self, rows: int, length: int, drafts: bool, cost: CostModel) -> float:
        """Predicted."""
        key = rows, length // BLOCK, drafts
        if (found := self._predicted.get(key)) is None:
            if len(self._predicted) > 1 << 14:
                self._predicted.clear()
            tokens = 1 + drafts * self._lookahead
            work = RowWork(tokens, (length // BLOCK + 1) * BLOCK, tokens, rows)
            found = self._predicted[key] = cost.step_seconds([work])
        return found

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Of every plan, in order."""
        verified = [(row, came) for row, came in zip(plan.rows, result.rows, strict=True) if row.draft and came.tokens]
        if verified:
            self._count(verified)
        if self._cost is None or not result.device_seconds or not all(row.flags & DECODE for row in plan.rows):
            return
        rows, length, drafts = len(plan.rows), plan.rows[0].bound, bool(verified)
        if (predicted := self._seconds(rows, length, drafts, self._cost)) > 0:
            kind, now = (rows.bit_length(), drafts), result.device_seconds / predicted
            before = self._taken.get(kind, now)
            self._taken[kind] = before + SMOOTH * (now - before)

    def _count(self, verified: Seq[tuple[Row, RowResult]]) -> None:
        kept = 0.5 ** (len(verified) / MEMORY)
        self._rows = kept * self._rows + len(verified)
        self._accepted = kept * self._accepted + sum(len(came.tokens) - 1 for _, came in verified)
