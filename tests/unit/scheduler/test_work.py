"""The work of a decision hardly grows with the queue: it looks at as few of 10 000 waiting sequences as of 100."""

import random

import pytest

from dovetail.core.compose import installed
from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import Request, SamplingParams, SchedulerContext, Sequence
from dovetail.core.testing.scheduler import SchedulerContract
from dovetail.plugins.scheduler import COMPONENTS

SCHEDULERS = [component.name for component in COMPONENTS]
PARAMS = SamplingParams(max_tokens=8, temperature=0)


class Watched(Sequence):
    """Counts the reads of its fields."""

    reads = 0

    def __getattribute__(self, name):
        Watched.reads += 1
        return super().__getattribute__(name)


class User(str):
    """Counts the look-ups by user as reads."""

    def __hash__(self):
        Watched.reads += 1
        return super().__hash__()


class Sorts(PolicyScheduler):
    """A policy that the bound must reject."""

    def order(self, waiting, ctx):
        return sorted(waiting, key=lambda seq: seq.request.priority)


def builtin(name):
    registered = installed().get("scheduler", name)
    return lambda limits, kv: registered.target()(registered.component.config(), limits, kv)


def loaded(make, waiting, users):
    """Return a scheduler with `waiting` sequences in random order and 8 slots."""
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
            user=User(rng.randrange(users)),
        )
        scheduler.add(Watched(uid, request))
    return scheduler


def reads_of_three_steps(make, waiting, users=3):
    scheduler = loaded(make, waiting, users)
    Watched.reads = 0
    for step in range(3):
        scheduler.schedule(SchedulerContext(step, 2.0, 0, 4, scheduler.kv))
    return Watched.reads


@pytest.mark.parametrize("users", [3, 10**6], ids=["few_users", "many_users"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_long_queue_costs_little(name, users):
    short, long = (reads_of_three_steps(builtin(name), waiting, users) for waiting in (100, 10_000))
    assert long < 1.5 * short, f"{short} reads with 100 waiting, {long} with 10 000"


def test_the_bound_refuses_sorting():
    def make(limits, kv):
        return Sorts(None, limits, kv)

    assert reads_of_three_steps(make, 10_000) > 3 * reads_of_three_steps(make, 100)
