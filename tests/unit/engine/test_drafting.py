"""Steps verify drafts if that pays, according to acceptance, the cost model and measured step times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest

from dovetail.core.compose import compose
from dovetail.core.engine.drafting import MAX_INTERVAL, Drafting
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.interfaces import Row, RowFlag, RowResult, RowWork, SamplingParams, StepPlan, StepResult
from dovetail.core.testing.scheduler import SchedulerContract, random_load
from dovetail.plugins.scheduler.config import FCFSConfig
from dovetail.plugins.scheduler.fcfs import FCFSScheduler

K = 4
DECODE = int(RowFlag.DECODE | RowFlag.SAMPLE)


class ToyCost:
    """A cost model: 5 ms per step, and proportionally more above `free` tokens."""

    def __init__(self, free: float = 64) -> None:
        self.free = free

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        tokens = sum(row.tokens * row.times for row in rows)
        return 5e-3 * max(1.0, tokens / self.free)


@dataclass
class Device:
    """Runs the steps that `Drafting` chooses."""

    accepts: Callable[[int], float]
    """step -> probability that a draft is accepted if those before it were."""
    slowdown: float = 1.0
    """Ratio of measured to predicted time of steps with drafts."""
    depth: int = 1
    """Plans in flight."""
    host: float = 0.0
    """Seconds that the device idles before a step with drafts."""
    eligible: float = 1.0
    """Share of rows that may have drafts."""
    outlier: tuple[int, float] = (0, 1.0)
    """(index of a step among those with drafts, factor of its time)."""

    def run(
        self, rows: int | Callable[[int], int], drafting: Drafting | None, steps: int, drafts: int = K
    ) -> tuple[float, list[int]]:
        """Return tokens per second, and the drafts of each step. Without `drafting` each step has `drafts`."""
        rng, cost, chosen = random.Random(1), ToyCost(), []
        seconds, tokens, flight = 0.0, 0, []
        for step in range(steps):
            n = rows if isinstance(rows, int) else rows(step)
            if drafting is not None:
                drafts = drafting.choose(n, 700, cost)  # type: ignore[arg-type]
            count = 1 + drafts
            measured = cost.step_seconds([RowWork(count, 700, count, n)]) * (self.slowdown if drafts else 1.0)
            if drafts and sum(map(bool, chosen)) == self.outlier[0]:
                measured *= self.outlier[1]
            chosen.append(drafts)
            plan, results = StepPlan(step, []), []
            for i in range(n):
                own = drafts * (i < n * self.eligible)
                plan.rows.append(Row(i, i, 0, 1 + own, 700, own, DECODE))
                accepted = 0
                while accepted < own and rng.random() < self.accepts(step):
                    accepted += 1
                results.append(RowResult(i, i, 0, (7,) * (accepted + 1)))
            idle = self.host if drafts else 0.0
            seconds, tokens = seconds + measured + idle, tokens + sum(len(row.tokens) for row in results)
            flight.append((plan, StepResult(step, tuple(results), measured, idle)))
            if drafting is not None:
                drafting.launched(plan)
                if len(flight) >= self.depth:
                    drafting.update(*flight.pop(0))
        return tokens / seconds, chosen


def check(device: Device, rows: int, steps: int) -> None:
    none, always, weighed = (
        device.run(rows, drafting, steps, drafts)[0] for drafting, drafts in ((None, 0), (None, K), (Drafting(K), K))
    )
    assert weighed > 0.95 * max(none, always), (none, always, weighed)


@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (12, 2), (64, 1)])
@pytest.mark.parametrize("slowdown", [0.8, 1.0, 1.3])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_throughput_is_that_of_the_better_of_all_drafts_and_none(
    share: float, rows: int, slowdown: float, depth: int
) -> None:
    """Even if the cost model is wrong by a third."""
    check(Device(lambda step: share, slowdown, depth), rows, {1: 2000, 12: 800, 64: 800}[rows])


@pytest.mark.parametrize(
    ("device", "rows"),
    [
        (Device(lambda step: 0.3, host=4e-3), 8),
        (Device(lambda step: 0.65, eligible=0.2), 20),
        (Device(lambda step: 0.9, slowdown=0.3, outlier=(0, 100.0)), 64),
        (Device(lambda step: 0.9, slowdown=0.3, outlier=(4, 100.0)), 64),
    ],
    ids=["drafting on the host", "few eligible rows", "the first step compiles a kernel", "another process"],
)
def test_host_time_counts_and_outliers_do_not(device: Device, rows: int) -> None:
    check(device, rows, 1500)


def test_trials_become_rare_and_still_detect_better_acceptance() -> None:
    device = Device(lambda step: 0.95 * (step > 3500))
    _, chosen = device.run(20, Drafting(K), 6000)
    assert chosen[0], "the prior is one accepted draft per row"
    trials = [step for step, drafts in enumerate(chosen[:3500]) if drafts]
    assert len(trials) < 30 and max(b - a for a, b in pairwise(trials)) > MAX_INTERVAL
    assert sum(map(bool, chosen[-1000:])) > 980


@pytest.mark.parametrize(("rows", "most"), [(1, 0.04), (8, 0.01)])
def test_drafts_that_never_pay_are_rare(rows: int, most: float) -> None:
    """A trial ends before all of its rows if the first ones accept nothing, and one that succeeds does not."""
    device = Device(lambda step: 0.7 * (step > 4000), slowdown=1.3, depth=2)
    _, chosen = device.run(rows, Drafting(K), 8000)
    assert sum(map(bool, chosen[250:1250])) <= most * 1000
    assert sum(map(bool, chosen[-1000:])) > 900


def test_batch_sizes_are_learnt_separately() -> None:
    """Eight rows gain by drafts and 60 lose. Alternating between them causes no additional trials."""

    def rows(step: int) -> int:
        return 8 if step // 60 % 2 else 60

    _, chosen = Device(lambda step: 0.6).run(rows, Drafting(K), 3000)
    many = [bool(drafts) for step, drafts in enumerate(chosen) if rows(step) == 60]
    few = [bool(drafts) for step, drafts in enumerate(chosen) if rows(step) == 8]
    assert sum(many) < 0.03 * len(many) and sum(few) > 0.97 * len(few)


def test_the_length_of_a_trial_is_counted_in_rows() -> None:
    """A trial that begins with one row per step ends soon when there are sixty."""
    chosen = Device(lambda step: 0.0).run(lambda step: 1 if step < 40 else 60, Drafting(K), 60)[1]
    assert sum(map(bool, chosen[40:])) <= 2


def test_without_measured_times_the_cost_model_decides() -> None:
    """The time of a step with prefill does not count. Trials become rare all the same."""
    drafting, cost, chosen = Drafting(K), ToyCost(free=1), []
    for step in range(1000):
        drafts = drafting.choose(8, 100, cost)  # type: ignore[arg-type]
        chosen.append(drafts)
        rows = [Row(i, i, 0, 1 + drafts, 100, drafts, DECODE) for i in range(8)]
        plan = StepPlan(step, [*rows, Row(8, 8, 0, 50, 50, 0, 0)])
        results = tuple(RowResult(i, i, 0, (1,) * (1 + (i < 8))) for i in range(9))
        drafting.launched(plan)
        drafting.update(plan, StepResult(step, results, 1e-9 if drafts else 1.0))
    assert sum(map(bool, chosen)) < 40


class SuiteFCFS(SchedulerContract):
    def make(self, limits, kv):
        return FCFSScheduler(FCFSConfig(), limits, kv)


def record(engine: Engine, plans: list[list[Row]]) -> None:
    """Append the decode rows of each plan to `plans` while the engine runs."""
    schedule = engine.scheduler.schedule

    def recorded(ctx):
        plan = schedule(ctx)
        plans.append([row for row in plan.rows if row.flags & RowFlag.DECODE] if plan else [])
        return plan

    engine.scheduler.schedule = recorded  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", [1, 3])
def test_any_choice_gives_every_request_its_own_output(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, suite, choose = random.Random(depth), SuiteFCFS(), Drafting.choose
    plans: list[list[Row]] = []
    asked: dict[int, tuple[int, int]] = {}

    def random_choice(drafting, rows, length, cost):
        asked[len(plans)] = rows, length
        choose(drafting, rows, length, cost)
        return rng.choice([0, 3])

    monkeypatch.setattr(Drafting, "choose", random_choice)
    for seed in range(12):
        engine = suite.engine(pages=24, depth=depth, lookahead=3, delay=depth - 1)
        engine.cost = ToyCost()  # type: ignore[assignment]
        record(engine, plans)
        load = random_load(seed, grammars=True)
        suite.check_outputs(engine, load, suite.run(engine, load))
    # Unless a row found no room, `choose` was asked about exactly the rows of the plan.
    complete = [(rows, length, plans[i]) for i, (rows, length) in asked.items() if len(plans[i]) == rows]
    assert len(complete) > len(asked) / 2
    for rows, length, decodes in complete:
        assert length == sum(row.bound - row.count for row in decodes) // rows
    assert {row.draft for decodes in plans for row in decodes} >= {0, 3}


def run(*more: str) -> tuple[list[list[int]], int]:
    """Return the outputs of three requests, and the number of drafted tokens."""
    words = ["app=generate", "model=tiny", "spec_decode=ngram", "engine.device=cpu", "engine.max_seqs=4", *more]
    engine = start_engine(compose(words))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = [engine.add(prompt, params)[0] for prompt in ([5, 6, 7] * 4, list(range(3, 40)), [9] * 20)]
    while engine.has_work:
        engine.step()
    engine.shutdown()
    return [seq.tokens for seq in found], engine.counters.drafted


def test_an_engine_weighs_drafts_if_it_has_a_cost_model_and_may(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Drafting, "choose", lambda drafting, rows, *rest: asked.append(rows) or 0)
    outputs, drafted = run("cost=cpu")
    questions = len(asked)
    assert questions > 20 and drafted == 0
    for more in ((), ("cost=cpu", "engine.drafts=always")):
        others, drafted = run(*more)
        assert others == outputs and drafted > 20, "every step has drafts, if the drafter finds some"
    assert len(asked) == questions


def test_a_policy_may_override_the_number_of_drafts() -> None:
    class One(FCFSScheduler):
        def draft_tokens(self, seq, ctx):
            return 1

    suite = SuiteFCFS()
    suite.make = lambda limits, kv: One(FCFSConfig(), limits, kv)  # type: ignore[method-assign]
    engine = suite.engine(lookahead=3)
    engine.cost = SimpleNamespace(step_seconds=lambda rows: 0.0)  # type: ignore[assignment]
    plans: list[list[Row]] = []
    record(engine, plans)
    load = random_load(3)
    suite.check_outputs(engine, load, suite.run(engine, load))
    assert {row.draft for rows in plans for row in rows} == {0, 1}, "0 for a row near its limit"
