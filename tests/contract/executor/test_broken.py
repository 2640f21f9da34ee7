"""Executors with one fault each; the suite must reject them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from dovetail.core.compose import Composition
from dovetail.core.interfaces import (
    Blobs,
    Executor,
    ExecutorInfo,
    LateInputs,
    Progress,
    RowFlag,
    StepPlan,
    StepResult,
)
from dovetail.core.testing.executor import ExecutorContract
from dovetail.core.testing.suite import failures
from dovetail.plugins.executor.config import InprocConfig
from dovetail.plugins.executor.inproc import InprocExecutor


class Sound(InprocExecutor):
    delay = 0

    def __init__(self, composition: Composition) -> None:
        super().__init__(InprocConfig(delay=self.delay), composition)

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        lists = {name: list(getattr(plan, name)) for name in ("rows", "joins", "leaves", "pages", "ops", "drafts")}
        super().submit(replace(plan, **lists), dict(blobs))


class EatsThePlan(Sound):
    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        super().submit(plan, blobs)
        plan.joins.clear()


class LastInFirstOut(Sound):
    def collect(self) -> StepResult:
        if self.pending:
            self._runner.outcomes._pending.rotate(1)
        return super().collect()


class ForgetsTheEpoch(Sound):
    def collect(self) -> StepResult:
        result = super().collect()
        return replace(result, rows=tuple(row._replace(epoch=1) for row in result.rows))


class NumbersRowsBySlot(Sound):
    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        super().submit(replace(plan, rows=sorted(plan.rows)), blobs)


class CountsWhatRan(Sound):
    """Omits delayed plans from `pending`."""

    delay = 2

    @property
    def pending(self) -> int:
        return self._executed


class RunsTwice(Sound):
    """Computes the last token again once all results are collected."""

    def collect(self) -> StepResult:
        result = super().collect()
        if not self.pending:
            self._runner.state.computed_S.sub_(1).clamp_(min=0)
        return result


class MixesPages(Sound):
    """Loses the page tables of all joining sequences but the first."""

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        super().submit(replace(plan, pages=[page for page in plan.pages if page.slot == 0]), blobs)


class CollectsNothing(Sound):
    def collect(self) -> StepResult:
        if not self.pending:
            raise KeyError(0)
        return super().collect()


class SwallowsErrors(Sound):
    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        try:
            super().submit(plan, blobs)
        except (ValueError, KeyError):
            self._executed += 1

    def collect(self) -> StepResult:
        try:
            return super().collect()
        except IndexError:
            return StepResult(0, ())


class HidesTheCause(Sound):
    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        try:
            super().submit(plan, blobs)
        except Exception:
            raise RuntimeError("a rank failed") from None


class StartsWithoutPages(Sound):
    def start(self, progress: Progress) -> ExecutorInfo:
        return replace(super().start(progress), num_pages={0: 0})


class SaysNothingOfItsStart(Sound):
    def start(self, progress: Progress) -> ExecutorInfo:
        return super().start(lambda phase, share: None)


class NeedsARunnerToShutDown(Sound):
    def shutdown(self) -> None:
        self._runner.close()
        super().shutdown()


class ForgetsToForget(Sound):
    def shutdown(self) -> None:
        pending = self._executed
        super().shutdown()
        self._executed = pending


class IgnoresMasks(Sound):
    def complete(self, late: LateInputs) -> None:
        super().complete(replace(late, masks_MW=~np.zeros_like(late.masks_MW)))


class SamplesWithoutMask(Sound):
    """Treats a missing mask as one that allows everything."""

    def complete(self, late: LateInputs) -> None:
        super().complete(late if late.rows else LateInputs(late.step, (0,), ~np.zeros((1, 4), np.uint32)))


class ShiftsMasks(Sound):
    """Applies each mask to the next row."""

    def complete(self, late: LateInputs) -> None:
        rows = self._ledger.waiting.rows
        rows[1] = rows[1]._replace(flags=rows[1].flags | RowFlag.LATE)
        super().complete(replace(late, rows=tuple(row + 1 for row in late.rows)))


class DoesNotWait(Sound):
    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        if self._ledger.waiting is not None:
            self.complete(LateInputs(self._ledger.waiting.step, (), np.zeros((0, 0), np.uint32)))
        super().submit(plan, blobs)


class UnloadsAtOnce(Sound):
    """Unloads before the plans that use the adapter have run."""

    delay = 3

    def unload_adapter(self, key: str) -> None:
        self._runner.unload_adapter(key)


class ReadsNothing(Sound):
    def load_adapter(self, key: str, folder: str) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


BROKEN: dict[type[Executor], str] = {
    EatsThePlan: "test_results_come_in_order_with_their_keys",
    LastInFirstOut: "test_results_come_in_order_with_their_keys",
    ForgetsTheEpoch: "test_results_come_in_order_with_their_keys",
    NumbersRowsBySlot: "test_results_come_in_order_with_their_keys",
    CountsWhatRan: "test_results_come_in_order_with_their_keys",
    RunsTwice: "test_tokens_are_those_of_the_plans_in_order",
    MixesPages: "test_a_sequence_does_not_see_the_others",
    CollectsNothing: "test_collecting_what_was_not_submitted_is_a_clear_error",
    SwallowsErrors: "test_an_error_in_a_plan_surfaces_and_names_the_cause",
    HidesTheCause: "test_an_error_in_a_plan_surfaces_and_names_the_cause",
    StartsWithoutPages: "test_start_reports_what_the_engine_needs",
    SaysNothingOfItsStart: "test_start_reports_what_the_engine_needs",
    NeedsARunnerToShutDown: "test_shutdown_is_idempotent",
    ForgetsToForget: "test_shutdown_is_idempotent",
    IgnoresMasks: "test_rows_sample_what_their_masks_allow",
    SamplesWithoutMask: "test_rows_sample_what_their_masks_allow",
    ShiftsMasks: "test_rows_sample_what_their_masks_allow",
    UnloadsAtOnce: "test_adapters_come_and_go_in_order_with_plans",
    ReadsNothing: "test_adapters_come_and_go_in_order_with_plans",
    DoesNotWait: "test_a_plan_with_late_rows_waits_for_them",
}


def suite_of(executor: type[Executor]) -> ExecutorContract:
    class Suite(ExecutorContract):
        def make(self, composition: Composition) -> Executor:
            return executor(composition)  # type: ignore[call-arg]

    return Suite()


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_the_suite_rejects(broken: type[Executor], test: str) -> None:
    others = tuple(name for name in dir(ExecutorContract) if name != test)
    assert test in failures(suite_of(broken), skip=others), f"the suite accepts it: {broken.__doc__}"


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}
