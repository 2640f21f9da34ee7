"""Launching late: who comes while a step runs is in the next one, and the device never waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dovetail.core.compose import compose
from dovetail.core.engine.engine import Engine
from dovetail.core.engine.launch_timer import LEAST_SLACK, MOST_SLACK, LaunchTimer
from dovetail.core.frontend.engine_loop import StepLoop
from dovetail.core.interfaces import Row, RowFlag, SamplingParams, SchedulerContext, StepPlan, StepResult

STEP = 0.01
DEVICE = ("app=generate", "executor=simulated", "model=tiny", "engine.depth=2", "engine.max_seqs=8", "cost=h200")


class Clock:
    """Stands still but when somebody waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.wait)

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Served:
    """A real step loop over an engine whose device is simulated, in virtual time; requests come as commands do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
        self.clock = Clock(monkeypatch)
        self.engine = Engine(compose([*DEVICE, f"cost.step_us={STEP * 1e6}", "cost.kernel_us=0", *more]))
        self.engine.start()
        self.coming: list[tuple[float, int]] = []
        """When, and the output tokens."""
        self.over = False
        self.came: dict[int, list[float]] = {}
        """By uid, in the order of arrival."""
        self.loop: Any = StepLoop.__new__(StepLoop)
        self.loop._engine, self.loop._requests, self.loop._control = self.engine, self, mock.Mock()
        self.loop._poller, self.loop._links, self.loop._loading, self.loop._stats_due = self, {}, [], float("inf")
        self.loop._by_socket = {"link": self}
        self.loop._obey = lambda link, tokens: self.add(tokens)
        self.loop._ordered = lambda: False

    def add(self, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        (seq,) = self.engine.add([len(self.came) + 1, 2, 3], params)
        self.came[seq.uid] = []

    def note(self, event: Any) -> None:
        self.came[event.uid] += [self.clock.now] * len(event.tokens)

    # As a poller and as a link.

    def poll(self, milliseconds: int | None) -> list[tuple[Any, int]]:
        until = float("inf") if milliseconds is None else self.clock.now + milliseconds * 1e-3
        if self.coming and self.coming[0][0] <= until:
            self.clock.now = max(self.clock.now, self.coming[0][0])
            return [("link", 1)]
        if milliseconds is None:
            return [(self.loop._control.fileno(), 1)]  # Nobody will come: stop.
        self.clock.now = until
        return []

    def receive(self) -> Iterator[int]:
        while self.coming and self.coming[0][0] <= self.clock.now:
            yield self.coming.pop(0)[1]

    def serve(self, coming: Sequence[tuple[float, int]]) -> list[list[float]]:
        """Requests that come so many seconds from now; when each one's tokens came."""
        first, began = len(self.came), self.clock.now
        self.coming = [(began + after, tokens) for after, tokens in coming]
        self.loop.run()
        return [[moment - began for moment in moments] for moments in list(self.came.values())[first:]]


def first_tokens(monkeypatch: pytest.MonkeyPatch, late: bool, *after: float, more: Sequence[str] = ()) -> list[float]:
    """Seconds from arrival, of requests that come in the 20th step of one that decodes; device idle last."""
    served = Served(monkeypatch, f"engine.late_launch={late}", *more)
    begun = 20 * STEP
    _, *others = served.serve([(0.0, 64), *((begun + moment, 4) for moment in after)])
    found = [times[0] - begun - moment for times, moment in zip(others, after, strict=True)]
    return [*found, served.engine.counters.idle_seconds]


@pytest.mark.parametrize("after", [(0.001,), (0.005,), (0.009,), (0.002, 0.005, 0.009)])
def test_who_comes_while_a_step_runs_is_in_the_next_one(
    after: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them; otherwise in the one after that. The host takes no time here."""
    *late, idle = first_tokens(monkeypatch, True, *after)
    *early, _ = first_tokens(monkeypatch, False, *after)
    assert late == pytest.approx([2 * STEP - moment for moment in after], rel=0.05)
    assert early == pytest.approx([3 * STEP - moment for moment in after], rel=0.05)
    assert idle == 0.0


def test_tokens_come_as_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = []
    for late in (False, True):
        (times,) = Served(monkeypatch, f"engine.late_launch={late}").serve([(0.0, 40)])
        gaps.append([after - before for before, after in zip(times, times[1:], strict=False)])
    assert gaps[1] == pytest.approx(gaps[0], abs=1e-9)


def test_nothing_waits_where_nobody_could_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot: a launch that is put off would bring nobody in."""
    served = Served(monkeypatch, "engine.late_launch=true", "engine.max_seqs=1")
    put_off = mock.Mock(wraps=served.engine._launch_timer.delay)
    served.engine._launch_timer.delay = put_off
    served.serve([(0.0, 20)])
    assert not put_off.called


def test_nothing_waits_beside_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask is made between two results, and the plan that needs it would wait as well."""
    engine: Any = Served(monkeypatch, "engine.late_launch=true").engine
    monkeypatch.setattr(engine._launch_timer, "delay", lambda now: 0.5)
    engine._launched.append(None)
    assert engine.launch_delay() == 0.5
    monkeypatch.setattr(engine, "_grammars", ["one that runs"])
    assert engine.launch_delay() == 0.0


def test_steps_that_become_quicker_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short request after one whose context made each step long."""
    more = ("model=llama3_8b", "cost.step_us=100", "engine.late_launch=true", "engine.max_len=120000")
    served = Served(monkeypatch, *more, "engine.token_budget=131072")
    long = served.engine.add([7] * 100_000, SamplingParams(max_tokens=40, ignore_eos=True))[0]
    served.came[long.uid] = []
    served.serve([])
    served.serve([(5.0, 40)])
    before, after = (
        [later - earlier for earlier, later in zip(times[2:], times[3:], strict=False)]
        for times in served.came.values()
    )
    assert min(before) > 1.5 * max(after), "or the long one's steps were no longer"
    assert max(after) < 1.01 * min(after) and served.engine.counters.idle_seconds < 1e-6


def test_a_host_that_falters_is_believed_to_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, "engine.late_launch=true")
    engine, calls = served.engine, []
    schedule = engine.scheduler.schedule

    def slow(ctx: SchedulerContext) -> StepPlan | None:
        calls.append(engine.counters.idle_seconds)
        served.clock.wait(0.003 if 30 <= len(calls) else 0.0005)
        return schedule(ctx)

    engine.scheduler.schedule = slow  # type: ignore[method-assign]
    served.serve([(0.0, 100)])
    at_first, late = calls[29], engine.counters.idle_seconds - calls[29]
    assert at_first < 1e-9, "what a launch takes is known"
    assert 0.0 < late < 0.004, "one launch was late, and no other"


