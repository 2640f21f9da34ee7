"""Late launches: a request that arrives while a step runs is in the next step, and the device never waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.engine.engine import start_engine
from dovetail.core.engine.launch_timer import LEAST_SLACK, MOST_SLACK, LaunchTimer
from dovetail.core.frontend.engine_loop import EngineLoop
from dovetail.core.frontend.messages import Add, EngineStats, SampleUpdate
from dovetail.core.interfaces import (
    Grammar,
    RequestOptions,
    Row,
    RowFlag,
    SamplingParams,
    SchedulerContext,
    StepPlan,
    StepResult,
)

STEP = 0.01
DEVICE = ("app=generate", "executor=simulated", "model=tiny", "engine.depth=2", "engine.max_seqs=8", "cost=h200")
LATE = "engine.late_launch=true"


class Clock:
    """Time that passes only while the program sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.wait)

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Served:
    """An engine loop over a simulated device, in virtual time. This object is its mailbox and only port."""

    delays_launches, up_to_date = True, True

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
        self.clock = Clock(monkeypatch)
        self.engine = start_engine(compose([*DEVICE, f"cost.step_us={STEP * 1e6}", "cost.kernel_us=0", *more]))
        self.updates: list[SampleUpdate] = []
        self.ports = (self,)
        self.waits: list[float] = []
        """How long the loop was ready to wait before a launch."""
        self.times: list[list[float]] = []
        """When each request's tokens came, in the order of arrival."""
        self._coming: list[tuple[float, Add]] = []

    def receive(self, seconds: float | None) -> Iterator[tuple[Served, Add]]:
        self.waits.append(seconds or 0.0)
        until = float("inf") if seconds is None else self.clock.now + seconds
        if self._coming and self._coming[0][0] <= until:
            self.clock.now = max(self.clock.now, self._coming[0][0])
            while self._coming and self._coming[0][0] <= self.clock.now:
                yield self, self._coming.pop(0)[1]
        elif seconds is None:
            self.stopped = True
        else:
            self.clock.now = until

    def send_step(self, stats: EngineStats | None, *, idle: bool = False) -> None:
        for update in self.updates:
            self.times[update.id] += [self.clock.now] * len(update.tokens)
        self.updates = []

    def serve(self, *coming: tuple[float, int], prompt: int = 3, grammar: Grammar | None = None) -> list[list[float]]:
        """Serve requests of (seconds from now, output tokens); return when each one's tokens came."""
        first, began, self.stopped = len(self.times), self.clock.now, False
        for after, tokens in coming:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, grammar=grammar)
            ids = [len(self.times) + 1] + [7] * (prompt - 1)
            self._coming.append((began + after, Add(len(self.times), ids, params, RequestOptions())))
            self.times.append([])
        EngineLoop(self.engine, self).run()  # type: ignore[arg-type]
        return [[moment - began for moment in moments] for moments in self.times[first:]]


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def first_tokens(monkeypatch: pytest.MonkeyPatch, late: bool, *after: float) -> list[float]:
    """Seconds to the first token of requests that arrive in the 20th step of one that decodes; device idle last."""
    served = Served(monkeypatch, f"engine.late_launch={late}")
    begun = 20 * STEP
    _, *others = served.serve((0.0, 64), *((begun + moment, 4) for moment in after))
    found = [times[0] - begun - moment for times, moment in zip(others, after, strict=True)]
    return [*found, served.engine.counters.idle_seconds]


