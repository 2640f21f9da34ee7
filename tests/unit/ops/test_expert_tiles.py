"""The rule that divides products of routed experts into programs."""

from __future__ import annotations

import pytest
import torch

from dovetail.core.ops.expert_tiles import (
    direct,
    expert_tile,
    most_tiles,
    rows_of_tile,
    specialized,
    specialized_rows,
)


@pytest.mark.parametrize(
    ("rows", "hidden", "channels", "itemsize", "block", "suits"),
    [
        (128, 7168, 2048, 1, (128, 128), True),
        (16, 7168, 2048, 1, (128, 128), True),
        (128, 7168, 2048, 1, (64, 128), False),  # two scales in a box
        (128, 2048, 760, 1, (128, 128), False),  # rows that a tensor map cannot read
        (16, 4096, 14336, 1, None, True),  # a scale per output
        (64, 2048, 768, 2, None, True),
        (32, 2048, 768, 2, None, False),  # few rows
        (128, 7168, 2048, 2, (128, 128), False),  # scales of 16-bit weights
        (128, 7168, 2048, 4, None, False),  # float32
        (128, 4104, 14336, 2, None, False),  # outputs that fill no vector
    ],
)
def test_what_the_kernel_for_hopper_can_multiply(rows, hidden, channels, itemsize, block, suits):
    assert specialized(rows, hidden, channels, itemsize, block) == suits


@pytest.mark.parametrize(
    ("tokens", "active", "experts", "channels", "rows"),
    [
        (64, 8, 128, 768, 16),
        (256, 8, 128, 768, 64),  # 32 rows are no faster
        (1024, 8, 128, 768, 64),  # two tiles of a small expert
        (1025, 8, 128, 768, 128),
        (256, 2, 8, 14336, 128),
    ],
)
def test_rows_of_a_tile_on_hopper(tokens, active, experts, channels, rows):
    assert specialized_rows(tokens * active, experts, channels) == rows


def test_tiles_suffice_for_every_routing():
    """The bound is reached, and each expert's tiles fit below it, for any distribution of pairs."""
    for _ in range(200):
        experts, pairs = (int(torch.randint(1, most, ())) for most in (40, 500))
        rows = rows_of_tile(pairs, experts)
        counts_E = torch.randint(experts, (pairs,)).bincount()
        assert int(((counts_E + rows - 1) // rows).sum()) <= most_tiles(pairs, experts, rows)
    assert most_tiles(8, 128, 16) == 8 and most_tiles(512, 128, 16) == 128 + 24
    assert direct(1, 8, 8) and direct(4, 8, 128) and not direct(5, 8, 128)


def test_tiles_fit_into_shared_memory():
    for gpu_shared in (99 << 10, 227 << 10):
        for rows in (16, 32, 64, 128):
            for gated in (False, True):
                tile = expert_tile(rows, 8, 768, 2048, 2, gated, processors=132, shared=gpu_shared)
                assert tile.shared_bytes(2, gated) <= gpu_shared and tile.stages >= 2
