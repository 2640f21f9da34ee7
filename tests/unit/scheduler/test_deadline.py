"""scheduler=deadline: earliest first, and rejection of requests that cannot meet their deadline."""

import random

import pytest

from dovetail.core.interfaces import CostModel, FinishReason
from dovetail.plugins.scheduler.config import DeadlineConfig
from dovetail.plugins.scheduler.deadline import DeadlineScheduler


class OneSecondAStep(CostModel):
    """The cost model of the bench's clock."""

    def step_seconds(self, rows):
        return 1.0 if list(rows) else 0.0


def with_cost(b):
    cost = OneSecondAStep(None)
    cost.engine = b.engine.composition.engine
    b.engine.cost = cost
    return b


def test_the_earliest_enters_first_and_no_deadline_comes_last(bench):
    b = bench(DeadlineScheduler, DeadlineConfig(), max_seqs=1)
    never = b.add([1, 2]).uid
    late, soon, late_too = (b.add([1, i], deadline=d).uid for i, d in enumerate([90.0, 30.0, 90.0]))
    b.run()
    assert b.entries == [soon, late, late_too, never]


def test_the_latest_deadline_is_preempted(bench):
    b = bench(DeadlineScheduler, DeadlineConfig(), max_seqs=3, pages=16)
    late, soon, later = (b.add([5] * 8, 16, deadline=d) for d in (900.0, 300.0, 1000.0))
    b.run()
    assert later.preemptions and not soon.preemptions and not late.preemptions


def test_a_deadline_that_cannot_be_met_is_rejected(bench):
    b = with_cost(bench(DeadlineScheduler, DeadlineConfig(), max_seqs=2, budget=8))
    hopeless = b.add([1] * 24, 10, deadline=11.0)  # Three chunks and nine more tokens.
    feasible = b.add([2] * 24, 10, deadline=40.0)
    b.run()
    detail = b.rejected[hopeless.uid]
    assert "24 prompt tokens and 10 output tokens" in detail
    assert "deadline is 10.000 s away" in detail and "take 12.000 s" in detail
    assert hopeless.uid not in b.entries
    assert feasible.uid not in b.rejected and b.ended[feasible.uid] <= 40


def test_a_deadline_that_has_passed(bench):
    b = with_cost(bench(DeadlineScheduler, DeadlineConfig(), max_seqs=1))
    b.add([3, 3], 10)
    b.step()
    missed = b.add([1, 2], deadline=4.0)
    b.run()
    assert "passed" in b.rejected[missed.uid]


def test_without_a_cost_model_nothing_is_rejected(bench):
    b = bench(DeadlineScheduler, DeadlineConfig())
    b.add([1] * 24, 10, deadline=0.5)
    b.run()
    assert not b.rejected


def test_the_hint_counts_and_the_margin(bench):
    def outcome(margin, **hints):
        b = with_cost(bench(DeadlineScheduler, DeadlineConfig(margin=margin)))
        seq = b.add([1, 2], 30, deadline=b.clock.now + 13.0, hints=hints)
        b.step()
        return seq.uid in b.rejected

    assert outcome(1.0)
    assert not outcome(1.0, output_tokens=8)
    assert outcome(2.0, output_tokens=8)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_rejecting_does_not_affect_other_requests(bench, depth):
    refused = 0
    for seed in range(5):
        rng = random.Random(seed)
        b = with_cost(bench(DeadlineScheduler, DeadlineConfig(), max_seqs=3, pages=26, depth=depth, delay=depth - 1))
        for _ in range(30):
            prompt = [rng.randrange(1, 50) for _ in range(rng.randrange(1, 24))]
            deadline = rng.choice([None, b.clock.now + rng.randrange(5, 60)])
            b.add(prompt, rng.randrange(1, 12), deadline=deadline)
            if b.engine.has_work:
                b.step(rng.randrange(3))
        b.run()
        refused += len(b.rejected)
        assert set(b.rejected) | set(b.entries) == set(b.sequences)
    assert refused > 10


def test_reason_is_rejected(bench):
    b = with_cost(bench(DeadlineScheduler, DeadlineConfig()))
    seq = b.add([1, 2], 30, deadline=1.5)
    (event,) = b.engine.step()
    assert (event.uid, event.reason) == (seq.uid, FinishReason.REJECTED)
