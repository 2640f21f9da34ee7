"""Steps verify drafts where that pays: by what was accepted, the cost model, and the device's own times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest

from dovetail.core.compose import Composition, compose
from dovetail.core.engine.drafting import SELDOM, Drafting
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.interfaces import Row, RowFlag, RowResult, RowWork, SamplingParams, StepPlan, StepResult
from dovetail.core.testing.scheduler import SchedulerContract, random_load
from dovetail.plugins.scheduler.config import FCFSConfig
from dovetail.plugins.scheduler.fcfs import FCFSScheduler

K = 4
DECODE = int(RowFlag.DECODE | RowFlag.SAMPLE)


class Predicts:
    """A cost model: 5 ms, and more where there are more tokens than so many."""

    def __init__(self, free: float = 64) -> None:
        self.free = free

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        tokens = sum(row.tokens * row.times for row in rows)
        return 5e-3 * max(1.0, tokens / self.free)


@dataclass
class Device:
    """Runs what `Drafting` chooses."""

    accepts: Callable[[int], float]
    """Share of drafts, each by itself until one is refused, at a step."""
    slower: float = 1.0
    """Steps with drafts take so many times what is predicted."""
    late: int = 1
    """Plans in flight."""
    host: float = 0.0
    """Seconds for which the device waits before a step with drafts."""
    able: float = 1.0
    """Share of rows that may have drafts."""
    stumbles: tuple[int, float] = (0, 1.0)
    """The so-manieth step with drafts takes so many times as long as the others."""

    def run(
        self, rows: int | Callable[[int], int], drafting: Drafting | None, steps: int, drafts: int = K
    ) -> tuple[float, list[int]]:
        """Tokens a second, and the drafts of each step; without a `drafting` always as many."""
        rng, cost, chosen = random.Random(1), Predicts(), []
        seconds, tokens, flight = 0.0, 0, []
        for step in range(steps):
            n = rows if isinstance(rows, int) else rows(step)
            if drafting is not None:
                drafts = drafting.choose(n, 700, cost)  # type: ignore[arg-type]
            count = 1 + drafts
            took = cost.step_seconds([RowWork(count, 700, count, n)]) * (self.slower if drafts else 1.0)
            if drafts and sum(map(bool, chosen)) == self.stumbles[0]:
                took *= self.stumbles[1]
            chosen.append(drafts)
            plan = StepPlan(step, [])
            came = []
            for i in range(n):
                own = drafts * (i < n * self.able)
                plan.rows.append(Row(i, i, 0, 1 + own, 700, own, DECODE))
                accepted = 0
                while accepted < own and rng.random() < self.accepts(step):
                    accepted += 1
                came.append(RowResult(i, i, 0, (7,) * (accepted + 1)))
            idle = self.host if drafts else 0.0
            seconds, tokens = seconds + took + idle, tokens + sum(len(row.tokens) for row in came)
            flight.append((plan, StepResult(step, tuple(came), took, idle)))
            if drafting is not None:
                drafting.launched(plan)
                if len(flight) >= self.late:
                    drafting.update(*flight.pop(0))
        return tokens / seconds, chosen


@pytest.mark.parametrize(("rows", "late"), [(1, 1), (12, 2), (64, 1)])
@pytest.mark.parametrize("slower", [0.8, 1.0, 1.3])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_drafts_cost_no_more_than_the_better_of_all_and_none(share: float, rows: int, slower: float, late: int) -> None:
    """Also where the cost model is wrong by a third."""
    check(Device(lambda step: share, slower, late), rows, {1: 2000, 12: 800, 64: 800}[rows])


@pytest.mark.parametrize(
    ("device", "rows"),
    [
        (Device(lambda step: 0.3, host=4e-3), 8),
        (Device(lambda step: 0.65, able=0.2), 20),
        (Device(lambda step: 0.9, slower=0.3, stumbles=(0, 100.0)), 64),
        (Device(lambda step: 0.9, slower=0.3, stumbles=(4, 100.0)), 64),
    ],
    ids=[
        "drafts that the host makes",
        "few rows that may have some",
        "a kernel is compiled",
        "somebody else is at work",
    ],
)
def test_what_else_drafts_cost_and_what_is_no_cost_of_theirs(device: Device, rows: int) -> None:
    check(device, rows, 1500)


def check(device: Device, rows: int, steps: int) -> None:
    kinds = {"none": (None, 0), "all": (None, K), "paying": (Drafting(K), K)}
    rates = {name: device.run(rows, drafting, steps, drafts)[0] for name, (drafting, drafts) in kinds.items()}
    assert rates["paying"] > 0.95 * max(rates["none"], rates["all"]), rates


def test_trials_become_rare_and_still_find_that_drafts_have_become_good() -> None:
    device = Device(lambda step: 0.95 * (step > 3500))
    _, chosen = device.run(20, Drafting(K), 6000)
    assert chosen[0], "nothing is known at first: a row is expected to accept one"
    tried = [step for step, drafts in enumerate(chosen[:3500]) if drafts]
    assert len(tried) < 30 and max(b - a for a, b in pairwise(tried)) > SELDOM
    assert sum(map(bool, chosen[-1000:])) > 980


def test_numbers_of_rows_are_learnt_by_themselves() -> None:
    """Eight rows gain by drafts, and 60 lose: neither has more trials because the others come between."""

    def rows(step: int) -> int:
        return 8 if step // 60 % 2 else 60

    _, chosen = Device(lambda step: 0.6).run(rows, Drafting(K), 3000)
    many = [bool(drafts) for step, drafts in enumerate(chosen) if rows(step) == 60]
    few = [bool(drafts) for step, drafts in enumerate(chosen) if rows(step) == 8]
    assert sum(many) < 0.03 * len(many) and sum(few) > 0.97 * len(few)


def test_a_trial_is_so_many_rows_whoever_they_are() -> None:
    """It begins with one row, and then there are sixty."""
    chosen = Device(lambda step: 0.0).run(lambda step: 1 if step < 40 else 60, Drafting(K), 60)[1]
    assert sum(map(bool, chosen[40:])) <= 2


def test_without_the_devices_time_the_cost_model_decides() -> None:
    """Of a step with prompts in it nobody knows what its decode rows took. Trials become rare all the same."""
    drafting, cost, chosen = Drafting(K), Predicts(free=1), []
    for step in range(1000):
        drafts = drafting.choose(8, 100, cost)  # type: ignore[arg-type]
        chosen.append(drafts)
        rows = [Row(i, i, 0, 1 + drafts, 100, drafts, DECODE) for i in range(8)]
        plan = StepPlan(step, [*rows, Row(8, 8, 0, 50, 50, 0, 0)])
        results = tuple(RowResult(i, i, 0, (1,) * (1 + (i < 8))) for i in range(9))
        drafting.launched(plan)
        drafting.update(plan, StepResult(step, results, 1e-9 if drafts else 1.0))
    assert sum(map(bool, chosen)) < 40


class Whims:
    """A cost model that thinks otherwise at each step."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        return self.rng.choice([1e-3, 1.0])


