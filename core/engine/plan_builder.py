"""Plan that a PolicyScheduler is building: its rows are in any order until `build` sorts them."""

from __future__ import annotations

from operator import itemgetter

from dovetail.core.interfaces import Hit, Join, PageDelta, PageOp, Reservation, Row, Sequence, StepPlan

_new = tuple.__new__
_SLOT = itemgetter(Row._fields.index("slot"))


class PlanBuilder:
    """The step that `schedule` is building. `budget` is the number of tokens left."""

    def __init__(self, step: int, budget: int) -> None:
        self.step, self.budget = step, budget
        self.decodes: list[Row] = []
        self.chunks: list[Row] = []
        self.joins: list[Join] = []
        self.pages: list[PageDelta] = []

    def build(self, leaves: list[int], ops: list[PageOp]) -> StepPlan:
        self.decodes.sort(key=_SLOT)
        self.chunks.sort(key=_SLOT)
        return StepPlan(self.step, self.decodes + self.chunks, self.joins, leaves, self.pages, ops)


def page_deltas(seq: Sequence, pages: Hit | Reservation) -> list[PageDelta]:
    """Return the pages of a running sequence as entries of its slot's page tables."""
    slot = seq.slot
    return [_new(PageDelta, (group, slot, index, page)) for group, index, page in pages.entries]
