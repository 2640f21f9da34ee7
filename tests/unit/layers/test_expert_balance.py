"""Balanced layouts of experts, and the moves from one layout to another, on any loads and layouts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.expert_balance import SPARE, balanced, copies_of, moves, rank_loads, rebalanced


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Return loads of experts, the number of ranks, and slots of each."""
    experts, ranks = draw(st.integers(1, 24)), draw(st.integers(1, 6))
    slots = draw(st.integers(-(-experts // ranks), experts))
    heavy = st.integers(0, 10) | st.integers(0, 1_000_000)
    return draw(st.lists(heavy, min_size=experts, max_size=experts)), ranks, slots


@settings(max_examples=40)
@given(cases())
def test_layouts_are_full_and_balanced(case: tuple[list[int], int, int]) -> None:
    loads, ranks, slots = case
    layouts = balanced(loads, ranks, slots)
    assert [len(layout) for layout in layouts] == [slots] * ranks
    assert {expert for layout in layouts for expert in layout} == set(range(len(loads)))
    assert all(len(set(layout)) == slots for layout in layouts), "an expert is twice on a rank"
    copies = copies_of(loads, ranks, slots)
    assert copies == [sum(expert in layout for layout in layouts) for expert in range(len(loads))]
    each = [load / count for load, count in zip(loads, copies, strict=True)]
    found = rank_loads(loads, layouts)
    assert max(found) - min(found) <= max(each) - min(each) + 1e-6 * max(loads)
    assert sum(found) == pytest.approx(sum(loads))


@settings(max_examples=40)
@given(cases())
def test_the_greatest_load_of_a_copy_is_least(case: tuple[list[int], int, int]) -> None:
    """One copy more or less anywhere would not lower it."""
    loads, ranks, slots = case
    copies = copies_of(loads, ranks, slots)
    assert sum(copies) == ranks * slots and min(copies) >= 1 and max(copies) <= ranks
    more = [load / count for load, count in zip(loads, copies, strict=True) if count < ranks]
    greatest = max(more, default=0)
    given_up = [load / (count - 1) for load, count in zip(loads, copies, strict=True) if count > 1]
    assert min(given_up, default=greatest) >= greatest


def test_copies_of_hot_experts_lower_the_busiest_rank() -> None:
    loads = [800, 100, 100, 100, 100, 100, 100, 100]
    assert max(rank_loads(loads, balanced(loads, 4, 2))) == 900
    layouts = balanced(loads, 4, 3)
    assert [sum(expert in layout for layout in layouts) for expert in range(8)] == [4, 2, 1, 1, 1, 1, 1, 1]
    assert max(rank_loads(loads, layouts)) == 400


def test_small_gains_move_nothing() -> None:
    layouts = ((0, 1), (2, 3))
    assert rebalanced([100, 100, 99, 99], layouts) is layouts
    assert rebalanced([0, 0, 0, 0], layouts) is layouts
    assert rebalanced([100, 100, 10, 10], layouts) == ((0, 2), (1, 3))


@settings(max_examples=40)
@given(cases(), st.randoms(use_true_random=False))
def test_moves_lose_nothing(case: tuple[list[int], int, int], random) -> None:
    """From any layout, copies included, to a balanced one and back. Experts that stay keep their slots."""
    loads, ranks, slots = case
    old = [list(layout) for layout in balanced(random.sample(range(len(loads)), len(loads)), ranks, slots)]
    for layout in old:
        random.shuffle(layout)
    start = tuple(map(tuple, old))
    for first, then in ((start, rebalanced(loads, start)), (start, balanced(loads, ranks, slots))):
        memory = {(rank, slot): expert for rank, layout in enumerate(first) for slot, expert in enumerate(layout)}
        made = moves(first, then)
        for source, to in made:
            assert to.slot != SPARE or source.rank == to.rank, "a rank saves its own experts"
            memory[to] = memory[source]
        assert tuple(tuple(memory[r, s] for s in range(slots)) for r in range(ranks)) == then
        changed = sum(old != new for pair in zip(first, then, strict=True) for old, new in zip(*pair, strict=True))
        saved = sum(to.slot == SPARE for _, to in made)
        assert len(made) == changed + saved and saved <= changed / 2
