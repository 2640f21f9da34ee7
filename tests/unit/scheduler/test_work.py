"""What a decision costs, in lines of Python: a queue of ten thousand is hardly dearer than one of a hundred."""

import random

import pytest

from dovetail.core.compose import installed
from dovetail.core.interfaces import Request, SamplingParams, SchedulerContext, Sequence
from dovetail.core.testing.scheduler import SchedulerContract
from dovetail.core.testing.suite import lines_run
from dovetail.plugins.scheduler import COMPONENTS

SCHEDULERS = [component.name for component in COMPONENTS]
PARAMS = SamplingParams(max_tokens=8, temperature=0)


def loaded(name, waiting, *, users):
    """A scheduler with so many waiting, in an order that suits nobody, and 8 slots."""

    def make(limits, kv):
        registered = installed().get("scheduler", name)
        return registered.target()(registered.component.config(), limits, kv)

    suite = SchedulerContract()
    suite.make = make
    scheduler = suite.engine(max_seqs=8, budget=64, pages=400).scheduler
    rng = random.Random(1)
    for uid in range(waiting):
        prompt = tuple(rng.randrange(1, 50) for _ in range(rng.randrange(1, 16)))
        request = Request(
            uid,
            prompt,
            PARAMS,
            arrival=uid / waiting,
            priority=rng.randrange(5),
            deadline=rng.choice([None, 100 * rng.random()]),
            user=f"u{rng.randrange(users)}",
        )
        scheduler.add(Sequence(uid, request))
    return scheduler


def steps(scheduler, count=3):
    for step in range(count):
        scheduler.schedule(SchedulerContext(step, 2.0, 0, count + 1, scheduler.kv))


def _lines(scheduler):
    return lines_run(lambda: steps(scheduler))


@pytest.mark.parametrize("users", [3, 10**6], ids=["few_users", "many_users"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_long_queue_costs_little(name, users):
    short, long = (_lines(loaded(name, waiting, users=users)) for waiting in (100, 10_000))
    assert long < 1.5 * short + 500, f"{short} lines with 100 waiting, {long} with 10 000"
