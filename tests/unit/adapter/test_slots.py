"""Assignment of slots to adapters."""

from __future__ import annotations

import random

import pytest

from dovetail.core.engine.adapters import AdapterSlots
from dovetail.core.interfaces import Request, SamplingParams, Sequence


def wants(uid: int, adapter: str) -> Sequence:
    return Sequence(uid, Request(uid, (1,), SamplingParams(), adapter=adapter))


def test_sequences_of_one_adapter_share_a_slot() -> None:
    slots = AdapterSlots(2)
    first, second, other, base = wants(1, "a@1"), wants(2, "a@1"), wants(3, "b@2"), wants(4, "")
    assert all(slots.try_acquire(seq) for seq in (first, second, other, base, first))
    assert slots.slot(1) == slots.slot(2) != slots.slot(3)
    assert slots.slot(4) == -1
    slots.release(first)
    assert slots.slot(1) == -1 and slots.slot(2) >= 0
    assert not slots.try_acquire(wants(5, "c@3"))
    slots.release(second)
    slots.release(second)
    assert slots.try_acquire(wants(6, "c@3"))


def test_an_adapter_that_is_in_keeps_its_slot_and_the_longest_unused_goes_first() -> None:
    slots = AdapterSlots(3)
    each = [wants(uid, f"{uid}@{uid}") for uid in range(3)]
    assert all(map(slots.try_acquire, each))
    was = [slots.slot(seq.uid) for seq in each]
    for uid in (1, 0, 2):
        slots.release(each[uid])
    again, new = wants(7, "1@1"), wants(8, "new@9")
    assert slots.try_acquire(again) and slots.slot(7) == was[1]
    assert slots.try_acquire(new) and slots.slot(8) == was[0]


def test_a_forgotten_adapter_makes_room_first() -> None:
    slots = AdapterSlots(2)
    old, gone = wants(1, "old@1"), wants(2, "gone@2")
    assert slots.try_acquire(old) and slots.try_acquire(gone)
    was = slots.slot(2)
    slots.release(old)
    slots.release(gone)
    slots.forget("gone@2")
    assert slots.try_acquire(wants(3, "new@3")) and slots.slot(3) == was


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_request_starves(count: int) -> None:
    """With more adapters than slots and constant load for each, waiting times are bounded and batches are large."""
    rng = random.Random(count)
    slots, waiting, running, waited, sizes = AdapterSlots(count), [], {}, [], []
    for step in range(4000):
        for _ in range(2):
            uid = 10 * step + len(waiting)
            waiting.append((step, wants(step * 100 + uid % 100, f"{rng.randrange(count + 3)}@0")))
        for seq in [seq for seq, end in running.items() if end <= step]:
            slots.release(seq)
            del running[seq]
        for arrival, seq in list(waiting):
            if len(running) < 64 and slots.try_acquire(seq):
                waiting.remove((arrival, seq))
                running[seq] = step + rng.randrange(5, 25)
                waited.append(step - arrival)
        assert len({slots.slot(seq.uid) for seq in running}) <= count
        sizes.append(len(running))
    assert max(waited) < 80 * (count + 3) / count
    assert sum(sizes) / len(sizes) > 10


def test_a_slot_is_drained_only_while_a_sequence_waits_for_another_adapter() -> None:
    slots = AdapterSlots(1)
    runs, other = wants(1, "a@1"), wants(2, "b@2")
    assert slots.try_acquire(runs)
    for _ in range(100):
        slots.try_acquire(other)
    late = wants(3, "a@1")
    assert not slots.try_acquire(late), "the slot is drained, since b waits"
    slots.release(other)
    assert slots.try_acquire(late), "b is gone"


def test_the_longest_waiting_sequence_gets_the_drained_slot() -> None:
    """Otherwise, with a policy that prefers the newest, sequences of the loaded adapter would always come first."""
    slots = AdapterSlots(1)
    runs, other = wants(1, "a@1"), wants(2, "b@2")
    assert slots.try_acquire(runs) and slots.first is None
    for _ in range(100):
        slots.try_acquire(other)
    assert slots.first == 2
    slots.release(runs)
    assert slots.try_acquire(other) and slots.first is None
    assert not slots.try_acquire(wants(3, "a@1"))
