"""The in-process executor delays plans as a slow device would, and runs them in order."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.interfaces import StepPlan, StepResult
from dovetail.plugins.executor.config import InprocConfig
from dovetail.plugins.executor.inproc import InprocExecutor

ran: list[int] = []


class RecordingRunner:
    def __init__(self, composition: object, *, rank: int, size: int, address: str) -> None:
        assert (rank, size) == (0, 1)
        self.results: list[StepResult] = []
        ran.clear()

    def load(self, progress: object) -> Any:
        return type("Info", (), {"num_pages": {0: 5}})()

    def bind(self, num_pages: dict[int, int]) -> None:
        assert num_pages == {0: 5}

    def execute(self, plan: StepPlan, blobs: object) -> None:
        ran.append(plan.step)
        self.results.append(StepResult(plan.step, ()))

    def collect(self) -> StepResult:
        return self.results.pop(0)

    def close(self) -> None:
        ran.append(-1)


def started(monkeypatch: pytest.MonkeyPatch, delay: int) -> InprocExecutor:
    monkeypatch.setattr("dovetail.plugins.executor.inproc.load_class", lambda reference: RecordingRunner)
    executor = InprocExecutor(InprocConfig(delay=delay), compose(["app=generate"]))
    executor.start(lambda phase, share: None)
    return executor


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_plan_runs_once_so_many_newer_ones_were_submitted(monkeypatch: pytest.MonkeyPatch, delay: int) -> None:
    executor = started(monkeypatch, delay)
    for step in range(6):
        executor.submit(StepPlan(step, []), {})
        assert ran == list(range(step + 1 - delay)) if step >= delay else not ran
    assert executor.pending == 6


def test_collect_runs_only_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = started(monkeypatch, 3)
    for step in range(3):
        executor.submit(StepPlan(step, []), {})
    assert executor.collect().step == 0
    assert ran == [0]
    assert [executor.collect().step, executor.collect().step] == [1, 2]
    assert executor.pending == 0


def test_a_plan_that_does_not_fit_is_refused_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = started(monkeypatch, 0)
    with pytest.raises(ValueError, match="slot 4 leaves"):
        executor.submit(StepPlan(0, [], leaves=[4]), {})
    assert not ran


def test_shutdown_twice_closes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = started(monkeypatch, 0)
    executor.shutdown()
    executor.shutdown()
    assert ran == [-1]
