"""Drafters that cannot catch up (EAGLE): a row that goes without drafts has none later either."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from dovetail.core.engine.drafting import LEARNT_ROWS, Drafting
from dovetail.core.interfaces import Join, Row, RowFlag, RowResult, RowWork, SchedulerLimits, StepPlan, StepResult

from .test_drafting import DECODE, K, ToyCost, sequence


def feed(drafting: Drafting, seq: Any, decoding: Iterable[Any] = (), *, outputs: bool = False) -> bool:
    """Run a step that feeds the whole prompt of a sequence, beside one token of the decoding ones, which `choose` has
    seen. Return whether the drafter follows it. `outputs`: the limits of outputs are known."""
    rows = [Row(other.slot, other.uid, 0, 1, other.computed + 1, 0, DECODE) for other in decoding]
    rows.append(Row(seq.slot, seq.uid, 0, seq.prompt_len, seq.prompt_len, 0, int(RowFlag.SAMPLE)))
    plan = StepPlan(0, rows, [Join(seq.slot, seq.uid, 0, 0)])
    drafting.launched(plan, {one.uid: one for one in (*decoding, seq)} if outputs else None)
    drafting.update(plan, StepResult(0, tuple(RowResult(row.slot, row.uid, 0, (7,)) for row in rows), 5e-3, 0.0))
    return plan.follows


class Unforgiving:
    """Steps of rows whose drafter cannot catch up (EAGLE)."""

    def __init__(self, cost: ToyCost, lookahead: int = K, depth: int | None = None) -> None:
        limits = SchedulerLimits(
            1 << 16, 256, 1 << 20, lookahead, draft_window=K + 1, draft_resumes=False, draft_depth=depth
        )
        self.drafting, self.cost = Drafting(limits), cost

    def step(self, seqs: list[Any], accepted: Callable[[Any], int] | int) -> list[int]:
        """Run a step, after which the sequences are longer. Return the number of drafts of each."""
        wanted = self.drafting.choose(seqs, (), 1 << 16, self.cost)  # type: ignore[arg-type]
        plan, results = StepPlan(0, []), []
        for seq in seqs:
            own = wanted.get(seq.uid, 0)
            plan.rows.append(Row(seq.slot, seq.uid, 0, 1 + own, seq.computed, own, DECODE))
            tokens = 1 + min(own, accepted if isinstance(accepted, int) else accepted(seq))
            results.append(RowResult(seq.slot, seq.uid, 0, (7,) * tokens, drafted=own))
            seq.computed, seq.max_len = seq.computed + tokens, seq.max_len + tokens
        self.drafting.launched(plan)
        seconds = self.cost.step_seconds([RowWork(len(seqs) + sum(wanted.values()), 700)])
        drafting = 1e-3 * self.cost.passes if wanted else 0.0
        self.drafting.update(plan, StepResult(0, tuple(results), seconds + drafting, 0.0))
        return [row.draft for row in plan.rows]


def request(uid: int, slot: int = 0, room: int = 9000) -> Any:
    """A sequence that may have `room` more tokens."""
    seq = sequence(slot)
    seq.uid, seq.limit = uid, seq.max_len + room
    return seq


def test_the_end_of_a_request_keeps_no_drafts_from_the_next_one() -> None:
    """The last steps of a request have no room for drafts. A drafter that must follow the next one does so from its
    first step on, or not at all."""
    one = Unforgiving(ToyCost())
    short, following = request(1), request(2)
    assert feed(one.drafting, short) and one.step([short], K) != [0]
    for _ in range(3):
        short.limit = short.max_len + 1
        assert one.step([short], 0) == [0]
    assert feed(one.drafting, following) and one.step([following], K) != [0]


def test_rows_near_their_end_keep_no_drafts_from_the_next_ones() -> None:
    """Only one of three rows has room for a draft, which does not pay alone."""
    many = Unforgiving(ToyCost(128, 4.0))
    short, following = ([request(uid + i, i) for i in range(3)] for uid in (0, 3))
    assert all(feed(many.drafting, seq) for seq in short) and all(many.step(short, K))
    for _ in range(3):
        for seq, room in zip(short, (2, 1, 1), strict=True):
            seq.limit = seq.max_len + room
        assert many.step(short, 0) == [0] * 3
    assert all(feed(many.drafting, seq) for seq in following) and all(many.step(following, K))


def test_prompts_are_followed_if_drafts_of_their_outputs_repay_it() -> None:
    one, first = Unforgiving(ToyCost(128, 4.0)), request(0)
    assert feed(one.drafting, first)
    for _ in range(20):
        one.step([first], K)
    followed = [feed(one.drafting, request(uid, room=room), outputs=True) for uid, room in ((1, 0), (2, 9), (3, 0))]
    assert followed == [False, True, False], "a draft saves 3.2 ms a token, and following 4 ms are spent"


def test_useless_drafts_are_known_at_numbers_of_rows_that_are_new() -> None:
    one = Unforgiving(ToyCost(64, 1.0))
    many = [request(i, i) for i in range(64)]
    assert feed(one.drafting, many[0], many[1:], outputs=True)
    one = Unforgiving(ToyCost(64, 1.0))
    for first in map(request, range(3)):
        feed(one.drafting, first)
        for _ in range(20):
            one.step([first], 0)
    assert not feed(one.drafting, many[0], many[1:], outputs=True)


def test_rows_near_the_break_even_point_keep_their_drafts() -> None:
    """Without drafts they would be lost to the drafter, also for steps with fewer rows."""
    many = Unforgiving(ToyCost(128, 4.7))
    rows = [request(i, i) for i in range(16)]
    assert all(feed(many.drafting, seq) for seq in rows)
    for step in range(100):
        drafts = many.step(rows, lambda seq, step=step: int(seq.uid != step % 16))
    assert all(drafts)
    for _ in range(20):
        drafts = many.step(rows, 0)
    assert not any(drafts)


def test_one_rejection_does_not_give_up_drafts_for_a_whole_request() -> None:
    """A row that goes without drafts leaves the drafter behind, until its end. Useless drafts are given up soon."""
    one = Unforgiving(ToyCost(128, 1.0))
    short, long = request(0, room=3), request(1)
    assert feed(one.drafting, short) and one.step([short], 0) != [0]
    assert feed(one.drafting, long)
    assert all(one.step([long], accepted) != [0] for accepted in (0, 0))
    assert sum(one.step([long], K) != [0] for _ in range(40)) > 35, "but for trials"
    useless, first = Unforgiving(ToyCost(128, 1.0)), request(0)
    assert feed(useless.drafting, first)
    assert LEARNT_ROWS <= sum(useless.step([first], 0) != [0] for _ in range(60)) < LEARNT_ROWS + 4


def test_a_useless_tree_is_given_up_as_soon_as_a_chain() -> None:
    """A single draft of a large tree is little evidence of the tree, and as much of whether drafts are of use."""
    useless, first = Unforgiving(ToyCost(128, 1.0), lookahead=64, depth=4), request(0)
    assert feed(useless.drafting, first)
    assert LEARNT_ROWS <= sum(useless.step([first], 0) != [0] for _ in range(200)) < LEARNT_ROWS + 12


def test_trials_leave_no_row_behind_that_cannot_catch_up() -> None:
    """One row in sixteen accepts all drafts, and one step without drafts would lose it."""
    many = Unforgiving(ToyCost(100))
    rows = [request(i, i) for i in range(16)]
    for seq in rows:
        assert feed(many.drafting, seq)
    for _ in range(200):
        many.step(rows, lambda seq: K if seq.uid == 0 else K - 1)
    assert many.step(rows, 0) == [K] * 16


@pytest.mark.parametrize(("times", "follows"), [(0.9, False), (1.2, False), (1.8, True)])
def test_prompts_are_followed_where_drafts_surely_pay(times: float, follows: bool) -> None:
    """Drafts that are to save hardly more than that takes may never come, and first tokens are late in any case."""
    drafting = Drafting(SchedulerLimits(1 << 16, 256, 1 << 20, K, draft_window=K + 1, draft_resumes=False))
    seq, cost = sequence(0), ToyCost(passes=1.0)
    seq.prompt_len = 700
    bucket = drafting._buckets[1]
    bucket.level, bucket.left = 1, 1000.0
    bucket.saved = times * cost.follow_seconds(()) / (seq.limit - seq.prompt_len)
    drafting._cost, drafting._chosen = cost, None  # type: ignore[assignment]
    plan = StepPlan(0, [Row(0, 0, 0, 700, 700, 0, int(RowFlag.SAMPLE))])
    drafting.launched(plan, {0: seq})
    assert plan.follows is follows
