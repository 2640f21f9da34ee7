"""ProgressWatch: an engine whose scheduler makes no progress ends, and slow work is no false alarm."""

from __future__ import annotations

import pytest

from dovetail.core.engine.progress import MOST_TURNOVERS, ProgressWatch
from dovetail.core.interfaces import Join, Row, SchedulerLimits, StepPlan

LIMITS = SchedulerLimits(token_budget=16, max_seqs=2, max_len=128)
FOREVER = 10_000


def first_fault(plans, unfinished=range(10**9), waits=False) -> int | None:
    """Return the number of plans until the watch reports a fault."""
    watch = ProgressWatch(LIMITS)
    return next((i for i, plan in enumerate(plans, 1) if watch.launched(plan, unfinished, waits)), None)


def plan(step: int, *, joins=(), leaves=()) -> StepPlan:
    joined = [Join(slot, uid, step, 0) for slot, uid in joins]
    return StepPlan(step, [Row(0, 0, step, 16, 16, 0, 0)], joined, list(leaves))


def replaced(step: int) -> StepPlan:
    """The only running sequence is preempted by the other one."""
    return plan(step, joins=[(0, step % 2)], leaves=[0] if step else [])


def test_sequences_that_displace_each_other() -> None:
    assert first_fault(map(replaced, range(FOREVER))) == MOST_TURNOVERS + 1


def test_sequences_that_their_clients_drop_are_no_livelock() -> None:
    assert first_fault(map(replaced, range(1000)), unfinished=()) is None


def test_a_sequence_that_stays_may_need_long() -> None:
    """One slot keeps its sequence, while the other one changes at each step."""
    plans = [plan(0, joins=[(0, 0), (1, 1)]), *(plan(i, joins=[(1, i)], leaves=[1]) for i in range(1, 1000))]
    assert first_fault(plans) is None


@pytest.mark.parametrize("waits", [False, True])
def test_rows_that_never_yield_a_token(waits: bool) -> None:
    """Rows that wait for the mask of a grammar do not count."""
    found = first_fault((plan(i, joins=[(0, 0)] if not i else ()) for i in range(FOREVER)), waits=waits)
    assert found == (None if waits else ProgressWatch(LIMITS).most_steps + 1)


def test_a_token_starts_the_count_anew() -> None:
    watch = ProgressWatch(LIMITS)
    for step in range(FOREVER):
        assert watch.launched(replaced(step), range(2), False) is None
        if step % 100 == 0:
            watch.progressed()
