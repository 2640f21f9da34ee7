"""Top-k, top-p and min-p without a sort: a search narrows the range that contains the smallest logit to keep.

Floats are compared as integers of the same order, so the search ends at the exact value. Each launch divides every
row's range by WAYS: each program sums, over its part of the vocabulary, what is above each bound, and the next launch
picks the subrange from these sums. A row with both top-k and top-p is searched twice. The launches do not depend on
device data; programs of rows that are finished or have no filters return immediately.

Shapes: N rows, V vocabulary, P parts of it, W = WAYS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WAYS = 8
LEVELS = 11
"""Number of launches that narrow 2^32 values to one."""
BLOCK = 1024
PART_COLUMNS = 2048
"""Minimum number of logits per part."""
PROGRAMS = 1024
"""Target number of programs for all rows together."""

LOWEST = tl.constexpr(-2139095041)
"""`_ordered` of minus infinity."""


@triton.jit
def _ordered(x):
    """Map float32 to int32 of the same order. On the bits, this function is its own inverse."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _load(row_ptr, i, end, BLOCK: tl.constexpr):
    """Load logits. NaN and columns past the end become -inf."""
    column = i + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, mask=column < end, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit(do_not_specialize=["part_columns"])
def _largest(logits_ptr, temperature_ptr, largest_ptr, V, part_columns, BLOCK: tl.constexpr):
    """Program (row, part)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0:
        return
    end = tl.minimum(part * part_columns + part_columns, V)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for i in range(part * part_columns, end, BLOCK):
        best = tl.maximum(best, _load(logits_ptr + row * V, i, end, BLOCK))
    tl.store(largest_ptr + row * tl.num_programs(1) + part, tl.max(best, axis=0))


@triton.jit(do_not_specialize=["part_columns", "parts"])
def _narrow(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    largest_ptr,
    range_ptr,
    next_range_ptr,
    wanted_ptr,
    next_wanted_ptr,
    sums_ptr,
    next_sums_ptr,
    least_ptr,
    V,
    part_columns,
    parts,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PARTS: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part). A row's range [N, 3] is low (kept), high (not kept), and whether the search is by count (for
    top-k) or by mass (for top-p). `wanted` is the count or mass to reach at the smallest logit kept; -1 = top_p of the
    mass that is left now."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.minimum(tl.load(top_k_ptr + row), V)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if (temperature <= 0) | ((top_k <= 0) & (top_p >= 1) & (min_p <= 0)):
        if LAST:
            tl.store(least_ptr + row, float("-inf"))
        return

    way = tl.arange(0, WAYS)
    each = tl.arange(0, PARTS)
    maxima = tl.load(largest_ptr + row * parts + each, mask=each < parts, other=float("-inf"))
    largest = tl.max(maxima, axis=0)
    above = _ordered(largest).to(tl.int64) + 1
    if FIRST:
        low = tl.full((), LOWEST, tl.int64)
        by_count = (top_k > 0).to(tl.int64)
        high = tl.where((top_k > 0) | (top_p < 1), above, low + 1)
        wanted = tl.where(top_k > 0, top_k.to(tl.float32), -1.0)
    else:
        low = tl.load(range_ptr + row * 3)
        high = tl.load(range_ptr + row * 3 + 1)
        by_count = tl.load(range_ptr + row * 3 + 2)
        wanted = tl.load(wanted_ptr + row)
        if high - low > 1:
            place = (row * parts + each[:, None]) * WAYS + way[None, :]
            sums = tl.sum(tl.load(sums_ptr + place, mask=each[:, None] < parts, other=0.0), axis=0)
            wanted = tl.where(wanted < 0, top_p * tl.max(sums, axis=0), wanted)
            chosen = tl.max(tl.where(sums >= wanted, way, 0), axis=0).to(tl.int64)
            width = high - low
            high = low + width * (chosen + 1) // WAYS
            low += width * chosen // WAYS
            if (high - low == 1) & (by_count != 0):
                by_count = tl.zeros((), tl.int64)
                wanted = tl.full((), -1.0, tl.float32)
                high = tl.where(top_p < 1, above, high)
    if LAST:
        key = low.to(tl.int32)
        least = tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)
        least = tl.where(min_p > 0, tl.maximum(least, largest + temperature * tl.log(tl.maximum(min_p, 1e-38))), least)
        tl.store(least_ptr + row, least)
        return
    if part == 0:
        tl.store(next_range_ptr + row * 3, low)
        tl.store(next_range_ptr + row * 3 + 1, high)
        tl.store(next_range_ptr + row * 3 + 2, by_count)
        tl.store(next_wanted_ptr + row, wanted)
    if high - low <= 1:
        return
    bounds = low + (high - low) * way.to(tl.int64) // WAYS
    bounds = tl.maximum(tl.minimum(bounds, 2147483647), -2147483648).to(tl.int32)
    found = tl.zeros((BLOCK, WAYS), tl.float32)
    end = tl.minimum(part * part_columns + part_columns, V)
    for i in range(part * part_columns, end, BLOCK):
        x = _load(logits_ptr + row * V, i, end, BLOCK)
        inside = i + tl.arange(0, BLOCK) < end
        weight = tl.where(inside, tl.where(by_count != 0, 1.0, tl.exp((x - largest) / temperature)), 0.0)
        found += tl.where(_ordered(x)[:, None] >= bounds[None, :], weight[:, None], 0.0)
    tl.store(next_sums_ptr + (row * parts + part) * WAYS + way, tl.sum(found, axis=0))


def least_kept_triton(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
) -> torch.Tensor:
    logits_NV = logits_NV.contiguous()
    (rows, vocab), device = logits_NV.shape, logits_NV.device
    least_N = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return least_N
    filters = [filter_N.contiguous() for filter_N in (temperature_N, top_k_N, top_p_N, min_p_N)]
    most = triton.cdiv(vocab, PART_COLUMNS)
    parts = max(1, min(most, PROGRAMS // rows))
    part_columns = triton.cdiv(triton.cdiv(vocab, parts), BLOCK) * BLOCK
    parts = triton.cdiv(vocab, part_columns)
    largest_NP = torch.empty(rows, parts, device=device)
    # Double buffers: some programs of a launch write while others still read. All have the same alignment.
    aligned = -(-rows // 16) * 16
    ranges = torch.empty(2, aligned, 3, dtype=torch.int64, device=device)
    wanted = torch.empty(2, aligned, device=device)
    sums = torch.empty(2, rows, parts, WAYS, device=device)
    _largest[rows, parts](logits_NV, filters[0], largest_NP, vocab, part_columns, BLOCK=BLOCK, num_warps=4)
    for level in range(2 * LEVELS + 1):
        now, then = level % 2, 1 - level % 2
        last = level == 2 * LEVELS
        _narrow[rows, 1 if last else parts](
            logits_NV,
            *filters,
            largest_NP,
            ranges[now],
            ranges[then],
            wanted[now],
            wanted[then],
            sums[now],
            sums[then],
            least_N,
            vocab,
            part_columns,
            parts,
            FIRST=level == 0,
            LAST=last,
            PARTS=triton.next_power_of_2(most),
            WAYS=WAYS,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return least_N
