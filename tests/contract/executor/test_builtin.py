"""Contract suite for every built-in executor."""

from __future__ import annotations

import os
import signal

import pytest

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


@pytest.mark.nightly
class TestMultiprocOfTwo(TestMultiprocOfOne):
    overrides = ("executor=multiproc", "engine.tp=2")

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
