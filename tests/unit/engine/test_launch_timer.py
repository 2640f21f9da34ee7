"""Late launches: a request that arrives while a step runs is in the next step, and the device never waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from dovetail.core.compose import compose
from dovetail.core.engine.engine import start_engine
from dovetail.core.engine.launch_timer import MAX_SLACK, MIN_SLACK, LaunchTimer
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
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
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
        """Timeouts of the loop's waits for a message."""
        self.times: list[list[float]] = []
        """Arrival times of each request's tokens, in the order of the requests."""
        self._queue: list[tuple[float, Add]] = []

    def receive(self, seconds: float | None) -> Iterator[tuple[Served, Add]]:
        self.waits.append(seconds or 0.0)
        until = float("inf") if seconds is None else self.clock.now + seconds
        if self._queue and self._queue[0][0] <= until:
            self.clock.now = max(self.clock.now, self._queue[0][0])
            while self._queue and self._queue[0][0] <= self.clock.now:
                yield self, self._queue.pop(0)[1]
        elif seconds is None:
            self.stopped = True
        else:
            self.clock.now = until

    def send_step(self, stats: EngineStats | None, *, idle: bool = False) -> None:
        for update in self.updates:
            self.times[update.id] += [self.clock.now] * len(update.tokens)
        self.updates = []

    def serve(self, *requests: tuple[float, int], prompt: int = 3, grammar: Grammar | None = None) -> list[list[float]]:
        """Serve requests of (seconds from now, output tokens). Return the arrival times of each one's tokens."""
        first, began, self.stopped = len(self.times), self.clock.now, False
        for after, tokens in requests:
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, grammar=grammar)
            ids = [len(self.times) + 1] + [7] * (prompt - 1)
            self._queue.append((began + after, Add(len(self.times), ids, params, RequestOptions())))
            self.times.append([])
        EngineLoop(self.engine, self).run()  # type: ignore[arg-type]
        return [[moment - began for moment in moments] for moments in self.times[first:]]


def gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


def first_tokens(monkeypatch: pytest.MonkeyPatch, late: bool, *after: float) -> list[float]:
    """Return the seconds to the first token of requests that arrive during the 20th step of a decoding one, followed by
    the device's idle time."""
    served = Served(monkeypatch, f"engine.late_launch={late}")
    began = 20 * STEP
    _, *others = served.serve((0.0, 64), *((began + moment, 4) for moment in after))
    found = [times[0] - began - moment for times, moment in zip(others, after, strict=True)]
    return [*found, served.engine.counters.idle_seconds]


