"""Hopper's kernels for compressed latents in the interpreter of Gluon, against float64: formats, tiles and ranges."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton, whose interpreter replaces functions of these kernels", allow_module_level=True)

import torch

from dovetail.core.interfaces import MLA, AttentionLayer
from dovetail.core.ops.latents import LATENT, ROTARY, SCALES
from dovetail.core.testing.gluon_interpreter import interpreted_gluon
from dovetail.plugins.attention.triton.absorbed import HOPPER_KEYS, LatentTile
from dovetail.plugins.attention.triton.hopper.launch import latents
from dovetail.plugins.attention.triton.plan import ITEM

RANK, ROTATED, DIM, PAGE, TOKENS = 512, 64, 192, 16, 3
SIZES = MLA(1536, RANK, ROTATED, 128, 128)
GARBAGE = 1 << 29


def pages(count: int, kv_dtype: torch.dtype) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """Planes of a layer, and what they hold in float64 [slots, RANK + ROTATED]. Page 0 holds NaN."""
    if kv_dtype.itemsize == 2:
        latent = torch.randn(count, PAGE, RANK + ROTATED).to(kv_dtype)
        latent[0] = torch.nan
        return {LATENT: latent}, latent.double().flatten(0, 1)
    latent = (torch.randn(count, PAGE, RANK) * 100).clamp(-448, 448).to(kv_dtype)
    scales, rotary = torch.rand(count, PAGE, 4) * 0.01, torch.randn(count, PAGE, ROTATED).bfloat16()
    scales[0] = rotary[0] = torch.nan
    wide = (latent.double().unflatten(2, (4, -1)) * scales.double()[..., None]).flatten(2)
    return {LATENT: latent, SCALES: scales, ROTARY: rotary}, torch.cat((wide, rotary.double()), 2).flatten(0, 1)


def items_of(lengths: list[int], counts: list[int], splits: int, queries: int, joins: bool) -> torch.Tensor:
    """Items as plan_items makes them: a tile for each `queries` tokens, with `splits` ranges, and unused ones."""
    items: list[list[int]] = []
    start = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for query in range(0, count, queries):
            at, some = length - count + query, min(queries, count - query)
            first, each = len(items), -(-length // (splits * HOPPER_KEYS)) * HOPPER_KEYS
            for split in range(splits):
                lo, seen = split * each, min(at + some, length)
                hi = min(seen, lo + each) if splits > 1 else seen
                part = len(items) * queries if splits > 1 or not joins else -1
                items.append([row, start + query, some, at, 0, lo, hi, part, length, splits, first])
        start += count
    # A token of no row, and an item that is not used.
    items.append([0, start, 1, 0, 0, 0, 0, -1 if joins else len(items) * queries, 0, 1, len(items)])
    items.append([-1] + [GARBAGE] * (ITEM.value - 1))
    return torch.tensor(items, dtype=torch.int32)


def joined(parts: torch.Tensor, lse: torch.Tensor, places: list[int]) -> torch.Tensor:
    """The join of partial results [heads, RANK]."""
    weights = torch.exp2(lse[places].double() - lse[places].double().amax(0))
    parts = parts[places].view(len(places), lse.shape[1], RANK).double()
    return (parts * weights[..., None]).sum(0) / weights.sum(0)[:, None]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16])
@pytest.mark.parametrize(
    ("rows", "heads", "count", "splits", "joins"),
    [
        (16, 16, 1, 1, True),
        (16, 16, 1, 2, True),
        (16, 16, 1, 3, False),
        (16, 5, 4, 1, True),
        (16, 4, 3, 2, True),
        (64, 16, 1, 1, True),
        (64, 16, 5, 2, True),
        (64, 80, 1, 2, True),
    ],
)
def test_kernels_equal_float64(rows, heads, count, splits, joins, kv_dtype):
    """Rows of one key, of a block, of one key more and of several blocks, with more items than programs."""
    dtype = kv_dtype if kv_dtype.itemsize == 2 else torch.bfloat16
    lengths, counts = [max(count, one) for one in (1, 64, 65, 150)], [count] * 4
    tokens, longest = sum(counts), -(-max(lengths) // PAGE)
    planes, held = pages(4 * longest + 1, kv_dtype)
    table = (torch.randperm(4 * longest) + 1).int().view(4, longest)
    layer = AttentionLayer(0, 0, 0, heads, heads, DIM, DIM**-0.5, mla=SIZES)
    tile = LatentTile(rows, HOPPER_KEYS, 4, 1, 1, joins=joins, hopper=True)
    queries = tile.queries(heads)
    items = items_of(lengths, counts, splits, queries, joins)
    finished = torch.zeros(len(items) * tile.head_tiles(heads), dtype=torch.int32)
    inner_HTL, q_THD = (
        torch.randn(heads, tokens + 1, RANK).to(dtype) * 0.3,
        torch.randn(tokens + 1, heads, DIM).to(dtype),
    )
    mixed = torch.full((tokens + 1, heads, RANK), torch.nan, dtype=dtype)
    parts = torch.full((len(items) * queries, heads * RANK), torch.nan)
    lse = torch.full((len(items) * queries, heads), torch.nan)
    meta: Any = SimpleNamespace(page_table_BP=table, page_tokens=PAGE)
    with interpreted_gluon():
        latents(
            layer, inner_HTL, q_THD[..., DIM - ROTATED :], planes, meta, tile, items, finished, mixed, parts, lse, 1
        )
    assert not finished.any(), "counters are zero for the next launch"
    for token in range(tokens):
        row, query = divmod(token, count)
        slots = (table[row].long()[:, None] * PAGE + torch.arange(PAGE)).flatten()[: lengths[row] - count + query + 1]
        latent, rotated = held[slots].split((RANK, ROTATED), 1)
        q_HR = q_THD[token, :, DIM - ROTATED :].double()
        scores = (inner_HTL[:, token].double() @ latent.T + q_HR @ rotated.T) * layer.scale
        want = scores.softmax(-1) @ latent
        places = [int(i[7]) + token - int(i[1]) for i in items[:-2] if 0 <= token - int(i[1]) < int(i[2])]
        got = mixed[token].double() if joins else joined(parts, lse, places)
        assert ((got - want).norm(dim=1) / want.norm(dim=1)).max() < 6e-3
    if joins:
        assert not mixed[tokens].any(), "tokens of no row are zeros"


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_nan_stays_nan_in_ranges_that_another_kernel_joins(kv_dtype):
    """`project_ranges` leaves out ranges whose logarithm is minus infinity, which those without keys have."""
    heads, broken = 16, 0
    planes, _ = pages(11, kv_dtype)
    table = (torch.arange(10) + 1).int().view(2, 5)
    layer = AttentionLayer(0, 0, 0, heads, heads, DIM, DIM**-0.5, mla=SIZES)
    tile = LatentTile(16, HOPPER_KEYS, 4, 1, 1, joins=False, hopper=True)
    items = items_of([70, 70], [1, 1], 2, 1, False)
    inner_HTL, q_THD = torch.randn(heads, 3, RANK).bfloat16(), torch.randn(3, heads, DIM).bfloat16()
    inner_HTL[:, broken] = torch.nan
    parts, lse = torch.zeros(len(items), heads * RANK), torch.zeros(len(items), heads)
    meta: Any = SimpleNamespace(page_table_BP=table, page_tokens=PAGE)
    with interpreted_gluon():
        latents(
            layer, inner_HTL, q_THD[..., DIM - ROTATED :], planes, meta, tile, items, torch.zeros(len(items)).int(),
            torch.empty(0, heads, RANK).bfloat16(), parts, lse, 1,
        )  # fmt: skip
    assert lse[:2].isnan().all() and lse[2:4].isfinite().all() and parts[2:4].isfinite().all()
    assert (lse[4] == -torch.inf).all() and not parts[4].any(), "a token of no row"
