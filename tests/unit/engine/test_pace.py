"""Launching late: who comes while a step runs is in the next one, and the device never waits for it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.engine.engine import Engine
from dovetail.core.engine.pace import LEAST_SLACK, MOST_SLACK, Pace
from dovetail.core.interfaces import RowFlag, SamplingParams, StepResult

STEP = 0.01
DECODE, PROMPT = SimpleNamespace(flags=RowFlag.DECODE), SimpleNamespace(flags=RowFlag.SAMPLE)


def plan(decodes: int, prompts: int = 0) -> Any:
    return SimpleNamespace(rows=[DECODE] * decodes + [PROMPT] * prompts)


def result(seconds: float, idle: float = 0.0) -> StepResult:
    return StepResult(0, (), seconds, idle)


class Clock:
    """Stands still but when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def first_token_after(late: bool, coming: float, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[float, float]:
    """Of a request that comes while another one decodes, `coming` seconds into a step; and for how long the device had
    nothing to do."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    words = ("app=generate", "executor=simulated", "model=tiny", "engine.depth=2", "engine.max_seqs=4", "cost=h200")
    engine = Engine(compose([*words, f"cost.step_us={STEP * 1e6}", "cost.kernel_us=0", *more]))
    engine.start()
    engine.add([1, 2, 3], SamplingParams(max_tokens=64, ignore_eos=True))
    while engine.counters.steps < 20:
        engine.step()
    arrival, uid = clock.now + coming, -1
    while True:
        if uid < 0 and clock.now >= arrival:
            (seq,) = engine.add([4, 5, 6], SamplingParams(max_tokens=4, ignore_eos=True))
            uid = seq.uid
        if late and (spare := engine.spare) > 1e-6:
            clock.now += min(spare, arrival - clock.now) if uid < 0 else spare
            continue
        if any(event.uid == uid and event.tokens for event in engine.step()):
            break
    found = clock.now - arrival
    engine.shutdown()
    return found, engine.counters.idle_seconds


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_who_comes_while_a_step_runs_is_in_the_next_one(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise in the one after that. In virtual time, where the host takes none."""
    coming = share * STEP
    late, idle = first_token_after(True, coming, monkeypatch)
    early, _ = first_token_after(False, coming, monkeypatch)
    assert late == pytest.approx(2 * STEP - coming, rel=0.05) and early == pytest.approx(3 * STEP - coming, rel=0.05)
    assert idle == 0.0


def test_nothing_waits_where_nobody_could_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot: a launch that is put off would bring nobody in."""
    late, early = (first_token_after(late, 0.001, monkeypatch, "engine.max_seqs=1")[0] for late in (True, False))
    assert late == early


def test_the_next_step_is_expected_to_take_what_the_quickest_of_its_size_took() -> None:
    pace = Pace()
    for rows, seconds in ((4, 0.010), (4, 0.008), (8, 0.012)):
        pace.took(plan(rows), result(seconds), False, 0.001, 0.0, [])
    assert pace.spare(0.0) == 0.0, "the device has nothing"
    for left, expected in ((plan(4), 0.008), (plan(8, 1), 0.008), (plan(4, 1), 0.008)):
        pace.took(plan(8), result(0.012), False, 0.001, 5.0, [left])
        assert pace.spare(5.0) == pytest.approx(expected - LEAST_SLACK)
        assert pace.spare(5.0 + expected) == 0.0
    pace.took(plan(8), result(0.012), False, 0.001, 5.0, [plan(3)])
    assert pace.spare(5.0) == 0.0, "no step as small was seen"


def test_a_result_that_was_there_says_nothing_of_when_the_next_is() -> None:
    """As of a device that the host runs itself, or one that waited for the host."""
    pace = Pace()
    pace.took(plan(4), result(0.010), False, 0.001, 5.0, [plan(4)])
    assert pace.spare(5.0) > 0.0
    pace.took(plan(4), result(0.010), False, 0.0, 5.0, [plan(4)])
    assert pace.spare(5.0) == 0.0


def test_launches_come_earlier_by_what_they_take_and_once_they_came_too_late() -> None:
    pace = Pace()

    def spare(put_off: bool = False, idle: float = 0.0) -> float:
        pace.took(plan(4), result(0.010, idle), put_off, 0.001, 5.0, [plan(4)])
        return pace.spare(5.0)

    at_first = spare()
    assert pace.launched(plan(4), 0.002), "it was asked whether the launch could wait"
    assert spare() == pytest.approx(at_first - 0.002)
    pace.launched(plan(4, 1), 0.5)
    assert spare() == pytest.approx(at_first - 0.002), "what a prompt's launch takes is no measure"
    before = spare(put_off=True)
    assert spare(put_off=False, idle=0.001) == before, "it was not put off"
    assert spare(put_off=True, idle=0.001) == pytest.approx(before - 0.002)
    for _ in range(500):
        eased = spare()
    assert eased == pytest.approx(before), "or nothing would be put off again"
    assert spare(put_off=True, idle=1.0) == pytest.approx(max(0.0, 0.010 - 0.002 - MOST_SLACK))


def test_what_was_put_off_and_not_launched_counts_for_no_later_step() -> None:
    pace = Pace()
    pace.took(plan(4), result(0.010), False, 0.001, 5.0, [plan(4)])
    assert pace.spare(5.0) > 0.0
    pace.took(plan(4), result(0.010), False, 0.001, 5.0, [])
    assert not pace.launched(plan(4), 0.001)
