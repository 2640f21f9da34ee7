"""Executors with one fault each; the suite must reject them."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from dovetail.core.compose import Composition
from dovetail.core.interfaces import (
    Blobs,
    Executor,
    ExecutorInfo,
    LateInputs,
    Progress,
    RowFlag,
    RowResult,
    StepPlan,
    StepResult,
)
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
        self.latest = replace(plan, **lists)
        super().submit(self.latest, dict(blobs))


fault = partial(variant, Sound)


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


class AnswersForTheScratchSlot(Sound):
    """A plan without rows runs padding, which must have no result."""

    def collect(self) -> StepResult:
        result = super().collect()
        return result if result.rows else replace(result, rows=(RowResult(0, 0, 0, ()),))


class ForgetsTheEpoch(Sound):
    def collect(self) -> StepResult:
        result = super().collect()
        return replace(result, rows=tuple(row._replace(epoch=1) for row in result.rows))


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


BROKEN: dict[str, list[type[Executor]]] = {
    "test_results_come_in_order_with_their_keys": [
        EatsThePlan,
        LastInFirstOut,
        ForgetsTheEpoch,
        AnswersForTheScratchSlot,
        fault(
            "NumbersRowsBySlot",
            submit=lambda self, plan, blobs: Sound.submit(self, replace(plan, rows=sorted(plan.rows)), blobs),
        ),
        # Omits delayed plans.
        fault("CountsWhatRan", delay=2, pending=property(lambda self: max(0, Sound.pending.fget(self) - self.delay))),
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
    "test_shutdown_is_idempotent": [NeedsAStartToShutDown, ForgetsToForget],
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
    "test_masks_behind_drafts": [
        fault("NamesNoDrafts", drafted=lambda self: {}),
        # Verifies no drafts that have masks.
        fault(
            "MasksOneToken",
            complete=lambda self, late: Sound.complete(self, replace(late, masks_MW=late.masks_MW[:1], drafts=())),
        ),
        fault(
            "MasksInAnotherOrder",
            complete=lambda self, late: Sound.complete(self, replace(late, masks_MW=late.masks_MW[::-1].copy())),
        ),
    ],
    "test_adapters_come_and_go_in_order_with_plans": [UnloadsAtOnce, ReadsNothing],
    "test_a_plan_with_late_rows_waits_for_them": [DoesNotWait],
}


def suite_of(executor: type[Executor]) -> ExecutorContract:
    return suite(ExecutorContract, make=lambda self, composition: executor(composition))


@each(BROKEN)
def test_the_suite_rejects(broken: type[Executor], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}
