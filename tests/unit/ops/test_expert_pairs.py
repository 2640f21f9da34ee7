"""Sorting pairs of token and expert, compiled on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 is set."""

from __future__ import annotations

import os

import pytest
import torch

from dovetail.core.interfaces import Routing

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
if INTERPRETED:
    from dovetail.core.testing.interpreter import mend_interpreter

    mend_interpreter()
elif torch.cuda.is_available():
    pytestmark = pytest.mark.gpu
else:
    pytestmark = pytest.mark.skip(reason="kernels need a GPU or TRITON_INTERPRET=1")


@pytest.mark.parametrize(
    ("tokens", "active", "experts", "spread"),
    [
        (70, 3, 5, "some without"),
        (2100, 4, 6, "some without"),
        (4096, 2, 3, "one has none"),
        (1500, 3, 2, "none has any"),
    ],
)
def test_pairs_are_sorted_by_expert_in_their_order(tokens, active, experts, spread):
    """With up to 4096 pairs and with several blocks of them."""
    from dovetail.core.ops.kernels.expert_pairs import sort_pairs

    chosen = torch.randint(-1, experts, (tokens, active), dtype=torch.int32)
    if spread == "one has none":
        chosen[chosen == 1] = 2
    if spread == "none has any":
        chosen.fill_(-1)
    found = sort_pairs(Routing(chosen.to(DEVICE), torch.ones(tokens, active).to(DEVICE)), experts, 64)
    assert found.order_P is not None and found.tiles_M3 is not None
    flat = chosen.flatten()
    by_expert = [(flat == expert).nonzero().flatten() for expert in range(experts)]
    count = sum(map(len, by_expert))
    assert found.order_P[:count].tolist() == torch.cat(by_expert).tolist()
    *tiles, last = found.tiles_M3.tolist()
    expected, place = [], 0
    for expert, pairs in enumerate(by_expert):
        end = place + len(pairs)
        expected += [[expert, first, end] for first in range(place, end, 64)]
        place = end
    assert tiles[: len(expected)] == expected
    assert {tile[0] for tile in tiles[len(expected) :]} <= {-1}
    assert last[:2] == [len(expected), count]