def test_a_device_that_was_quicker_than_expected_gets_its_plans_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes 3 % less than the one before, which is more than the slack."""
    served = Served(monkeypatch, "engine.late_launch=true")
    engine = served.engine
    took = [STEP * 0.97 ** max(number - 20, 0) for number in range(60)]
    numbers = iter(range(60))
    monkeypatch.setattr(engine.executor, "_cost", SimpleNamespace(seconds=lambda plan: took[next(numbers)]))
    served.serve([(0.0, 50)])
    missed = sum(max(before - after - LEAST_SLACK, 0.0) for before, after in zip(took[:50], took[1:51], strict=True))
    assert 0.0 < engine.counters.idle_seconds < 0.2 * missed


# The pace alone.


def plan(decodes: int, prompts: int = 0, keys: int = 100) -> Any:
    """Rows as the records have them: slot, uid, epoch, count, bound, draft, flags."""
    rows = [(0, 0, 0, 1, keys, 0, RowFlag.DECODE)] * decodes + [(0, 0, 0, 1, keys, 0, RowFlag.SAMPLE)] * prompts
    return SimpleNamespace(rows=[Fields(row) for row in rows])


class Fields(tuple[Any, ...]):
    @property
    def flags(self) -> Any:
        return self[-1]


def result(seconds: float, idle: float = 0.0) -> StepResult:
    return StepResult(0, (), seconds, idle)


def test_the_next_step_is_expected_to_take_what_the_quickest_of_its_size_took() -> None:
    timer = LaunchTimer()
    for rows, seconds in ((4, 0.010), (4, 0.008), (8, 0.012)):
        timer.observe(plan(rows), result(seconds), False, 0.001, 0.0, None)
    assert timer.delay(0.0) == 0.0, "the device has nothing"
    for left, expected in ((plan(4), 0.008), (plan(8, 1), 0.008), (plan(4, 1), 0.008)):
        timer.observe(plan(8), result(0.012), False, 0.001, 5.0, left)
        assert timer.delay(5.0) == pytest.approx(expected - LEAST_SLACK)
        assert timer.delay(5.0 + expected) == 0.0
    for smaller in (plan(3), plan(4, keys=99)):
        timer.observe(plan(8), result(0.012), False, 0.001, 5.0, smaller)
        assert timer.delay(5.0) == 0.0, "no step as small was seen"


def test_a_result_that_was_there_says_nothing_of_when_the_next_is() -> None:
    """As of a device that the host runs itself, or one that waited for the host."""
    timer = LaunchTimer()
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, plan(4))
    assert timer.delay(5.0) > 0.0
    timer.observe(plan(4), result(0.010), False, 0.0, 5.0, plan(4))
    assert timer.delay(5.0) == 0.0


def test_launches_come_earlier_by_what_they_take_and_once_they_came_too_late() -> None:
    timer = LaunchTimer()

    def spare(put_off: bool = False, idle: float = 0.0) -> float:
        timer.observe(plan(4), result(0.010, idle), put_off, 0.001, 5.0, plan(4))
        return timer.delay(5.0)

    at_first = spare()
    assert timer.launched(plan(4), 0.002), "it was asked whether the launch could wait"
    assert spare() == pytest.approx(at_first - 0.002)
    timer.launched(plan(4, 1), 0.5)
    before = spare(put_off=True)
    assert before == pytest.approx(at_first - 0.002), "what a prompt's launch takes is no measure"
    assert spare(put_off=False, idle=0.001) == before, "it was not put off"
    assert spare(put_off=True, idle=0.0005) == pytest.approx(before - 0.001)
    for _ in range(500):
        eased = spare()
    assert eased == pytest.approx(before), "or nothing would be put off again"
    assert spare(put_off=True, idle=1.0) == pytest.approx(0.010 - 0.002 - MOST_SLACK)


def test_what_was_not_worth_waiting_for_or_not_launched_was_not_put_off() -> None:
    timer = LaunchTimer()
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, plan(4))
    assert timer.delay(5.0) > 0.0
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, None)
    assert not timer.launched(plan(4), 0.001)
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, plan(4))
    assert timer.delay(5.0 + 0.0087) == 0.0
    assert not timer.launched(plan(4), 0.001)


def test_steps_with_drafts_tell_nothing_of_those_without() -> None:
    decode = int(RowFlag.SAMPLE | RowFlag.DECODE)
    plain, wide = (StepPlan(0, [Row(0, 0, 0, 1 + drafts, 100, drafts, decode)]) for drafts in (0, 4))
    for left, known in ((plain, False), (wide, True)):
        timer = LaunchTimer()
        timer.observe(wide, StepResult(0, (), device_seconds=STEP), False, STEP, 1.0, left)
        assert (timer.delay(1.0) > 0) is known
