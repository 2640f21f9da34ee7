"""The in-process executor delays plans as a slow device would, and runs them in order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dovetail.core.compose import compose
from dovetail.core.interfaces import StepPlan, StepResult
from dovetail.plugins.executor.config import InprocConfig
from dovetail.plugins.executor.inproc import InprocExecutor

ran: list[int] = []


class RecordingRunner:
    """Also its own loader, and the loaded rank."""

    info = SimpleNamespace(num_pages={0: 5})

    def __init__(self, composition: object, progress: object, *, on_connect: object) -> None:
        self.results: list[StepResult] = []
        ran.clear()

    def bind(self, num_pages: dict[int, int]) -> RecordingRunner:
        assert num_pages == {0: 5}
        return self

    def execute(self, plan: StepPlan, blobs: object) -> None:
        ran.append(plan.step)
        self.results.append(StepResult(plan.step, ()))

    def collect(self) -> StepResult:
        return self.results.pop(0)

    def close(self) -> None:
        ran.append(-1)


class Recording(InprocExecutor):
    loader = f"{__name__}:RecordingRunner"


def started(delay: int) -> InprocExecutor:
    executor = Recording(InprocConfig(delay=delay), compose(["app=generate"]))
    executor.start(lambda phase, share: None)
    return executor


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_plan_runs_after_delay_newer_ones_were_submitted(delay: int) -> None:
    executor = started(delay)
    for step in range(6):
        executor.submit(StepPlan(step, []), {})
        assert ran == list(range(step + 1 - delay)) if step >= delay else not ran
    assert executor.pending == 6


def test_collect_runs_only_what_it_needs() -> None:
    executor = started(3)
    for step in range(3):
        executor.submit(StepPlan(step, []), {})
    assert executor.collect().step == 0
    assert ran == [0]
    assert [executor.collect().step, executor.collect().step] == [1, 2]
    assert executor.pending == 0


def test_a_plan_that_does_not_fit_is_refused_before_it_runs() -> None:
    executor = started(0)
    with pytest.raises(ValueError, match="slot 4 leaves"):
        executor.submit(StepPlan(0, [], leaves=[4]), {})
    assert not ran


def test_shutdown_twice_closes_once() -> None:
    executor = started(0)
    executor.shutdown()
    executor.shutdown()
    assert ran == [-1]
