"""Steps verify drafts if that pays, according to acceptance, the cost model and measured step times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.engine.draft_levels import Levels
from dovetail.core.engine.drafting import MAX_INTERVAL, Drafting
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.interfaces import (
    Row,
    RowFlag,
    RowResult,
    RowWork,
    SamplingParams,
    SchedulerLimits,
    StepPlan,
    StepResult,
)
from dovetail.core.testing.scheduler import SchedulerContract, random_load
from dovetail.plugins.scheduler.config import FCFSConfig
from dovetail.plugins.scheduler.fcfs import FCFSScheduler

K = 4
DECODE = int(RowFlag.DECODE | RowFlag.SAMPLE)


class ToyCost:
    """A cost model: 5 ms per step, and proportionally more above `free` tokens; `passes` ms of drafting."""

    def __init__(self, free: float = 64, passes: float = 0.0) -> None:
        self.free, self.passes = free, passes

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        tokens = sum(row.tokens * row.times for row in rows)
        return 5e-3 * max(1.0, tokens / self.free)

    def draft_seconds(self, rows: int, drafts: int, context: int) -> float:
        return 1e-3 * self.passes

    def follow_seconds(self, rows: Iterable[RowWork]) -> float:
        return 1e-3 * self.passes


def sequence(i: int, grammar: object = None) -> Any:
    """A decoding sequence far from its limit."""
    request = SimpleNamespace(params=SimpleNamespace(grammar=grammar))
    return SimpleNamespace(
        slot=i, uid=i, epoch=0, prompt_len=700, limit=9999, max_len=701, computed=700, remaining=1, request=request
    )


@dataclass
class Device:
    """Runs the steps that `Drafting` chooses."""

    accepts: Callable[[int, int], float]
    """(step, row) -> probability that a draft is accepted if those before it were."""
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
    cost: ToyCost = field(default_factory=ToyCost)
    counts: tuple[int, ...] = (K,)
    """Numbers of drafts for which the drafter has passes."""

    def passes(self, most: int) -> int:
        return next(count for count in self.counts if count >= most)

    def run(
        self, rows: int | Callable[[int], int], drafting: Drafting | None, steps: int, drafts: int = K
    ) -> tuple[float, list[int]]:
        """Return tokens per second, and the number of drafts of each step. Without `drafting` each row has `drafts`."""
        rng, chosen = random.Random(1), []
        seconds, tokens, flight = 0.0, 0, []
        for step in range(steps):
            n = rows if isinstance(rows, int) else rows(step)
            decoding = [sequence(i, None if i < n * self.eligible else object()) for i in range(n)]
            wanted = {i: drafts for i in range(n) if decoding[i].request.params.grammar is None}
            if drafting is not None:
                wanted = drafting.choose(decoding, (), 1 << 16, self.cost)  # type: ignore[arg-type]
            total = sum(wanted.values())
            measured = self.cost.step_seconds([RowWork(n + total, 700)])
            if total:
                passes = self.passes(max(wanted.values()))
                measured = (measured + self.cost.draft_seconds(n, passes, 700)) * self.slowdown
                measured *= self.outlier[1] if sum(map(bool, chosen)) == self.outlier[0] else 1.0
            chosen.append(total)
            plan, results = StepPlan(step, []), []
            for i in range(n):
                own = wanted.get(i, 0)
                plan.rows.append(Row(i, i, 0, 1 + own, 700, own, DECODE))
                accepted = 0
                while accepted < own and rng.random() < self.accepts(step, i):
                    accepted += 1
                results.append(RowResult(i, i, 0, (7,) * (accepted + 1), drafted=own))
            idle = self.host if total else 0.0
            seconds, tokens = seconds + measured + idle, tokens + sum(len(row.tokens) for row in results)
            flight.append((plan, StepResult(step, tuple(results), measured, idle)))
            if drafting is not None:
                drafting.launched(plan)
                if len(flight) >= self.depth:
                    drafting.update(*flight.pop(0))
        return tokens / seconds, chosen

    def uniform(self, rows: int, drafts: int) -> float:
        """Return the tokens per second if each row always has `drafts`."""
        share, able = self.accepts(0, 0), int(rows * self.eligible)
        seconds = self.cost.step_seconds([RowWork(rows + able * drafts, 700)])
        if drafts:
            seconds = (seconds + self.cost.draft_seconds(rows, self.passes(drafts), 700)) * self.slowdown + self.host
        return (rows + able * sum(share**k for k in range(1, drafts + 1))) / seconds


def weighing(counts: tuple[int, ...] = ()) -> Drafting:
    return Drafting(SchedulerLimits(1 << 16, 256, 9999, K, draft_counts=counts))


def check(device: Device, rows: int, steps: int, share: float) -> None:
    best = max(device.uniform(rows, drafts) for drafts in range(K + 1))
    assert device.run(rows, weighing(device.counts), steps)[0] > share * best


@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (12, 2), (64, 1)])
@pytest.mark.parametrize("slowdown", [0.8, 1.0, 1.3])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_throughput_is_that_of_the_best_number_of_drafts(share: float, rows: int, slowdown: float, depth: int) -> None:
    """Even if the cost model is wrong by a third. With one row, acceptance is known less well."""
    steps, least = {1: (1500, 0.9), 12: (500, 0.94), 64: (200, 0.93)}[rows]
    check(Device(lambda step, row: share, slowdown, depth), rows, steps, least)


@pytest.mark.parametrize(
    ("device", "rows", "share"),
    [
        (Device(lambda step, row: 0.3, host=4e-3), 8, 0.95),
        (Device(lambda step, row: 0.65, eligible=0.2), 20, 0.95),
        (Device(lambda step, row: 0.9, slowdown=0.3, outlier=(0, 100.0)), 64, 0.7),
        (Device(lambda step, row: 0.9, slowdown=0.3, outlier=(4, 100.0)), 64, 0.7),
    ],
    ids=["drafting on the host", "few eligible rows", "the first step compiles a kernel", "another process"],
)
def test_host_time_counts_and_outliers_do_not(device: Device, rows: int, share: float) -> None:
    """An outlier delays the next trial, without which fewer than a third of the tokens are possible."""
    check(device, rows, 600, share)


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("passes", [0.0, 2.0])
def test_useless_drafts_cost_little(rows: int, passes: float) -> None:
    """Also if drafting takes two fifths of a step. Before, 300 steps have shown that they are useless."""
    device, drafting = Device(lambda step, row: 0.0, depth=2, cost=ToyCost(128, passes)), weighing()
    device.run(rows, drafting, 300)
    assert device.run(rows, drafting, 400)[0] > 0.98 * device.uniform(rows, 0)


class PerPass(ToyCost):
    def draft_seconds(self, rows: int, drafts: int, context: int) -> float:
        return 1e-3 * self.passes * drafts


@pytest.mark.parametrize(("share", "rows", "best"), [(0.8, 64, 1), (0.9, 32, 3), (0.95, 8, 4), (0.2, 64, 0)])
def test_fewer_drafts_take_fewer_passes(share: float, rows: int, best: int) -> None:
    """Where each draft takes a pass, a step without the later drafts of any row is the faster one."""
    device = Device(lambda step, row: share, cost=PerPass(128, 1.2), counts=(1, 2, 3, 4))
    assert max(range(K + 1), key=lambda drafts: device.uniform(rows, drafts)) == best
    check(device, rows, 500, 0.95)


@pytest.mark.parametrize("lookahead", [1, 3, 4, 5, 7, 16, 17, 40])
def test_levels(lookahead: int) -> None:
    counts = tuple(count for count in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if count < lookahead)
    for levels in (
        Levels(lookahead),
        Levels(lookahead, (*counts, lookahead)),
        Levels(lookahead, (*counts[2:], lookahead)),
    ):
        for rows in (1, 2, 7, 256):
            found = levels.of(rows)
            pairs = [levels.drafts(level, rows) for level in found]
            assert pairs[0] == (0, 0) and pairs[-1] == (rows * lookahead, lookahead) and len(set(pairs)) == len(pairs)
            assert all(drafts and drafts <= rows * each for drafts, each in pairs[1:])
            for drafts, each in pairs:
                assert levels.drafts(levels.lowest(drafts, each, rows), rows) == (drafts, each)
            # Sequences near their end have fewer drafts than the level that was chosen.
            for most in range(1, lookahead + 1):
                assert levels.drafts(levels.lowest(rows * most, most, rows), rows)[0] >= rows * most


class OfLength(ToyCost):
    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        return 1e-5 * max(row.bound for row in rows)


@pytest.mark.parametrize(("length", "pays"), [(100, False), (700, True)])
def test_the_length_of_the_rows_decides_too(length: int, pays: bool) -> None:
    seq = sequence(0)
    seq.computed = length
    assert bool(weighing().choose([seq], (), 99, OfLength(64, 4.0))) is pays  # type: ignore[arg-type]


def test_drafts_that_pay_end_the_steps_without() -> None:
    """No drafts is chosen for several steps at once, and a trial in between may show that drafts pay."""
    _, chosen = Device(lambda step, row: 0.95 * (step > 100)).run(4, weighing(), 400)
    first = next(i for i in range(100, 400) if chosen[i] > 4)
    assert all(chosen[first : first + 10])


def test_rows_that_accept_drafts_have_more_of_them() -> None:
    """One row in eight accepts drafts. The step has room for half a draft per row."""
    device, drafting = Device(lambda step, row: 0.9 * (row % 8 == 0), cost=ToyCost(96)), weighing()
    device.run(64, drafting, 50)
    decoding = [sequence(i) for i in range(64)]
    wanted = drafting.choose(decoding, (), 1 << 16, device.cost)  # type: ignore[arg-type]
    assert sum(wanted.values()) == 32, "another row has one draft now and then"
    assert sum(wanted.get(i, 0) for i in range(0, 64, 8)) >= 30
    assert device.run(64, drafting, 100)[0] > 1.3 * device.uniform(64, 0)


def test_prompts_in_a_step_leave_room_for_fewer_drafts() -> None:
    """With a prompt each draft takes time: one that is accepted with a tenth does not pay."""
    device, drafting = Device(lambda step, row: 0.1), weighing()
    device.run(8, drafting, 100)
    decoding, prompt = [sequence(i) for i in range(8)], sequence(8)
    prompt.remaining = 1000
    found = [drafting.choose(decoding, more, 2048, device.cost) for more in ((), (prompt,))]  # type: ignore[arg-type]
    assert sum(found[0].values()) >= 8 and not found[1]


def test_trials_become_rare_and_still_detect_better_acceptance() -> None:
    device = Device(lambda step, row: 0.95 * (step > 3500))
    _, chosen = device.run(20, weighing(), 6000)
    assert chosen[0], "the prior is one accepted draft per row"
    trials = [step for step, drafts in enumerate(chosen[:3500]) if drafts]
    assert len(trials) < 70 and max(b - a for a, b in pairwise(trials)) > MAX_INTERVAL
    assert sum(map(bool, chosen[-1000:])) > 980


@pytest.mark.parametrize(("rows", "most"), [(1, 0.04), (8, 0.01)])
def test_drafts_that_never_pay_are_rare(rows: int, most: float) -> None:
    """A trial ends before all of its rows if the first ones accept nothing, and one that succeeds does not."""
    device = Device(lambda step, row: 0.7 * (step > 4000), slowdown=1.3, depth=2)
    _, chosen = device.run(rows, weighing(), 8000)
    assert sum(map(bool, chosen[250:1250])) <= most * 1000
    assert sum(map(bool, chosen[-1000:])) > 900


def test_batch_sizes_are_learnt_separately() -> None:
    """Eight rows gain by drafts and 60 lose. Alternating between them causes no additional trials."""

    def rows(step: int) -> int:
        return 8 if step // 60 % 2 else 60

    _, chosen = Device(lambda step, row: 0.6).run(rows, weighing(), 3000)
    many = [bool(drafts) for step, drafts in enumerate(chosen) if rows(step) == 60]
    few = [bool(drafts) for step, drafts in enumerate(chosen) if rows(step) == 8]
    assert sum(many) < 0.03 * len(many) and sum(few) > 0.97 * len(few)


def test_the_length_of_a_trial_is_counted_in_rows() -> None:
    """A trial that begins with one row per step ends soon when there are sixty."""
    chosen = Device(lambda step, row: 0.0).run(lambda step: 1 if step < 40 else 60, weighing(), 60)[1]
    assert sum(map(bool, chosen[40:])) <= 2


def test_without_measured_times_the_cost_model_decides() -> None:
    """The time of a step with prefill does not count. Trials become rare all the same."""
    drafting, cost, chosen = weighing(), ToyCost(free=1), []
    decoding = [sequence(i) for i in range(8)]
    for step in range(1000):
        drafts = drafting.choose(decoding, (), 1 << 16, cost)  # type: ignore[arg-type]
        chosen.append(sum(drafts.values()))
        rows = [Row(i, i, 0, 1 + drafts.get(i, 0), 100, drafts.get(i, 0), DECODE) for i in range(8)]
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

    def random_choice(drafting, decoding, prompts, budget, cost):
        asked[len(plans)] = len(decoding), sum(seq.computed for seq in decoding) // len(decoding)
        choose(drafting, decoding, prompts, budget, cost)
        return {seq.uid: rng.choice([0, 1, 3]) for seq in decoding}

    monkeypatch.setattr(Drafting, "choose", random_choice)
    for seed in range(12):
        engine = suite.engine(pages=24, depth=depth, lookahead=3, delay=depth - 1)
        engine.cost = ToyCost()  # type: ignore[assignment]
        record(engine, plans)
        load = random_load(seed, grammars=True)
        suite.check_outputs(engine, load, suite.run(engine, load))
    # Unless a row found no room, `choose` was asked about exactly the rows of the plan.
    complete = [(rows, length, plans[i]) for i, (rows, length) in asked.items() if len(plans[i]) == rows]
    assert len(complete) > len(asked) / 3
    for rows, length, decodes in complete:
        assert length == sum(row.bound - row.count for row in decodes) // rows
    assert {row.draft for decodes in plans for row in decodes} >= {0, 1, 3}


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
    monkeypatch.setattr(Drafting, "choose", lambda drafting, rows, *rest: asked.append(rows) or {})
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
    engine.cost = ToyCost(passes=1)  # type: ignore[assignment]
    plans: list[list[Row]] = []
    record(engine, plans)
    load = random_load(3)
    suite.check_outputs(engine, load, suite.run(engine, load))
    assert {row.draft for rows in plans for row in rows} == {0, 1}, "0 for a row near its limit"
