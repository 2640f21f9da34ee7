"""Executors with one fault each; the suite must reject them."""

from __future__ import annotations

from collections import deque
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
        self.latest = replace(plan, **lists)
        super().submit(self.latest, dict(blobs))


class EatsThePlan(Sound):
    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        super().submit(plan, blobs)
        plan.joins.clear()


class LastInFirstOut(Sound):
    def __init__(self, composition: Composition) -> None:
        super().__init__(composition)
        self.results: list[StepResult] = []

    @property
    def pending(self) -> int:
        return super().pending + len(self.results)

    def collect(self) -> StepResult:
        self.results += [super(LastInFirstOut, self).collect() for _ in range(super().pending)]
        return self.results.pop() if self.results else super().collect()


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
        return max(0, super().pending - self.delay)


class RunsTwice(Sound):
    """Runs decode rows once more after a result that was waited for."""

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        super().submit(replace(plan, step=2 * plan.step), blobs)

    def collect(self) -> StepResult:
        result = super().collect()
        if not self.pending:
            rows = [row._replace(bound=row.bound + 1) for row in self.latest.rows if row.flags & RowFlag.DECODE]
            super().submit(StepPlan(result.step + 1, rows or self.latest.rows), {})
            super().collect()
        return replace(result, step=result.step // 2)


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
    swallowed = 0

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        try:
            super().submit(plan, blobs)
        except (ValueError, KeyError):
            self.swallowed += 1

    def collect(self) -> StepResult:
        return super().collect() if self.pending or not self.swallowed else StepResult(0, ())


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


class NeedsAStartToShutDown(Sound):
    def start(self, progress: Progress) -> ExecutorInfo:
        self.info = super().start(progress)
        return self.info

    def shutdown(self) -> None:
        del self.info
        super().shutdown()


class ForgetsToForget(Sound):
    left = 0

    @property
    def pending(self) -> int:
        return super().pending + self.left

    def shutdown(self) -> None:
        self.left = self.pending
        super().shutdown()


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
        rows = self.latest.rows
        rows[1] = rows[1]._replace(flags=rows[1].flags | RowFlag.LATE)
        super().complete(replace(late, rows=tuple(row + 1 for row in late.rows)))


class DoesNotWait(Sound):
    waiting = False

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        if self.waiting:
            self.complete(LateInputs(self.latest.step, (), np.zeros((0, 0), np.uint32)))
        super().submit(plan, blobs)
        self.waiting = plan.late

    def complete(self, late: LateInputs) -> None:
        super().complete(late)
        self.waiting = False


class UnloadsAtOnce(Sound):
    """Unloads before the plans that use the adapter have run."""

    def __init__(self, composition: Composition) -> None:
        super().__init__(composition)
        self.held: deque[tuple[StepPlan, Blobs]] = deque()

    def submit(self, plan: StepPlan, blobs: Blobs) -> None:
        self.held.append((plan, blobs))
        if len(self.held) > 3:
            super().submit(*self.held.popleft())

    def collect(self) -> StepResult:
        if self.held:
            super().submit(*self.held.popleft())
        return super().collect()


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
    NeedsAStartToShutDown: "test_shutdown_is_idempotent",
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
