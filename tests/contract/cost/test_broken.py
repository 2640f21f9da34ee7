"""Cost models with one fault each; the suite must reject them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from dovetail.core.interfaces import CostModel, RowWork, StepTerms
from dovetail.core.testing.cost import CostContract
from dovetail.core.testing.suite import failures

from ..faults import each, rejects, suite, variant


class Sound(CostModel):
    """Correct: a step costs a fixed time plus a time for each token and each page of context."""

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        work = sum(self.work(row) for row in rows)
        return 1e-3 + 1e-6 * work if work else 0.0

    def work(self, row: RowWork) -> float:
        return (row.tokens + row.bound / 16) * row.times


fault = partial(variant, Sound)


class GoesByTheFirst(Sound):
    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        rows = list(rows)
        return super().step_seconds(rows) * (2 if rows and rows[0].tokens > 1 else 1)


class Learns(Sound):
    last = 0.0

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        now = super().step_seconds(rows)
        self.last, before = now, self.last
        return now and now + before / 2


BROKEN: dict[str, list[type[CostModel]]] = {
    "test_no_rows_take_no_time": [
        fault("ChargesNothingToDo", step_seconds=lambda self, rows: Sound.step_seconds(self, rows) or 1e-3)
    ],
    "test_every_step_takes_some_time": [
        fault("ChunksAreFree", work=lambda self, row: Sound.work(self, row) if row.sampled else 0.0)
    ],
    "test_more_work_takes_no_less_time": [
        fault("LikesLongContexts", work=lambda self, row: row.tokens * row.times * 100 / row.bound)
    ],
    "test_times_multiplies_a_row": [fault("MissesTimes", work=lambda self, row: row.tokens + row.bound / 16)],
    "test_the_order_of_rows_does_not_matter": [GoesByTheFirst],
    "test_rows_may_come_from_a_generator": [
        fault(
            "ReadsTwice",
            step_seconds=lambda self, rows: Sound.step_seconds(self, rows) + 1e-6 * sum(row.sampled for row in rows),
        )
    ],
    "test_predictions_are_pure": [Learns],
    "test_launches_take_no_negative_time": [
        fault("SavesTimeByLaunching", launch_seconds=lambda self, plan: 1e-4 - 2e-5 * len(plan.rows))
    ],
    "test_terms_make_up_the_step": [
        fault("ForgetsPrefill", terms=lambda self, rows: StepTerms(launches=Sound.step_seconds(self, rows) / 2))
    ],
    "test_a_plan_takes_as_long_as_its_rows": [
        fault("PlansCostMore", seconds=lambda self, plan: 2 * Sound.seconds(self, plan))
    ],
    "test_decode_and_prefill_are_sums_of_steps": [
        fault(
            "PrefillsAtOnce",
            prefill_seconds=lambda self, tokens, cached=0, chunk=None: self.step_seconds(
                [RowWork(tokens, cached + tokens)]
            ),
        )
    ],
    "test_lanes_take_the_time_of_the_slowest": [
        fault("AddsLanesUp", lanes_seconds=lambda self, lanes: sum(map(self.step_seconds, lanes))),
        fault("HasOneLane", lanes_terms=lambda self, lanes: [StepTerms(launches=self.step_seconds(lanes[0]))]),
    ],
    "test_drafting_takes_time_if_the_drafter_has_a_model": [
        fault(
            "DraftsInOnePass",
            draft_seconds=lambda self, rows, drafts, context: (
                self.decode_seconds(rows, context) if self.drafter and rows and drafts else 0.0
            ),
        )
    ],
    "test_bytes_are_counted": [
        fault("CountsParametersNotBytes", weight_bytes=lambda self: Sound.weight_bytes(self) / 2),
        fault(
            "CountsExpertsLikeOtherLayers",
            weight_bytes=lambda self: replace(self.formats, expert_bits=None).weight_bytes(self._parameters),
        ),
    ],
    "test_it_refuses_a_model_in_bind_or_predicts": [
        fault(
            "FailsOnceAsked",
            step_seconds=lambda self, rows: Sound.step_seconds(self, rows) * (1 + 0 * self._parameters.total),
        )
    ],
    "test_it_needs_no_torch": [fault("NeedsTorch", __module__="dovetail.core.ops.norm")],
}


def suite_of(cost: type[CostModel]) -> CostContract:
    return suite(CostContract, make=lambda self: cost(None))


@each(BROKEN)
def test_the_suite_rejects(broken: type[CostModel], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_unbroken_one_passes() -> None:
    found = failures(suite_of(Sound))
    found.pop("test_it_needs_no_torch", None)  # its module is this one
    assert found == {}
