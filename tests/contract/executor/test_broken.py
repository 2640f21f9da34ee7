"""Executors with one fault each; the suite must reject them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from dovetail.core.compose import Composition
from dovetail.core.interfaces import Blobs, Executor, LateInputs, RowFlag, StepPlan, StepResult
from dovetail.core.testing.executor import ExecutorContract
from dovetail.core.testing.suite import failures
from dovetail.plugins.executor.config import InprocConfig
from dovetail.plugins.executor.inproc import InprocExecutor

from ..faults import each, rejects, suite, variant


class Sound(InprocExecutor):
    delay = 0

    def __init__(self, composition: Composition) -> None:
        super().__init__(InprocConfig(delay=self.delay), composition)

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        lists = {name: list(getattr(plan, name)) for name in ("rows", "joins", "leaves", "pages", "ops", "drafts")}
        super().submit(replace(plan, **lists), dict(blobs))


fault = partial(variant, Sound)


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


class RunsTwice(Sound):
    """Computes the last token again once all results are collected."""

    def collect(self) -> StepResult:
        result = super().collect()
        if not self.pending:
            self._runner.state.computed_S.sub_(1).clamp_(min=0)
        return result


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


class NeedsARunnerToShutDown(Sound):
    def shutdown(self) -> None:
        self._runner.close()
        super().shutdown()


class ForgetsToForget(Sound):
    def shutdown(self) -> None:
        pending = self._executed
        super().shutdown()
        self._executed = pending


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


class ReadsNothing(Sound):
    def load_adapter(self, key: str, folder: str) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


BROKEN: dict[str, list[type[Executor]]] = {
    "test_results_come_in_order_with_their_keys": [
        EatsThePlan,
        LastInFirstOut,
        ForgetsTheEpoch,
        fault(
            "NumbersRowsBySlot",
            submit=lambda self, plan, blobs: Sound.submit(self, replace(plan, rows=sorted(plan.rows)), blobs),
        ),
        # Omits delayed plans.
        fault("CountsWhatRan", delay=2, pending=property(lambda self: self._executed)),
    ],
    "test_tokens_are_those_of_the_plans_in_order": [RunsTwice],
    "test_a_sequence_does_not_see_the_others": [
        # Loses the page tables of all joining sequences but the first.
        fault(
            "MixesPages",
            submit=lambda self, plan, blobs: Sound.submit(
                self, replace(plan, pages=[page for page in plan.pages if page.slot == 0]), blobs
            ),
        )
    ],
    "test_collecting_what_was_not_submitted_is_a_clear_error": [CollectsNothing],
    "test_an_error_in_a_plan_surfaces_and_names_the_cause": [SwallowsErrors, HidesTheCause],
    "test_start_reports_what_the_engine_needs": [
        fault(
            "StartsWithoutPages", start=lambda self, progress: replace(Sound.start(self, progress), num_pages={0: 0})
        ),
        fault("SaysNothingOfItsStart", start=lambda self, progress: Sound.start(self, lambda phase, share: None)),
    ],
    "test_shutdown_is_idempotent": [NeedsARunnerToShutDown, ForgetsToForget],
    "test_rows_sample_what_their_masks_allow": [
        fault(
            "IgnoresMasks",
            complete=lambda self, late: Sound.complete(self, replace(late, masks_MW=~np.zeros_like(late.masks_MW))),
        ),
        # Treats a missing mask as one that allows everything.
        fault(
            "SamplesWithoutMask",
            complete=lambda self, late: Sound.complete(
                self, late if late.rows else LateInputs(late.step, (0,), ~np.zeros((1, 4), np.uint32))
            ),
        ),
        ShiftsMasks,
    ],
    "test_adapters_come_and_go_in_order_with_plans": [
        # Unloads before the plans that use the adapter have run.
        fault("UnloadsAtOnce", delay=3, unload_adapter=lambda self, key: self._runner.unload_adapter(key)),
        ReadsNothing,
    ],
    "test_a_plan_with_late_rows_waits_for_them": [DoesNotWait],
}


def suite_of(executor: type[Executor]) -> ExecutorContract:
    return suite(ExecutorContract, make=lambda self, composition: executor(composition))


@each(BROKEN)
def test_the_suite_rejects(broken: type[Executor], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}