@pytest.mark.parametrize("after", [(0.001,), (0.005,), (0.009,), (0.002, 0.005, 0.009)])
def test_a_request_that_arrives_while_a_step_runs_is_in_the_next_step(
    after: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without late launches it is in the step after that. The host takes no time in this test."""
    *late, idle = first_tokens(monkeypatch, True, *after)
    *early, _ = first_tokens(monkeypatch, False, *after)
    assert late == pytest.approx([2 * STEP - moment for moment in after], rel=0.05)
    assert early == pytest.approx([3 * STEP - moment for moment in after], rel=0.05)
    assert idle == 0.0


def test_late_launches_do_not_slow_down_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [gaps(Served(monkeypatch, f"engine.late_launch={late}").serve((0.0, 40))[0]) for late in (False, True)]
    assert both[1] == pytest.approx(both[0], abs=1e-9)


@pytest.mark.parametrize("max_seqs", [1, 2])
def test_no_launch_waits_when_no_request_could_join(max_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(monkeypatch, LATE, f"engine.max_seqs={max_seqs}")
    served.serve((0.0, 20))
    assert any(served.waits) is (max_seqs > 1)


def test_no_launch_waits_while_a_request_with_a_grammar_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask is computed between two results, so the plan that needs the mask would wait as well."""
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
        served.clock.sleep(0.003 if len(calls) >= 30 else 0.0005)
        return schedule(ctx)

    engine.scheduler.schedule = slow  # type: ignore[method-assign]
    served.serve((0.0, 100))
    at_first, later = calls[29], engine.counters.idle_seconds - calls[29]
    assert at_first < 1e-9, "the launch time is known"
    assert 0.0 < later < 0.004, "only the first slow launch is too late"


def test_launches_adapt_when_the_device_is_faster_than_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes 3 % less than the one before, which is more than the slack."""
    seconds = [STEP * 0.97 ** max(step - 20, 0) for step in range(60)]
    cost = SimpleNamespace(seconds=lambda plan: seconds[plan.step])
    monkeypatch.setattr("dovetail.plugins.executor.simulated.bind_cost", lambda *args: cost)
    served = Served(monkeypatch, LATE)
    served.serve((0.0, 50))
    missed = sum(
        max(before - after - MIN_SLACK, 0.0) for before, after in zip(seconds[:50], seconds[1:51], strict=True)
    )
    assert 0.0 < served.engine.counters.idle_seconds < 0.2 * missed


# The timer alone.


def plan(decodes: int, prompts: int = 0, keys: int = 100, drafts: int = 0) -> StepPlan:
    decode = Row(0, 0, 0, 1 + drafts, keys, drafts, int(RowFlag.DECODE | RowFlag.SAMPLE))
    return StepPlan(0, [decode] * decodes + [Row(0, 0, 0, 1, keys, 0, int(RowFlag.SAMPLE))] * prompts)


def result(seconds: float, idle: float = 0.0) -> StepResult:
    return StepResult(0, (), seconds, idle)


def test_the_predicted_step_time_is_that_of_the_fastest_step_of_that_size() -> None:
    timer = LaunchTimer()
    for rows, seconds in ((4, 0.010), (4, 0.008), (8, 0.012)):
        timer.observe(plan(rows), result(seconds), False, 0.001, 0.0, None)
    assert timer.delay(0.0) == 0.0, "the device is idle"
    for running, expected in ((plan(4), 0.008), (plan(8, 1), 0.008), (plan(4, 1), 0.008)):
        timer.observe(plan(8), result(0.012), False, 0.001, 5.0, running)
        assert timer.delay(5.0) == pytest.approx(expected - MIN_SLACK)
        assert timer.delay(5.0 + expected) == 0.0
    for smaller in (plan(3), plan(4, keys=99)):
        timer.observe(plan(8), result(0.012), False, 0.001, 5.0, smaller)
        assert timer.delay(5.0) == 0.0, "no step as small was measured"


def test_a_result_that_was_already_there_predicts_nothing() -> None:
    """The device is synchronous, or it waited for the host."""
    timer = LaunchTimer()
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, plan(4))
    assert timer.delay(5.0) > 0.0
    timer.observe(plan(4), result(0.010), False, 0.0, 5.0, plan(4))
    assert timer.delay(5.0) == 0.0


def test_launches_come_earlier_by_their_own_time_and_after_one_was_too_late() -> None:
    timer = LaunchTimer()

    def delay(delayed: bool = False, idle: float = 0.0) -> float:
        timer.observe(plan(4), result(0.010, idle), delayed, 0.001, 5.0, plan(4))
        return timer.delay(5.0)

    at_first = delay()
    assert timer.launched(plan(4), 0.002), "`delay` was asked before this launch"
    assert delay() == pytest.approx(at_first - 0.002)
    timer.launched(plan(4, 1), 0.5)
    before = delay(delayed=True)
    assert before == pytest.approx(at_first - 0.002), "the launch of a step with prompts does not count"
    assert delay(delayed=False, idle=0.001) == before, "this launch was not delayed"
    assert delay(delayed=True, idle=0.0005) == pytest.approx(before - 0.001)
    for _ in range(500):
        decayed = delay()
    assert decayed == pytest.approx(before), "otherwise no launch would be delayed again"
    assert delay(delayed=True, idle=1.0) == pytest.approx(0.010 - 0.002 - MAX_SLACK)


def test_a_launch_with_too_short_a_delay_does_not_count_as_delayed() -> None:
    timer = LaunchTimer()
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, plan(4))
    assert timer.delay(5.0) > 0.0
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, None)
    assert not timer.launched(plan(4), 0.001)
    timer.observe(plan(4), result(0.010), False, 0.001, 5.0, plan(4))
    assert timer.delay(5.0 + 0.0087) == 0.0
    assert not timer.launched(plan(4), 0.001)


def test_steps_with_drafts_do_not_predict_steps_without() -> None:
    for drafts, known in ((0, False), (4, True)):
        timer = LaunchTimer()
        timer.observe(plan(1, drafts=4), result(STEP), False, STEP, 1.0, plan(1, drafts=drafts))
        assert (timer.delay(1.0) > 0) is known
