"""Contract suite for every built-in executor."""

from __future__ import annotations

import os
import signal

from dovetail.core.compose import Composition
from dovetail.core.interfaces import Executor, StepResult
from dovetail.core.testing.executor import ExecutorContract
from dovetail.core.testing.executor_scripts import Script, quiet, small_composition
from dovetail.plugins.executor.config import InprocConfig, MultiprocConfig, SimulatedConfig
from dovetail.plugins.executor.inproc import InprocExecutor
from dovetail.plugins.executor.multiproc import MultiprocExecutor
from dovetail.plugins.executor.simulated import SimulatedExecutor


class TestInproc(ExecutorContract):
    def make(self, composition: Composition) -> Executor:
        return InprocExecutor(InprocConfig(), composition)


class TestInprocLate(ExecutorContract):
    def make(self, composition: Composition) -> Executor:
        return InprocExecutor(InprocConfig(delay=3), composition)


class TestMultiprocOfOne(ExecutorContract):
    overrides = ("executor=multiproc",)

    def make(self, composition: Composition) -> Executor:
        return MultiprocExecutor(MultiprocConfig(), composition)


class TestMultiprocOfTwo(TestMultiprocOfOne):
    """The nightly script runs the tests in which a second rank does what the first does."""

    overrides = ("executor=multiproc", "engine.tp=2")
    if "DOVETAIL_NIGHTLY" not in os.environ:
        test_start_reports_what_the_engine_needs = None  # type: ignore[assignment]
        test_results_come_in_order_with_their_keys = None  # type: ignore[assignment]
        test_masks_behind_drafts = None  # type: ignore[assignment]
        test_rows_sample_what_their_masks_allow = None  # type: ignore[assignment]
        test_a_plan_with_late_rows_waits_for_them = None  # type: ignore[assignment]
        test_shutdown_is_idempotent = None  # type: ignore[assignment]
        test_a_sequence_does_not_see_the_others = None  # type: ignore[assignment]
        test_collecting_what_was_not_submitted_is_a_clear_error = None  # type: ignore[assignment]
        test_an_interrupt_without_a_waiting_call_is_harmless = None  # type: ignore[assignment]

    def kill_a_rank(self, executor: Executor) -> None:
        assert isinstance(executor, MultiprocExecutor)
        os.kill(executor.worker_pids[0], signal.SIGKILL)


class TestSimulated(ExecutorContract):
    overrides = ("executor=simulated", "cost=cpu")

    def make(self, composition: Composition) -> Executor:
        return SimulatedExecutor(SimulatedConfig(speed=1000.0), composition)

    def reference(self, script: Script) -> list[StepResult]:
        """Return its own tokens: it has no model and computes tokens by a rule, which must not depend on when results
        are collected."""
        executor = self.make(small_composition(*self.overrides))
        executor.start(quiet)
        return self.one_by_one(executor, script)