class TestFCFS(SchedulerContract):
    __test__ = False

    def make(self, limits, kv):
        return FCFSScheduler(FCFSConfig(), limits, kv)


@pytest.mark.parametrize("depth", [1, 3])
def test_any_choice_gives_every_request_its_own_output(depth: int) -> None:
    suite, seen = TestFCFS(), set()
    for seed in range(12):
        engine = suite.engine(pages=24, depth=depth, lookahead=3, delay=depth - 1)
        engine.cost = Whims(seed)  # type: ignore[assignment]
        drafting = engine.scheduler._drafting  # type: ignore[attr-defined]
        drafting._seconds = lambda rows, length, drafts, cost: cost.step_seconds([])
        schedule = engine.scheduler.schedule

        def noted(ctx, schedule=schedule, drafting=drafting):
            plan = schedule(ctx)
            decodes = [row for row in plan.rows if row.flags & RowFlag.DECODE] if plan else []
            seen.update(row.draft for row in decodes)
            if decodes and drafting._launched[-1][0] == len(decodes):
                # Where every row that was asked for has found its place.
                assert drafting._launched[-1][1] == sum(row.bound - row.count for row in decodes) // len(decodes)
            return plan

        engine.scheduler.schedule = noted
        load = random_load(seed, grammars=True)
        suite.check_outputs(engine, load, suite.run(engine, load))
    assert seen >= {0, 3}


def words(*more: str) -> list[str]:
    return ["app=generate", "model=tiny", "spec_decode=ngram", "engine.device=cpu", "engine.max_seqs=4", *more]


def run(composition: Composition, watch: Callable[[Engine], object]) -> list[list[int]]:
    engine = start_engine(composition)
    watch(engine)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = [engine.add(prompt, params)[0] for prompt in ([5, 6, 7] * 4, list(range(3, 40)), [9] * 20)]
    while engine.has_work:
        engine.step()
    engine.shutdown()
    return [seq.tokens for seq in found]


def test_an_engine_weighs_drafts_where_it_has_a_cost_model_and_may() -> None:
    chosen: list[int] = []

    def none(engine: Engine) -> None:
        engine.scheduler._drafting.choose = lambda *args: chosen.append(0) or 0  # type: ignore[attr-defined]

    found = [run(compose(words("cost=cpu")), none)]
    engines: list[Engine] = []
    for more in ((), ("cost=cpu", "engine.drafts=always")):
        found.append(run(compose(words(*more)), engines.append))
    assert len(chosen) > 20 and found[0] == found[1] == found[2]
    for engine in engines:
        assert engine.counters.drafted > 50, "every step has drafts"


def test_a_policy_of_its_own_is_asked_and_not_overruled() -> None:
    class One(FCFSScheduler):
        def draft_tokens(self, seq, ctx):
            return 1

    suite = TestFCFS()
    suite.make = lambda limits, kv: One(FCFSConfig(), limits, kv)  # type: ignore[method-assign]
    engine = suite.engine(lookahead=3)
    engine.cost = SimpleNamespace(step_seconds=lambda rows: 0.0)  # type: ignore[assignment]
    drafts: set[int] = set()
    schedule = engine.scheduler.schedule

    def noted(ctx):
        plan = schedule(ctx)
        drafts.update(row.draft for row in plan.rows if row.flags & RowFlag.DECODE) if plan else None
        return plan

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    load = random_load(3)
    suite.check_outputs(engine, load, suite.run(engine, load))
    assert drafts == {0, 1}, "none where there is no room"
