"""The kernel for prompts on Hopper against float64: rows of any length, after any prefix, in pages of any size."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dovetail.core.interfaces import PLAIN
from dovetail.plugins.attention.config import TritonConfig

from .attention_cases import Case, error, expected, make_step

pytest.importorskip("triton")
from dovetail.plugins.attention.triton.backend import Triton
from dovetail.plugins.attention.triton.gpu import has_hopper
from dovetail.plugins.attention.triton.tiles import PromptTile, Shape, Tile, Tiles

GPU = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (torch.cuda.is_available() and has_hopper(GPU)), reason="needs a Hopper GPU"),
]
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
TILES = {
    "short blocks": PromptTile(128, 64, 4, 4, 1, least=256, tma=True, persistent=True),
    "long blocks": PromptTile(128, 128, 4, 2, 1, least=256, tma=True, persistent=True),
    "a program an item": PromptTile(128, 128, 4, 2, 1, least=256, tma=True),
}
NEAR = {BF16: 6e-3, FP16: 1e-3}


class Given(Tiles):
    def __init__(self, tile: PromptTile) -> None:
        self.tile = tile

    def prefill(self, shape: Shape, tokens: int, rows: int) -> Tile:
        assert shape.attends_prompts
        return self.tile


def rows(*pairs: tuple[int, int], padding: int = 0) -> dict:
    """Make rows, given the tokens of each row and the keys before them."""
    counts = tuple(count for count, _ in pairs)
    return {"counts": counts, "lengths": tuple(count + before for count, before in pairs), "padding": padding}


def check(case: Case, tile: PromptTile) -> None:
    backend = Triton(TritonConfig())
    backend.tiles = Given(tile)
    step = make_step(case, backend, GPU)
    got, again = (backend.attend(step.layer, step.ctx, step.q_THD)[PLAIN].values for _ in range(2))
    assert error(got, expected(step)) < NEAR[case.dtype]
    assert (got[sum(case.counts) :] == 0).all()
    assert torch.equal(got, again)
    for plan in step.ctx.state.values():
        for items in plan.lists:
            assert not items.counts.any(), "counters that are no longer zero"


FEW = ((random.randint(1, 700), random.randint(1, 900)), (1, 0), (1, 129), (127, 1), (128, 0), (300, 64))
LLAMA = Case(**rows(*FEW), heads=(32, 8), dim=128, page_tokens=64, dtype=BF16)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_rows_of_any_length(tile):
    check(replace(LLAMA, padding=77), tile)
    some = [(random.randint(1, 3000), random.choice((0, 0, random.randint(1, 3000)))) for _ in range(9)]
    check(replace(LLAMA, **rows(*some)), tile)
    check(replace(LLAMA, **rows(*[(64, 0)] * 40)), tile)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_long_rows_are_split_and_joined(tile):
    for few in (((64, 20000),), ((33, 9000), (16, 15000), (20, 1)), ((2048, 8192), (5, 3))):
        check(replace(LLAMA, **rows(*few)), tile)


@pytest.mark.parametrize("window", [1, 100, 1024])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_windows(tile, window):
    check(replace(LLAMA, **rows((3000, 0), *FEW, (1000, 4000)), window=window), tile)
    check(replace(LLAMA, **rows((500, 9000), (20, 300)), window=window, dim=64, dtype=FP16), tile)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("scores", [{"sinks": True}, {"soft_cap": 0.7}, {"soft_cap": 2.0, "sinks": True}])
def test_sinks_and_capped_scores(tile, scores):
    check(replace(LLAMA, **rows((3000, 0), *FEW, (64, 20000), padding=77), **scores), tile)
    check(replace(LLAMA, **rows((500, 9000), (20, 300)), heads=(14, 2), dim=80, window=128, **scores), tile)


@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (64, 8), (64, 1)])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_heads(heads, dim, dtype):
    for tile in TILES.values():
        check(replace(LLAMA, heads=heads, dim=dim, dtype=dtype), tile)


@pytest.mark.parametrize("heads", [(8, 8), (14, 2), (71, 1), (15, 1), (40, 2)])
@pytest.mark.parametrize("dim", [48, 64, 80, 96, 192, 256])
def test_head_dims_and_groups_that_are_padded(heads, dim):
    shape = Shape(heads[0] // heads[1], dim, BF16, BF16, 64, hopper=True)
    for tile in [Tiles().prefill(shape, 4096, 1)] if dim > 128 else TILES.values():
        check(replace(LLAMA, heads=heads, dim=dim), tile)
        check(replace(LLAMA, **rows((300, 2000), (5, 0)), heads=heads, dim=dim, window=100), tile)


@pytest.mark.parametrize("page_tokens", [64, 128, 192])
def test_pages(page_tokens):
    check(replace(LLAMA, **rows(*FEW, (1500, 3000)), page_tokens=page_tokens), TILES["long blocks"])


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_steps_whose_bounds_are_capacities(tile):
    """Rows as in a captured graph: decode rows first, then shorter than planned for or without tokens."""
    case = replace(LLAMA, lengths=(1500, 33, 4097, 800, 2061), counts=(1, 1, 1, 700, 513), num_decode=3, padding=5)
    for slack in (0, 3000):
        check(replace(case, slack=slack, empty_rows=2), tile)


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("head_scales", [False, True])
def test_float8_pages_are_gathered(page_tokens, head_scales):
    case = replace(LLAMA, **rows((2048, 0), (1000, 3000)), page_tokens=page_tokens, kv_dtype=E4M3)
    for tile in TILES.values():
        check(replace(case, head_scales=head_scales), tile)


@pytest.mark.parametrize("page_tokens", [16, 32])
def test_short_pages_are_gathered(page_tokens):
    for tile in TILES.values():
        check(replace(LLAMA, **rows((700, 0), (1000, 3000)), page_tokens=page_tokens), tile)
