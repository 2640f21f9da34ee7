"""The slot ledger refuses plans that do not fit the preceding ones, and its digest distinguishes different
histories."""

from __future__ import annotations

import pytest

from dovetail.core.interfaces import CatchUp, Join, PageDelta, Row, StepPlan
from dovetail.core.parallel.encoding import decode_plan, encode_plan
from dovetail.core.parallel.slot_ledger import SlotLedger


def row(slot: int, uid: int, epoch: int = 1) -> Row:
    return Row(slot, uid, epoch, 1, 1, 0, 0)


def history() -> list[StepPlan]:
    return [
        StepPlan(0, [row(0, 100), row(1, 101)], joins=[Join(0, 100, 1, 0), Join(1, 101, 1, 0)]),
        StepPlan(1, [row(0, 100), row(1, 101)], pages=[PageDelta(0, 1, 0, 5)]),
        StepPlan(2, [row(1, 102)], joins=[Join(1, 102, 1, 0)], leaves=[1]),
        StepPlan(5, [row(0, 100, 2)], joins=[Join(0, 100, 2, 0)], leaves=[0, 1]),
    ]


def after(plans: list[StepPlan]) -> SlotLedger:
    mirror = SlotLedger()
    for plan in plans:
        mirror.apply(plan)
    return mirror


def test_both_sides_agree_over_the_encoding() -> None:
    sender, receiver = SlotLedger(), SlotLedger()
    for plan in history():
        data = encode_plan(plan, sender.digest)
        sender.apply(plan)
        received, state = decode_plan(data)
        receiver.verify(state, received.step)
        receiver.apply(received)
    assert receiver.slots == sender.slots == {0: (100, 2)}
    assert receiver.digest == sender.digest


@pytest.mark.parametrize("lost", range(3))
def test_a_lost_plan_is_noticed_at_the_next(lost: int) -> None:
    plans = history()
    sender = after(plans[: lost + 1])
    receiver = after(plans[:lost])
    with pytest.raises(ValueError, match=f"before step {plans[lost + 1].step} .* lost, repeated or misread"):
        receiver.verify(sender.digest, plans[lost + 1].step)


def test_the_digest_fits_its_field_and_tells_holders_apart() -> None:
    digests = {
        after([StepPlan(0, [], joins=[Join(slot, uid, epoch, 0)])]).digest
        for slot in range(8)
        for uid in range(8)
        for epoch in range(8)
    }
    assert len(digests) == 8**3
    assert all(0 <= digest < 2**63 for digest in digests)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        pytest.param(StepPlan(1, []), "step 1 comes after step 1", id="repeated step"),
        pytest.param(StepPlan(2, [row(3, 1)]), "slot 3, which no sequence holds", id="row without holder"),
        pytest.param(StepPlan(2, [row(0, 7)]), "uid 7, epoch 1 in slot 0, which uid 100, epoch 1", id="other uid"),
        pytest.param(StepPlan(2, [row(0, 100, 2)]), "epoch 2 in slot 0, which uid 100, epoch 1", id="other epoch"),
        pytest.param(StepPlan(2, [row(0, 100), row(0, 100)]), "slot 0 has two rows", id="two rows"),
        pytest.param(StepPlan(2, [row(0, 100)], leaves=[0]), "slot 0, which no sequence holds", id="left slot"),
        pytest.param(StepPlan(2, [], catch_up=[CatchUp(3, 0, 5)]), "slot=3.* no sequence holds", id="catch-up"),
        pytest.param(StepPlan(2, [], leaves=[9]), "slot 9 leaves", id="leaves twice"),
        pytest.param(StepPlan(2, [], joins=[Join(1, 7, 1, 0)]), "uid 7 joins slot 1, which uid 101", id="taken slot"),
        pytest.param(StepPlan(2, [], pages=[PageDelta(0, 9, 0, 1)]), "PageDelta.*slot=9", id="page without holder"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: StepPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        after(history()[:2]).apply(plan)
