"""Value projection of absorbed rows whose ranges of keys are not joined yet.

With few tokens, one program that joins all ranges of a tile takes longer than the ranges themselves: with 16 heads and
512 columns each of them has 32 KB. Here a program for each head, and for a part of its output columns, joins the
ranges of all tokens by log-sum-exp (FlashDecoding, Dao et al. 2023), as one matrix product, and multiplies the result
by its rows of the up-projection, which it reads while attention still runs.

Shapes: T tokens, P partial results, L kv rank, V value dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.core.ops.kernels.launch import announce, wait
from dovetail.plugins.attention.triton.plan import ITEM
from dovetail.plugins.attention.triton.scores import LOW


@triton.jit
def _read_items(items_ptr, base, works, head, H: tl.constexpr, QUERIES: tl.constexpr, BLOCK_P: tl.constexpr):
    """Return token and row of BLOCK_P partial results from `base` on; the token is -1 if there is no result."""
    p = base + tl.arange(0, BLOCK_P)
    item, query = items_ptr + p // QUERIES * ITEM, p % QUERIES
    exists = p < works * QUERIES
    used = (tl.load(item, mask=exists, other=-1) >= 0) & (query < tl.load(item + 2, mask=exists, other=0))
    token = tl.where(used, tl.load(item + 1, mask=exists, other=0) + query, -1)
    return token, (tl.load(item + 7, mask=exists, other=0) + query).to(tl.int64) * H + head


@triton.jit(do_not_specialize=["value_head_stride", "value_row_stride", "tokens", "works"])
def project_ranges(
    part_ptr,
    lse_ptr,
    items_ptr,
    value_ptr,
    value_head_stride,
    value_row_stride,
    out_ptr,
    tokens,
    works,
    H: tl.constexpr,
    V: tl.constexpr,
    L: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (head, output columns, tokens). part_ptr, lse_ptr: float32 partial results [parts, H, L] and their
    log-sum-exp [parts, H] in base 2. items_ptr: `works` items that all have partial results, QUERIES each. value_ptr:
    the up-projection, [V, L] for each head. The output is [T, H, V]; tokens without an item are left as they are."""
    announce(PDL)
    head = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_L)
    at_value = value_ptr + head.to(tl.int64) * value_head_stride + v[:, None] * value_row_stride + columns[None, :]
    value = tl.load(at_value, mask=(v < V)[:, None] & (columns < L)[None, :], other=0.0)
    token, row = _read_items(items_ptr, 0, works, head, H, QUERIES, BLOCK_P)
    wait(PDL)

    acc = tl.zeros((BLOCK_T, BLOCK_L), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    m = tl.full((BLOCK_T,), LOW, tl.float32)
    seen = tl.zeros((BLOCK_T,), tl.int32)
    base = 0
    # Unused items follow all others.
    while tl.max(token, axis=0) >= 0:
        base += BLOCK_P
        next_token, next_row = _read_items(items_ptr, base, works, head, H, QUERIES, BLOCK_P)
        mine = token[None, :] == t[:, None]
        taken = tl.max(mine.to(tl.int32), axis=0) > 0
        if tl.max(taken.to(tl.int32), axis=0) > 0:
            lse = tl.load(lse_ptr + row, mask=taken, other=float("-inf"))
            # Products of a zero and what is not finite would spoil all tokens of the block. It reaches its own one as a
            # weight that is NaN.
            ok = (taken & (lse > float("-inf")))[:, None] & (columns < L)[None, :]
            part = tl.load(part_ptr + (row * L)[:, None] + columns[None, :], mask=ok, other=0.0)
            finite = tl.abs(part) < float("inf")
            part = tl.where(finite, part, 0.0)
            lse = tl.where(tl.min(finite.to(tl.int32), axis=1) > 0, lse, float("nan"))
            lse = tl.where(mine, lse[None, :], float("-inf"))
            new_m = tl.maximum(m, tl.max(lse, axis=1))
            weight = tl.exp2(lse - new_m[:, None])
            alpha = tl.exp2(m - new_m)
            total = total * alpha + tl.sum(weight, axis=1)
            acc = tl.dot(weight, part, acc * alpha[:, None], input_precision=PRECISION)
            m = new_m
            seen = tl.maximum(seen, tl.max(mine.to(tl.int32), axis=1))
        token, row = next_token, next_row

    # A token that saw no key gives zeros.
    mixed = (acc / tl.where(total > 0, total, 1.0)[:, None]).to(value.dtype)
    result = tl.dot(mixed, tl.trans(value), input_precision=PRECISION)
    to = out_ptr + ((t.to(tl.int64) * H + head) * V)[:, None] + v[None, :]
    tl.store(to, result.to(out_ptr.dtype.element_ty), mask=((seen > 0) & (t < tokens))[:, None] & (v < V)[None, :])
