"""Whether a step verifies drafts: where they are expected to bring more tokens a second than they cost.

What they bring is counted, over the rows of the latest steps that had some. What they cost the cost model says,
corrected by the time that steps with drafts and steps without have really taken. So whichever is not the rule is tried
now and then, ever less often. After SmartSpec (Liu et al. 2024); here a step has all drafts or none, since steps of
either kind have CUDA graphs of their own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from dovetail.core.interfaces import CostModel, RowWork, StepPlan, StepResult
from dovetail.core.interfaces.plan import DECODE

MEMORY = 64
"""Rows after which what was counted before weighs half."""
SOON, SELDOM = 16, 1024
"""Steps between two trials, at first and at last."""
TRIED = 32
"""Rows of a trial of drafts, in as many steps as it takes."""
SMOOTH = 0.3
"""Weight of the newest time."""
BLOCK = 512
"""Keys of a row by which predictions are told apart."""


@dataclass(slots=True)
class _Time:
    """Seconds that steps of a kind take, over those predicted. One that took far longer compiled a kernel, or waited
    for somebody: it counts as twice as long, and the first is not believed alone."""

    ratio: float = 1.0
    seen: int = 0

    def add(self, ratio: float) -> None:
        self.seen += 1
        if self.seen == 1 or (self.seen == 2 and ratio < self.ratio):
            self.ratio = ratio
        else:
            self.ratio += SMOOTH * (min(ratio, 2 * self.ratio) - self.ratio)


@dataclass(slots=True)
class _Size:
    """What is known of steps of about so many rows."""

    rule: bool = True
    """Whether they have drafts."""
    wait: int = SOON
    """Steps between two trials."""
    left: int = SOON
    """Steps to the next one."""
    trials: int = 0
    without: _Time = field(default_factory=_Time)
    drafted: _Time = field(default_factory=_Time)

    @property
    def known(self) -> bool:
        return self.without.seen > 1 and self.drafted.seen > 1


Asked = tuple[int, int]
"""Decode rows of a step, and the mean of their lengths."""


class Drafting:
    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        # Before anything is known a row is expected to accept one draft.
        self._accepted = self._rows = 1.0
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)
        """By the bits of their number of rows."""
        self._trial = 0
        """Rows that the trial has still to run."""
        self._tries = False
        """Whether it has drafts."""
        self._asked: Asked | None = None
        """For the plan in the making."""
        self._launched: deque[Asked | None] = deque()
        self._predicted: dict[tuple[int, int, bool], float] = {}
        self._cost: CostModel | None = None

    @property
    def accepted(self) -> float:
        """Drafts that a row is expected to accept."""
        return self._accepted / self._rows

    def choose(self, rows: int, length: int, cost: CostModel) -> int:
        """Drafts of each decode row of the next step. `length`: mean keys of one."""
        self._cost, self._asked = cost, (rows, length)
        if self._trial > 0:
            self._trial -= rows
            return self._lookahead * self._tries
        size = self._sizes[rows.bit_length()]
        if (rule := self._gain(rows, length, cost, size) > 1) is not size.rule:
            size.rule, size.wait, size.left = rule, SOON, SOON
        size.left -= 1
        if not size.left:
            size.trials += 1
            # The first alone is not believed.
            size.left = size.wait = SOON if size.trials == 1 else min(2 * size.wait, SELDOM)
            self._tries = not rule
            # Of a step without drafts the time alone is asked.
            self._trial = TRIED if self._tries else 1
        return self._lookahead * rule

    def launched(self, plan: StepPlan | None) -> None:
        """What became of the choice; None = there was nothing to run."""
        if plan is not None:
            self._launched.append(self._asked)
        self._asked = None

    def _gain(self, rows: int, length: int, cost: CostModel, size: _Size) -> float:
        """Tokens a second with drafts, over those without."""
        without, drafted = (self._seconds(rows, length, drafts, cost) for drafts in (False, True))
        if size.known:
            without *= size.without.ratio
            drafted *= size.drafted.ratio
        return (1 + self.accepted) * without / drafted if drafted else float("inf")

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
        """Of every plan that was launched, in order."""
        asked = self._launched.popleft()
        drafts = any(row.draft for row in plan.rows)
        if drafts:
            # Rows without any, of a grammar or near their end, are in the step all the same.
            decodes = [came.tokens for row, came in zip(plan.rows, result.rows, strict=True) if row.flags & DECODE]
            kept = 0.5 ** (len(decodes) / MEMORY)
            self._rows = kept * self._rows + len(decodes)
            self._accepted = kept * self._accepted + sum(max(len(tokens) - 1, 0) for tokens in decodes)
        # What a step with prompts took says nothing of its decode rows.
        if asked is None or self._cost is None or not result.device_seconds or not plan.rows[-1].flags & DECODE:
            return
        rows, length = asked
        if (predicted := self._seconds(rows, length, drafts, self._cost)) > 0:
            size = self._sizes[rows.bit_length()]
            # All rows ran before: what the device waited for was the host, which may make the drafts.
            took = result.device_seconds + result.idle_seconds
            (size.drafted if drafts else size.without).add(took / predicted)
