"""Cost models with one fault each; the suite must reject them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dovetail.core.interfaces import CostModel, RowWork, StepPlan
from dovetail.core.testing.cost import CostContract
from dovetail.core.testing.suite import OUTCOMES, failures


class Sound(CostModel):
    """Correct: a step costs a fixed time plus a time for each token and each page of context."""

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        work = sum(self.work(row) for row in rows)
        return 1e-3 + 1e-6 * work if work else 0.0

    def work(self, row: RowWork) -> float:
        return (row.tokens + row.bound / 16) * row.times


class ChargesNothingToDo(Sound):
    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        return super().step_seconds(rows) or 1e-3


class ChunksAreFree(Sound):
    def work(self, row: RowWork) -> float:
        return super().work(row) if row.sampled else 0.0


class LikesLongContexts(Sound):
    def work(self, row: RowWork) -> float:
        return row.tokens * row.times * 100 / row.bound


class MissesTimes(Sound):
    def work(self, row: RowWork) -> float:
        return row.tokens + row.bound / 16


class GoesByTheFirst(Sound):
    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        rows = list(rows)
        return super().step_seconds(rows) * (2 if rows and rows[0].tokens > 1 else 1)


class ReadsTwice(Sound):
    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        return super().step_seconds(rows) + 1e-6 * sum(row.sampled for row in rows)


class Learns(Sound):
    last = 0.0

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        now = super().step_seconds(rows)
        self.last, before = now, self.last
        return now and now + before / 2


class PlansCostMore(Sound):
    def seconds(self, plan: StepPlan) -> float:
        return 2 * super().seconds(plan)


class PrefillsAtOnce(Sound):
    def prefill_seconds(self, tokens: int, cached: int = 0, chunk: int | None = None) -> float:
        return self.step_seconds([RowWork(tokens, cached + tokens)])


class CountsParametersNotBytes(Sound):
    def weight_bytes(self) -> float:
        return super().weight_bytes() / 2


class FailsOnceAsked(Sound):
    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        return super().step_seconds(rows) * (1 + 0 * self._parameters.total)


class NeedsTorch(Sound):
    __module__ = "dovetail.core.ops.norm"


BROKEN: dict[type[CostModel], str] = {
    ChargesNothingToDo: "test_no_rows_take_no_time",
    ChunksAreFree: "test_every_step_takes_some_time",
    LikesLongContexts: "test_more_work_takes_no_less_time",
    MissesTimes: "test_times_multiplies_a_row",
    GoesByTheFirst: "test_the_order_of_rows_does_not_matter",
    ReadsTwice: "test_rows_may_come_from_a_generator",
    Learns: "test_predictions_are_pure",
    PlansCostMore: "test_a_plan_takes_as_long_as_its_rows",
    PrefillsAtOnce: "test_decode_and_prefill_are_sums_of_steps",
    CountsParametersNotBytes: "test_bytes_are_counted",
    FailsOnceAsked: "test_it_refuses_a_model_in_bind_or_predicts",
    NeedsTorch: "test_it_needs_no_torch",
}


def suite_of(cost: type[CostModel]) -> CostContract:
    class Suite(CostContract):
        def make(self) -> CostModel:
            return cost(None)

    return Suite()


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_the_suite_rejects(broken: type[CostModel], test: str) -> None:
    suite = suite_of(broken)
    with pytest.raises(OUTCOMES):
        getattr(suite, test)()


def test_the_unbroken_one_passes() -> None:
    found = failures(suite_of(Sound))
    found.pop("test_it_needs_no_torch", None)  # its module is this one
    assert found == {}
