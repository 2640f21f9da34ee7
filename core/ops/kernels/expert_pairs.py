"""Pairs of token and expert in the order of experts, for the products of routed experts: each tile has rows of one
expert. All shapes are static: tiles that a step does not need have no expert, so one CUDA graph serves every routing.

Shapes: T tokens, K experts of a token, P = T * K pairs, M tiles, C hidden channels, F channels of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.interfaces.expert import Routing
from dovetail.core.ops.expert_tiles import LEAST_ROWS, ExpertTile, direct, most_tiles, rows_of_tile
from dovetail.core.ops.kernels.launch import announce, dependent, wait

MOST_BLOCK = 4096


@triton.jit
def _count(experts_ptr, start, pairs, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many of a block's pairs each expert has; the last bin is for pairs without an expert."""
    at = start + tl.arange(0, BLOCK)
    found = tl.load(experts_ptr + at, mask=at < pairs, other=-1)
    return tl.histogram(tl.where(found < 0, BINS - 1, found), BINS)


@triton.jit(do_not_specialize=["pairs"])
def _count_pairs(experts_ptr, counts_ptr, pairs, BINS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Count the pairs of each expert in a block of pairs."""
    announce(PDL)
    wait(PDL)
    block = tl.program_id(0)
    counts = _count(experts_ptr, block * BLOCK, pairs, BINS, BLOCK)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _group_pairs(
    experts_ptr,
    counts_ptr,
    order_ptr,
    tiles_ptr,
    pairs,
    tiles,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (expert, block of pairs): sort the expert's pairs in the block behind those of the experts and blocks
    before it, in order. `counts_ptr`: counts of each block; None = there is one block. The program of the first block
    writes the expert's tiles: expert, first place in the sorted order, and end of the expert's places. Tiles that are
    not needed have expert -1. Behind them are the numbers of tiles that are needed and of pairs that have an expert."""
    announce(PDL)
    wait(PDL)
    expert, block = tl.program_id(0), tl.program_id(1)
    bins = tl.arange(0, BINS)
    placed = 0
    if counts_ptr is None:
        counts = _count(experts_ptr, 0, pairs, BINS, BLOCK)
    else:
        counts = tl.zeros((BINS,), tl.int32)
        for each in range(tl.num_programs(1)):
            found = tl.load(counts_ptr + each * BINS + bins)
            counts += found
            placed += tl.sum(tl.where((bins == expert) & (each < block), found, 0), axis=0)
    earlier = bins < expert
    first = tl.sum(tl.where(earlier, counts, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(experts_ptr + at, mask=at < pairs, other=-1) == expert
    ranks = tl.cumsum(mine.to(tl.int32), axis=0)
    tl.store(order_ptr + first + placed + ranks - 1, at, mask=mine)
    if block == 0:
        tile = tl.sum(tl.where(earlier, (counts + ROWS - 1) // ROWS, 0), axis=0)
        needed = (count + ROWS - 1) // ROWS
        for each in range(needed):
            to = tiles_ptr + 3 * (tile + each)
            tl.store(to, expert)
            tl.store(to + 1, first + each * ROWS)
            tl.store(to + 2, first + count)
        if expert == EXPERTS - 1:
            for unused in range(tile + needed, tiles):
                tl.store(tiles_ptr + 3 * unused, -1)
            tl.store(tiles_ptr + 3 * tiles, tile + needed)
            tl.store(tiles_ptr + 3 * tiles + 1, first + count)


@triton.jit(do_not_specialize=["tiles"])
def _gather_rows(x_ptr, experts_ptr, order_ptr, tiles_ptr, columns_ptr, out_ptr, tiles, columns, ACTIVE: tl.constexpr,
                 BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Copy the row of x of the pair at each place. `order_ptr`: None = places are pairs. `columns_ptr`: column of x at
    each place of an expert's rows; None = as in x."""
    announce(PDL)
    wait(PDL)
    place = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    pair = place
    if order_ptr is not None:
        exists = place < tl.load(tiles_ptr + 3 * tiles + 1)
        pair = tl.load(order_ptr + place, mask=exists, other=0)
    else:
        exists = tl.load(experts_ptr + pair) >= 0
    if exists:
        column = at
        if columns_ptr is not None:
            expert = tl.load(experts_ptr + pair).to(tl.int64)
            column = tl.load(columns_ptr + expert * columns + at, mask=inside, other=0)
        row = (pair // ACTIVE).to(tl.int64)
        x = tl.load(x_ptr + row * columns + column, mask=inside)
        tl.store(out_ptr + place.to(tl.int64) * columns + at, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_pairs(y_ptr, experts_ptr, out_ptr, C, ACTIVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Sum the rows of a token's pairs in order. Pairs without an expert have no row."""
    announce(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < C
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(ACTIVE):
        pair = token * ACTIVE + k
        has = tl.load(experts_ptr + pair) >= 0
        total += tl.load(y_ptr + pair * C + columns, mask=inside & has, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * C + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Sorted:
    """Pairs by expert. None = each pair is a tile, in the order of pairs."""

    routing: Routing
    order_P: torch.Tensor | None
    """int32: the pair at each place."""
    tiles_M3: torch.Tensor | None
    """int32: expert, first place and end of the expert's places, of each tile; expert -1 if it is not needed. The
    last row has the number of tiles that are needed, and of pairs that have an expert."""
    rows: int
    """Rows of a tile."""
    tiles: int


def gather_rows(
    x_TC: torch.Tensor, pairs: Sorted, dtype: torch.dtype, columns_EC: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the rows of all pairs in sorted order, and memory for a tile behind them. `columns_EC`: int32, column of x
    at each place of an expert's rows."""
    count, columns = pairs.routing.experts_TK.numel(), x_TC.shape[1]
    out_PC = torch.empty(count + pairs.rows, columns, dtype=dtype, device=x_TC.device)
    block = min(4096, power_of_2(columns))
    _gather_rows[(count, ceil_div(columns, block))](
        x_TC.contiguous(),
        pairs.routing.experts_TK,
        pairs.order_P,
        pairs.tiles_M3,
        columns_EC,
        out_PC,
        pairs.tiles,
        columns,
        ACTIVE=pairs.routing.experts_TK.shape[1],
        BLOCK=block,
        num_warps=max(1, block // 1024),
        **dependent(out_PC),
    )
    return out_PC


def inner_rows(pairs: int, channels: int, second: ExpertTile, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for the rows between the products, and for a tile behind them if the second one reads boxes."""
    return torch.empty(pairs + (second.rows if second.residents else 0), channels, dtype=dtype, device=device)


def sum_pairs(y_PC: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return the sum of each token's rows."""
    (tokens, active), hidden = routing.experts_TK.shape, y_PC.shape[1]
    out_TC = torch.empty(tokens, hidden, dtype=y_PC.dtype, device=y_PC.device)
    block = min(1024, power_of_2(hidden))
    _sum_pairs[(tokens, ceil_div(hidden, block))](
        y_PC,
        routing.experts_TK,
        out_TC,
        hidden,
        ACTIVE=active,
        BLOCK=block,
        num_warps=max(1, block // 256),
        **dependent(out_TC),
    )
    return out_TC


@dataclass(frozen=True, slots=True)
class Order:
    """How pairs are sorted, by their number."""

    rows: int
    """Rows of a tile."""
    tiles: int
    block: int
    """Pairs that a program sorts; 0 = they are not sorted."""
    counts: bool
    """Whether there are several blocks of pairs, which are counted first."""


def order_of(tokens: int, active: int, experts: int, rows: int | None = None) -> Order:
    """Return the order of the pairs of `tokens` tokens. `rows`: rows of a tile; None = by the rule."""
    pairs = tokens * active
    if rows is None and direct(tokens, active, experts):
        return Order(LEAST_ROWS, pairs, 0, False)
    rows = rows or rows_of_tile(pairs, experts)
    block = max(128, min(MOST_BLOCK, power_of_2(pairs)))
    return Order(rows, most_tiles(pairs, experts, rows), block, pairs > block)


def sort_pairs(routing: Routing, experts: int, rows: int | None) -> Sorted:
    """Sort the pairs. `rows`: rows of a tile; None = by the rule."""
    (tokens, active), device = routing.experts_TK.shape, routing.experts_TK.device
    pairs, order = tokens * active, order_of(tokens, active, experts, rows)
    if not order.block:
        return Sorted(routing, None, None, order.rows, order.tiles)
    order_P = torch.empty(pairs, dtype=torch.int32, device=device)
    tiles_M3 = torch.empty(order.tiles + 1, 3, dtype=torch.int32, device=device)
    bins, blocks = power_of_2(experts + 1), ceil_div(pairs, order.block)
    warps = max(1, min(8, order.block // 256))
    counts = None
    if order.counts:
        counts = torch.empty(blocks, bins, dtype=torch.int32, device=device)
        _count_pairs[(blocks,)](
            *(routing.experts_TK, counts, pairs), BINS=bins, BLOCK=order.block, num_warps=warps, **dependent(counts)
        )
    _group_pairs[experts, max(1, blocks)](
        routing.experts_TK,
        counts,
        order_P,
        tiles_M3,
        pairs,
        order.tiles,
        EXPERTS=experts,
        ROWS=order.rows,
        BINS=bins,
        BLOCK=order.block,
        num_warps=warps,
        **dependent(order_P),
    )
    return Sorted(routing, order_P, tiles_M3, order.rows, order.tiles)