@pytest.mark.parametrize("after", [(0.001,), (0.005,), (0.009,), (0.002, 0.005, 0.009)])
def test_a_request_that_arrives_while_a_step_runs_is_in_the_next_step(
    after: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without late launches it is in the step after that. The host takes no time here."""
    *late, idle = first_tokens(monkeypatch, True, *after)
    *early, _ = first_tokens(monkeypatch, False, *after)
    assert late == pytest.approx([2 * STEP - moment for moment in after], rel=0.05)
    assert early == pytest.approx([3 * STEP - moment for moment in after], rel=0.05)
    assert idle == 0.0


def test_tokens_come_as_often_as_without_late_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [gaps(Served(monkeypatch, f"engine.late_launch={late}").serve((0.0, 40))[0]) for late in (False, True)]
    assert both[1] == pytest.approx(both[0], abs=1e-9)


@pytest.mark.parametrize("max_seqs", [1, 2])
def test_no_launch_waits_when_no_request_could_join(max_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, LATE, f"engine.max_seqs={max_seqs}")
    served.serve((0.0, 20))
    assert any(served.waits) is (max_seqs > 1)


def test_no_launch_waits_while_a_request_with_a_grammar_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar's mask is made between two results, and the plan that needs it would wait as well."""
    served = Served(monkeypatch, LATE)
    served.serve((0.0, 20), grammar=Grammar(kind="regex", value="[0-9]{60}"))
    assert len(served.times[0]) == 20 and not any(served.waits)


def test_launches_adapt_when_steps_become_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short request after one whose context made each step long."""
    more = ("model=llama3_8b", "cost.step_us=100", "engine.max_len=120000", "engine.token_budget=131072")
    served = Served(monkeypatch, LATE, *more)
    (long,), (short,) = served.serve((0.0, 40), prompt=100_000), served.serve((5.0, 40))
    before, after = gaps(long)[2:], gaps(short)[2:]
    assert min(before) > 1.5 * max(after), "the long request's steps must take longer for this test to mean anything"
    assert max(after) < 1.01 * min(after) and served.engine.counters.idle_seconds < 1e-6


def test_a_slow_launch_makes_later_launches_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, LATE)
    engine, calls = served.engine, []
    schedule = engine.scheduler.schedule

    def slow(ctx: SchedulerContext) -> StepPlan | None:
        calls.append(engine.counters.idle_seconds)
        served.clock.wait(0.003 if len(calls) >= 30 else 0.0005)
        return schedule(ctx)

    engine.scheduler.schedule = slow  # type: ignore[method-assign]
    served.serve((0.0, 100))
    at_first, later = calls[29], engine.counters.idle_seconds - calls[29]
    assert at_first < 1e-9, "the time that a launch takes is known"
    assert 0.0 < later < 0.004, "one launch came too late, and no other"


def test_a_device_that_is_faster_than_predicted_gets_its_plans_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes 3 % less than the one before, which is more than the slack."""
    served = Served(monkeypatch, LATE)
    seconds = [STEP * 0.97 ** max(number - 20, 0) for number in range(60)]
    numbers = iter(range(60))
    monkeypatch.setattr(served.engine.executor, "_cost", SimpleNamespace(seconds=lambda plan: seconds[next(numbers)]))
    served.serve((0.0, 50))
    missed = sum(
        max(before - after - LEAST_SLACK, 0.0) for before, after in zip(seconds[:50], seconds[1:51], strict=True)
    )
    assert 0.0 < served.engine.counters.idle_seconds < 0.2 * missed


# The timer alone.


def plan(decodes: int, prompts: int = 0, keys: int = 100) -> Any:
    """Rows with the fields slot, uid, epoch, count, bound, draft, flags."""
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


def test_a_result_that_was_already_there_does_not_tell_when_the_next_comes() -> None:
    """The host runs the device itself, or the device waited for the host."""
    timer = LaunchTimer()
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, plan(4))
    assert timer.delay(5.0) > 0.0
    timer.observe(plan(4), result(0.010), False, 0.0, 5.0, plan(4))
    assert timer.delay(5.0) == 0.0


def test_launches_come_earlier_by_what_they_take_and_once_they_came_too_late() -> None:
    timer = LaunchTimer()

    def delay(put_off: bool = False, idle: float = 0.0) -> float:
        timer.observe(plan(4), result(0.010, idle), put_off, 0.001, 5.0, plan(4))
        return timer.delay(5.0)

    at_first = delay()
    assert timer.launched(plan(4), 0.002), "`delay` was asked before this launch"
    assert delay() == pytest.approx(at_first - 0.002)
    timer.launched(plan(4, 1), 0.5)
    before = delay(put_off=True)
    assert before == pytest.approx(at_first - 0.002), "the launch of a step with prompts does not count"
    assert delay(put_off=False, idle=0.001) == before, "this launch had not waited"
    assert delay(put_off=True, idle=0.0005) == pytest.approx(before - 0.001)
    for _ in range(500):
        eased = delay()
    assert eased == pytest.approx(before), "otherwise no launch would wait again"
    assert delay(put_off=True, idle=1.0) == pytest.approx(0.010 - 0.002 - MOST_SLACK)


def test_a_launch_that_had_no_delay_worth_waiting_for_does_not_count_as_delayed() -> None:
    timer = LaunchTimer()
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, plan(4))
    assert timer.delay(5.0) > 0.0
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, None)
    assert not timer.launched(plan(4), 0.001)
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, plan(4))
    assert timer.delay(5.0 + 0.0087) == 0.0
    assert not timer.launched(plan(4), 0.001)


def test_steps_with_drafts_do_not_predict_steps_without() -> None:
    decode = int(RowFlag.SAMPLE | RowFlag.DECODE)
    plain, wide = (StepPlan(0, [Row(0, 0, 0, 1 + drafts, 100, drafts, decode)]) for drafts in (0, 4))
    for left, known in ((plain, False), (wide, True)):
        timer = LaunchTimer()
        timer.observe(wide, StepResult(0, (), device_seconds=STEP), False, STEP, 1.0, left)
        assert (timer.delay(1.0) > 0) is known
