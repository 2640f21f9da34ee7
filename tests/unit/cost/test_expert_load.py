"""Expected work of the busiest expert rank, against drawn routings, and its part in predicted times."""

from __future__ import annotations

import random

import pytest

from dovetail.core.expert_load import exchanged_rows, expert_load
from dovetail.core.interfaces import MoE


@pytest.mark.parametrize(("experts", "active", "ep"), [(128, 8, 8), (256, 8, 8), (8, 2, 4), (64, 6, 2)])
@pytest.mark.parametrize("tokens", [1, 16, 200])
def test_the_busiest_rank_is_that_of_drawn_routings(experts, active, ep, tokens):
    """The estimate may be above the mean of the draws by the little that a few discrete numbers deviate."""
    rng, each = random.Random(1), experts // ep
    distinct, pairs = [], []
    for _ in range(100):
        chosen = [expert for _ in range(tokens) for expert in rng.sample(range(experts), active)]
        owners = [expert // each for expert in chosen]
        pairs.append(max(owners.count(rank) for rank in range(ep)))
        there = [expert // each for expert in set(chosen)]
        distinct.append(max(there.count(rank) for rank in range(ep)))
    load = expert_load(MoE(experts, active, 1), tokens, ep)
    assert load.distinct == pytest.approx(sum(distinct) / 100, rel=0.2)
    assert load.pairs == pytest.approx(sum(pairs) / 100, rel=0.2)
    assert load.reads >= 1 and load.products >= 1


def test_copies_share_the_tokens_of_an_expert():
    """Copies of a few experts, then one of each on every rank: that is the load of as many experts on one rank."""
    moe = MoE(64, 6, 1)
    for tokens, ep, redundant in ((16, 4, 8), (200, 4, 8), (5, 2, 64)):
        rng, distinct = random.Random(tokens), []
        for _ in range(200):
            seen = set()
            for _token in range(tokens):
                for expert in rng.sample(range(64), 6):
                    copies = 1 + redundant // 64 + (expert < redundant % 64)
                    seen.add((expert, rng.randrange(copies)))
            distinct.append(len(seen) / ep)
        load = expert_load(moe, tokens, ep, redundant)
        assert load.distinct / load.reads == pytest.approx(sum(distinct) / 200, rel=0.03)
        assert load.pairs / load.products == pytest.approx(tokens * 6 / ep)
    assert expert_load(moe, 16, 4, 0) == expert_load(moe, 16, 4)


def test_one_rank_has_no_excess():
    load = expert_load(MoE(128, 8, 1), 16, 1)
    assert (load.reads, load.products, load.pairs) == (1, 1, 128)


def test_rows_go_only_where_they_must():
    """With as many experts of a token as ranks, all_to_all moves less than gather; with far more, about as much."""
    assert exchanged_rows("sum", 8, 8, 8) == exchanged_rows("gather", 8, 8, 8) == 3.5
    assert exchanged_rows("all_to_all", 1, 8, 8) == pytest.approx(1.75 + 2 * 7 / 64)
    assert exchanged_rows("all_to_all", 64, 8, 8) == pytest.approx(3.5, rel=0.01)
    assert exchanged_rows("all_to_all", 2, 8, 2) > exchanged_rows("all_to_all", 2, 8, 8)
    assert exchanged_rows("gather", 8, 1, 8, lanes=8) == 14, "a lane of one rank sends each row to seven, and sums back"
