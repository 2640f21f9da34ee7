"""scheduler=priority: admission, preemption, aging."""

import random

import pytest

from dovetail.plugins.scheduler.config import PriorityConfig
from dovetail.plugins.scheduler.priority import PriorityScheduler


def test_the_most_urgent_enters_first_and_equals_by_arrival(bench):
    b = bench(PriorityScheduler, PriorityConfig(), max_seqs=1)
    uids = [b.add([1, 2, i], priority=p).uid for i, p in enumerate([2, 0, 1, 0, 2])]
    b.run()
    assert b.entries == [uids[i] for i in (1, 3, 2, 0, 4)]


def test_the_newest_of_the_least_urgent_is_preempted(bench):
    b = bench(PriorityScheduler, PriorityConfig(), max_seqs=3)
    first, second, other = (b.add([1, 2, i], 20, priority=p) for i, p in enumerate([5, 5, 3]))
    b.step(4)
    urgent = b.add([9, 9], 2, priority=0)
    b.step()
    assert b.entries[-1] == urgent.uid
    assert [seq.preemptions for seq in (first, second, other)] == [0, 1, 0]
    b.run()
    assert b.preemptions == 1


@pytest.mark.parametrize("priority", [4, 3])
def test_equal_or_lower_priority_does_not_preempt(bench, priority):
    b = bench(PriorityScheduler, PriorityConfig(), max_seqs=2)
    for i in range(2):
        b.add([1, 2, i], 12, priority=3)
    b.step(3)
    b.add([9, 9], 2, priority=priority)
    b.run()
    assert b.preemptions == 0


def test_no_more_sequences_are_preempted_than_pages_are_needed(bench):
    b = bench(PriorityScheduler, PriorityConfig(), max_seqs=6, pages=24)
    low = [b.add([i, 1, 2, 3, 4, 5, 6], 16, priority=1) for i in range(1, 5)]
    b.step(24)
    urgent = b.add(list(range(1, 33)), 2, priority=0)
    b.step(2)
    assert urgent.slot >= 0
    assert 0 < sum(seq.preemptions for seq in low) < len(low)
    assert low[0].preemptions == 0
    b.run()


def test_nothing_is_preempted_while_there_is_room(bench):
    b = bench(PriorityScheduler, PriorityConfig(), max_seqs=3, pages=200)
    for i in range(2):
        b.add([1, 2, i], 12, priority=3)
    b.step(3)
    b.add([9, 9], 2, priority=0)
    b.run()
    assert b.preemptions == 0


def test_without_budget_an_urgent_sequence_joins_and_runs_later(bench):
    b = bench(PriorityScheduler, PriorityConfig(), max_seqs=4, budget=3, pages=200)
    for i in range(4):
        b.add([1, i], 20, priority=1)
    b.step(8)
    urgent = b.add([9, 8, 7], 2, priority=0)
    b.step()
    plan = b.engine.executor.plans[-1]
    assert urgent.uid in {join.uid for join in plan.joins} and urgent.uid not in {row.uid for row in plan.rows}
    b.run()


@pytest.mark.parametrize("age", [None, 10.0])
def test_with_aging_the_least_urgent_does_not_starve(bench, age):
    b = bench(PriorityScheduler, PriorityConfig(age_seconds=age), max_seqs=1)
    running, old = b.add([1, 2], 4, priority=0), b.add([5, 5], 4, priority=3)
    for i in range(120):
        if i % 4 == 0:
            b.add([7, i % 50], 4, priority=0)  # Each takes eight seconds.
        b.step()
    assert running.uid in b.ended
    # Three levels of ten seconds: the first eight urgent requests go before it.
    assert (old.uid in b.ended) == (age is not None)
    b.run()


@pytest.mark.parametrize("age", [None, 40.0])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_preemption_changes_no_token(bench, clock, depth, age):
    """Many levels, few slots and pages, delayed results; every output is checked."""
    displaced = 0
    for seed in range(6):
        rng = random.Random(seed)
        config = PriorityConfig(age_seconds=age)
        b = bench(PriorityScheduler, config, max_seqs=3, pages=26, depth=depth, delay=depth - 1)
        for _ in range(30):
            prompt = [rng.randrange(1, 50) for _ in range(rng.randrange(1, 24))]
            b.add(prompt, rng.randrange(1, 16), priority=rng.randrange(4))
            b.step(rng.randrange(9))
        b.run()
        displaced += b.preemptions
    assert displaced > 20
