"""Hopper's kernel for routed experts in the interpreter of Gluon: formats, tiles and routings against the reference."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton, whose interpreter replaces functions of these kernels", allow_module_level=True)

import torch

from dovetail.core.interfaces import PLAIN, ActFormat, Activation, ExpertBias, GatedActivation, Routing
from dovetail.core.ops.expert_tiles import most_tiles, specialized_expert_tile
from dovetail.core.ops.experts import ExpertWeights, gated_experts_reference
from dovetail.core.ops.formats import encode
from dovetail.core.ops.kernels import specialized_experts
from dovetail.core.ops.kernels.expert_pairs import Sorted
from dovetail.core.ops.kernels.experts import _multiply_pairs as multiply_pairs
from dovetail.core.ops.tiles import HOPPER_SHARED
from dovetail.core.testing.gluon_interpreter import interpreted_gluon
from dovetail.core.testing.numeric import row_error
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int8.format import INT8_TOKEN

from .test_experts import CLAMPED, blocks_of, case, rounded

GARBAGE = 1 << 29
FORMATS = {"blocks": FP8_TOKEN, "fp8": FP8_TOKEN, "int8": INT8_TOKEN}
SWIGLU = GatedActivation()
"""No limit."""


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    """So that programs take several units in turn."""
    facts = "NVIDIA H200", 2, True, HOPPER_SHARED
    monkeypatch.setattr(specialized_experts, "device_facts", lambda device: facts)


def sorted_pairs(routing: Routing, experts: int, rows: int) -> Sorted:
    """The pairs sorted by expert, with garbage where the kernels that sort write nothing."""
    experts_P = routing.experts_TK.flatten()
    most = most_tiles(len(experts_P), experts, rows)
    order_P = torch.full((len(experts_P),), GARBAGE, dtype=torch.int32)
    tiles_M3 = torch.tensor([[-1, -GARBAGE, GARBAGE]] * (most + 1), dtype=torch.int32)
    placed = tiles = 0
    for expert in range(experts):
        mine = (experts_P == expert).nonzero().flatten()
        end = placed + len(mine)
        order_P[placed:end] = mine
        for first in range(placed, end, rows):
            tiles_M3[tiles] = torch.tensor([expert, first, end])
            tiles += 1
        placed = end
    tiles_M3[most] = torch.tensor([tiles, placed, 0])
    return Sorted(routing, order_P, tiles_M3, rows, most)


def multiply(
    x: Activation,
    routing: Routing,
    weights: ExpertWeights,
    activation: GatedActivation,
    bias: ExpertBias | None,
    fmt: ActFormat,
    dtype: torch.dtype,
    rows: int,
    precise: bool,
) -> torch.Tensor:
    """Both products and the sum of each token's rows. Memory for results holds NaN."""
    (tokens, active), (experts, hidden, channels) = routing.experts_TK.shape, weights.down.shape
    pairs, tile = (
        sorted_pairs(routing, experts, rows),
        specialized_expert_tile(rows, weights.up.element_size(), HOPPER_SHARED),
    )
    block = weights.block or (0, 0)
    up, down = (None, None) if bias is None else (bias.up, bias.down)
    inner_PF = torch.full((tokens * active, channels), torch.nan, dtype=dtype)
    down_PC = torch.full((tokens * active, hidden), torch.nan, dtype=dtype)
    with interpreted_gluon():
        specialized_experts.multiply_specialized(
            x, weights.up, weights.up_scale, block[::-1], up, pairs, tile, inner_PF, activation, precise
        )
        inner = encode(inner_PF, (fmt,))[fmt]
        specialized_experts.multiply_specialized(
            inner, weights.down, weights.down_scale, block, down, pairs, tile, down_PC, None, precise
        )
    mine = (routing.experts_TK >= 0)[..., None]
    return torch.where(mine, down_PC.view(tokens, active, hidden).float(), 0.0).sum(1)


@pytest.mark.parametrize("kind", ["blocks", "fp8", "fp8, precise", "int8", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "channels", "rows", "routed"),
    [
        (30, 320, 192, 16, "some padding"),
        (90, 192, 144, 64, "random"),
        (140, 256, 80, 128, "random"),
        (150, 64, 48, 128, "one row"),
        (300, 128, 64, 128, "all in one"),
        (20, 128, 64, 64, "no expert"),
    ],
)
def test_products_equal_the_reference(tokens, hidden, channels, rows, routed, kind):
    """Rows of x and outputs that blocks do not divide, several tiles of an expert, and last ones of up to 64 rows."""
    kind, precise = kind.removesuffix(", precise"), kind.endswith("precise")
    fmt, dtype = FORMATS.get(kind, PLAIN), torch.bfloat16 if kind == "bf16" else torch.float16
    biased = tokens % 20 == 0
    x_TC, routing, up, down, bias = case(tokens, 3, 2, hidden, channels, routed, dtype, biased)
    if kind == "blocks":
        weights = blocks_of(3, hidden, channels, (128, 128))
    else:
        weights = ExpertWeights(up, down) if fmt is PLAIN else rounded(up, down, fmt)
    x = encode(x_TC, (fmt,))[fmt]
    how = CLAMPED if biased else SWIGLU
    got = multiply(x, routing, weights, how, bias, fmt, dtype, rows, precise)
    want = gated_experts_reference(x, routing, weights, how, bias, fmt, dtype).float()
    # See test_kernels_of_8_bits_equal_the_reference.
    assert row_error(got, want) < (4e-2 if fmt is not PLAIN else 2e-2 if kind == "bf16" else 5e-3)


def test_one_scale_of_x_serves_all_rows():
    x_TC, routing, up, down, _ = case(40, 3, 2, 64, 48, "random", torch.float16)
    weights = rounded(up, down, FP8_TOKEN)
    x = encode(x_TC, (FP8_TOKEN,))[FP8_TOKEN]
    one = replace(x, scale=torch.full((1, 1), 0.01))
    got = multiply(one, routing, weights, SWIGLU, None, FP8_TOKEN, torch.float16, 64, True)
    every = replace(x, scale=torch.full((40, 1), 0.01))
    assert torch.equal(got, multiply(every, routing, weights, SWIGLU, None, FP8_TOKEN, torch.float16, 64, True))


@pytest.mark.parametrize(
    ("rows", "fast", "dtype", "precise"),
    [
        (64, True, torch.float8_e4m3fn, True),
        (128, True, torch.float8_e4m3fn, False),
        (128, False, torch.float8_e4m3fn, True),
        (64, True, torch.int8, False),
    ],
)
def test_sums_that_would_lose_bits_are_added_in_float32(rows, fast, dtype, precise, monkeypatch):
    """All sums of E4M3, but with `fast_accum` in tiles of 128 rows, as in dense matmuls of many rows."""
    found = []
    monkeypatch.setattr(specialized_experts, "multiply_specialized", lambda *given: found.append(given[-1]))
    weight_EOI, tile = torch.zeros(2, 64, 64).to(dtype), specialized_expert_tile(rows, 1, HOPPER_SHARED)
    x = Activation(FP8_TOKEN, weight_EOI[0], torch.ones(64, 1))
    pairs = sorted_pairs(Routing(torch.zeros(64, 1, dtype=torch.int32), torch.ones(64, 1)), 2, rows)
    multiply_pairs(x, weight_EOI, torch.ones(2, 64), None, (0, 0), pairs, tile, torch.zeros(64, 64), None, fast)
    assert found == [precise]
