"""The contract suite over every built-in executor."""

from __future__ import annotations

import os
import signal

import pytest

from dovetail.core.compose import Composition
from dovetail.core.interfaces import Executor
from dovetail.core.testing.executor import ExecutorContract
from dovetail.plugins.executor.config import InprocConfig, MultiprocConfig
from dovetail.plugins.executor.inproc import InprocExecutor
from dovetail.plugins.executor.multiproc import MultiprocExecutor


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
    overrides = ("executor=multiproc", "engine.tp=2")

    def kill_a_rank(self, executor: Executor) -> None:
        assert isinstance(executor, MultiprocExecutor)
        os.kill(executor.worker_pids[0], signal.SIGKILL)


def test_the_suite_must_be_given_an_executor() -> None:
    with pytest.raises(NotImplementedError):
        ExecutorContract().make(None)  # type: ignore[arg-type]
