"""Attention over compressed latents (DeepSeek-V2, 2024) for all GPUs, absorbed.

Every head has the same key, a latent followed by its rotated columns, and the same value, the latent. So a block of
latents is read once for both products, for all heads of a tile, and for all tokens of a row that fit into one.

Shapes: M rows of a query tile (tokens x heads), N keys of a block, L kv rank, R rotary dim.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.core.ops.kernels.launch import announce, wait
from dovetail.plugins.attention.triton.plan import ITEM
from dovetail.plugins.attention.triton.ranges import store_range
from dovetail.plugins.attention.triton.scores import LOG2_E, LOW
from dovetail.plugins.attention.triton.visible import visible


@triton.jit
def _read(
    page_ptr,
    scale_ptr,
    rotary_ptr,
    slot,
    exists,
    columns,
    rotated,
    L: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    PAGE_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Return latents [N, L] and rotated columns [N, R]. Keys that do not exist are zeros, since their pages may hold
    NaN. GROUPS: groups of a block's columns with a scale, of which SCALES are stored; 0 = no scales."""
    latent = tl.load(
        page_ptr + slot[:, None] * PAGE_COLUMNS + columns[None, :],
        mask=exists[:, None] & (columns < L)[None, :],
        other=0.0,
    )
    if GROUPS:
        group = tl.arange(0, GROUPS)
        at = scale_ptr + slot[:, None] * SCALES + group[None, :]
        scale = tl.load(at, mask=exists[:, None] & (group < SCALES)[None, :], other=0.0)
        grouped = tl.reshape(latent.to(tl.float32), (BLOCK_N, GROUPS, BLOCK_L // GROUPS)) * scale[:, :, None]
        latent = tl.reshape(grouped, (BLOCK_N, BLOCK_L))
        rotary_at = rotary_ptr + slot[:, None] * R
    else:
        rotary_at = page_ptr + slot[:, None] * PAGE_COLUMNS + L
    rotary = tl.load(rotary_at + rotated[None, :], mask=exists[:, None] & (rotated < R)[None, :], other=0.0)
    return latent.to(COMPUTE), rotary.to(COMPUTE)


@triton.jit(
    do_not_specialize=["q_head_stride", "q_token_stride", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr"],
)
def attend_latents(
    q_ptr,
    q_head_stride,
    q_token_stride,
    rotary_q_ptr,
    page_ptr,
    scale_ptr,
    rotary_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    count_ptr,
    items_ptr,
    table_ptr,
    table_stride,
    tree_ptr,
    scale,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    UNITS: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALES: tl.constexpr,
    PAGE: tl.constexpr,
    PAGE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    JOIN: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile of HEADS heads, item). q_ptr: queries of L columns; rotary_q_ptr: the first rotated column of the
    first query, in [T, H, D]. The output is [T, H, L]. If not JOIN, only
    partial results are written, one for every item."""
    announce(PDL)
    unit = tl.program_id(0)
    item = items_ptr + tl.program_id(1) * ITEM
    row = tl.load(item)
    first = tl.load(item + 1)
    count = tl.load(item + 2)
    first_at = tl.load(item + 3)
    lo = tl.load(item + 5)
    hi = tl.load(item + 6)
    part = tl.load(item + 7)
    splits = tl.load(item + 9)
    first_item = tl.load(item + 10)

    table = table_ptr + tl.maximum(row, 0).to(tl.int64) * table_stride
    keys = lo + tl.arange(0, BLOCK_N)
    # Look up the pages of the next block one block ahead, so their addresses do not wait for a load. Items and table
    # are older than the preceding kernel, the product of queries and up-projections.
    page = tl.load(table + keys // PAGE, mask=(keys < hi) & (row >= 0), other=0)
    # Unused items wait, too: the next kernel waits for this one alone, and reads results of those before.
    wait(PDL)
    if row < 0:
        return

    row_m = tl.arange(0, BLOCK_M)
    query = row_m // HEADS
    head = unit * HEADS + row_m % HEADS
    exists = (query < count) & (head < H) & (query < BLOCK_M // HEADS)
    token = tl.where(exists, first + query, first).to(tl.int64)
    at = first_at + query
    columns, rotated = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    ok = exists[:, None] & (columns < L)[None, :]
    inner = q_ptr + (head * q_head_stride + token * q_token_stride)[:, None] + columns[None, :]
    q = tl.load(inner, mask=ok, other=0.0).to(COMPUTE)
    outer = rotary_q_ptr + ((token * H + head) * D)[:, None] + rotated[None, :]
    rotary_q = tl.load(outer, mask=exists[:, None] & (rotated < R)[None, :], other=0.0).to(COMPUTE)
    qk_scale = scale * LOG2_E

    acc = tl.zeros((BLOCK_M, BLOCK_L), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), LOW, tl.float32)
    for n in range(lo, hi, BLOCK_N):
        keys = n + tl.arange(0, BLOCK_N)
        following = keys + BLOCK_N
        next_page = tl.load(table + following // PAGE, mask=following < hi, other=0)
        slot = page.to(tl.int64) * PAGE + keys % PAGE
        latent, rotary = _read(
            page_ptr, scale_ptr, rotary_ptr, slot, keys < hi, columns, rotated, L, R, GROUPS, SCALES, PAGE_COLUMNS,
            BLOCK_N, BLOCK_L, COMPUTE,
        )  # fmt: skip
        s = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        s = tl.dot(rotary_q, tl.trans(rotary), s, input_precision=PRECISION) * qk_scale
        seen = visible(keys[None, :], at[:, None], token[:, None], tree_ptr, hi, 0)
        s = tl.where(seen, s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - new_m[:, None])
        alpha = tl.exp2(m - new_m)
        total = total * alpha + tl.sum(p, axis=1)
        acc = tl.dot(p.to(COMPUTE), latent, acc * alpha[:, None], input_precision=PRECISION)
        m = new_m
        page = next_page

    offset = (token * H + head) * L
    store_range(
        acc, total, m, out_ptr, part_ptr, lse_ptr, count_ptr, offset, ok, exists, query, head, columns, part, splits,
        first_item, unit, H, UNITS, L, BLOCK_M, BLOCK_L, BLOCK_M // HEADS, JOIN,
    )  # fmt: skip
