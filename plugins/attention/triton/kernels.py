"""The attention kernel for all GPUs.

Items (plan.py) of tokens that belong to no row have no keys and write zeros.

Tiles: all query heads of a kv head and the query tokens form the rows of one matrix tile (GQA packing), so a kv head is
read once for all of them. Softmax is online (FlashAttention, Dao et al. 2022), in base 2.

Shapes: M rows of a query tile (tokens x query heads of a kv head), N keys of a block, D head dim, C = H * D columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.ops.kernels.launch import announce, wait
from dovetail.core.ops.kernels.norm import weigh
from dovetail.plugins.attention.triton.per_warp import attend_per_warp
from dovetail.plugins.attention.triton.plan import ITEM
from dovetail.plugins.attention.triton.ranges import store_range
from dovetail.plugins.attention.triton.scores import LOG2_E, LOW, add_sink, cap_scores
from dovetail.plugins.attention.triton.visible import visible

COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
"""Formats in which tensor cores multiply."""


@triton.jit
def _page(table, n, hi, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page of a block of keys, or of each of its keys if blocks are longer than pages."""
    if PAGE % BLOCK_N == 0:
        return tl.load(table + n // PAGE, mask=n < hi, other=0)
    else:
        keys = n + tl.arange(0, BLOCK_N)
        return tl.load(table + keys // PAGE, mask=keys < hi, other=0)


@triton.jit
def _load(
    source,
    page,
    n,
    lo,
    hi,
    kv_head,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load a block of K or V [N, D]. MASKED zeroes keys outside [lo, hi), whose pages may hold NaN."""
    keys = n + tl.arange(0, BLOCK_N)
    exists = (keys >= lo) & (keys < hi)
    if TMA:
        block = source.load([page * PAGE + n % PAGE, kv_head * D])
        if MASKED:
            block = tl.where(exists[:, None], block, 0.0)
    else:
        dims = tl.arange(0, BLOCK_D)
        at = (page.to(tl.int64) * PAGE + keys % PAGE) * (K * D)
        pointers = source + kv_head * D + at[:, None] + dims[None, :]
        if MASKED:
            block = tl.load(pointers, mask=exists[:, None] & (dims < D)[None, :], other=0.0)
        elif BLOCK_D != D:
            block = tl.load(pointers, mask=(dims < D)[None, :], other=0.0)
        else:
            block = tl.load(pointers)
    return block


@triton.jit
def _unpair(x, UPPER: tl.constexpr, E4M3: tl.constexpr):
    """Return one of the two 8-bit values in each 16-bit word as float16, processing two words at a time. E5M2 is the
    upper half of a float16; E4M3 is converted by hardware."""
    if E4M3:
        return tl.inline_asm_elementwise(
            "{.reg .b32 both; .reg .b16 pair; prmt.b32 both, $1, 0, "
            + ("0x4431" if UPPER else "0x4420")
            + "; cvt.u16.u32 pair, both; cvt.rn.f16x2.e4m3x2 $0, pair;}",
            "=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, " + ("0x3414;" if UPPER else "0x2404;"),
            "=r,r",
            [x],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _step(
    q,
    acc,
    odd,
    total,
    m,
    page,
    n,
    k_source,
    v_source,
    tree_ptr,
    token,
    at,
    seen_from,
    hi,
    kv_head,
    qk_scale,
    K: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Process one block of keys: scores, running maximum and sum, weighted values. at_M is each query's own key."""
    k = _load(k_source, page, n, seen_from, hi, kv_head, K, D, PAGE, BLOCK_N, BLOCK_D, MASKED and not TMA, TMA)
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * qk_scale
    if SOFT_CAP is not None:
        s = cap_scores(s, SOFT_CAP)
    if MASKED:
        keys = (n + tl.arange(0, BLOCK_N))[None, :]
        seen = visible(keys, at[:, None], token[:, None], tree_ptr, hi, WINDOW)
        s = tl.where(seen, s, float("-inf"))
    new_m = tl.maximum(m, tl.max(s, axis=1))
    p = tl.exp2(s - new_m[:, None])
    alpha = tl.exp2(m - new_m)
    total = total * alpha + tl.sum(p, axis=1)
    acc = acc * alpha[:, None]
    p = p.to(q.dtype)
    if PAIRS:
        v = _load(v_source, page, n, seen_from, hi, kv_head, K, D // 2, PAGE, BLOCK_N, BLOCK_D // 2, MASKED, TMA)
        odd = odd * alpha[:, None]
        acc = tl.dot(p, _unpair(v, False, k.dtype == tl.float8e4nv), acc)
        odd = tl.dot(p, _unpair(v, True, k.dtype == tl.float8e4nv), odd)
    else:
        v = _load(v_source, page, n, seen_from, hi, kv_head, K, D, PAGE, BLOCK_N, BLOCK_D, MASKED, TMA)
        acc = tl.dot(p, v.to(q.dtype), acc, input_precision=PRECISION)
    return acc, odd, total, new_m


@triton.jit
def _norm_rotate(x_ptr, position, weight_ptr, rope_ptr, eps, dims, ok, D: tl.constexpr, HALF: tl.constexpr):
    """Norm and rotate heads like core.ops.kv_write. x_ptr points at each head's first value. HALF: rotary pairs."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
    rotated = dims < 2 * HALF
    x = tl.load(x_ptr + dims, mask=ok & (dims < D), other=0.0).to(tl.float32)
    y = tl.load(x_ptr + partner, mask=ok & rotated, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        weight = tl.load(weight_ptr + dims, mask=dims < D, other=0.0).to(tl.float32)
        other = tl.load(weight_ptr + partner, mask=rotated, other=0.0).to(tl.float32)
        x = weigh(x * inverse, weight, dtype, weight_ptr.dtype.element_ty).to(tl.float32)
        y = weigh(y * inverse, other, dtype, weight_ptr.dtype.element_ty).to(tl.float32)
    if rope_ptr is not None:
        row = rope_ptr + position.to(tl.int64) * (2 * HALF)
        pair = tl.where(dims < HALF, dims, dims - HALF)
        cos = tl.load(row + pair, mask=ok & rotated, other=1.0)
        sin = tl.load(row + HALF + pair, mask=ok & rotated, other=0.0)
        x = x * cos + tl.where(dims < HALF, -y, y) * sin
    return x.to(dtype)


@triton.jit
def _put(pointers, x, scale, ok, LARGEST: tl.constexpr):
    """Store in the pages' format: divided by the scale and clamped if it has 8 bits."""
    if LARGEST is not None:
        x = tl.clamp(x.to(tl.float32) / scale, -LARGEST, LARGEST)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["table_stride"])
def attend_items(
    q_ptr,
    k_source,
    v_source,
    out_ptr,
    part_ptr,
    lse_ptr,
    count_ptr,
    items_ptr,
    table_ptr,
    table_stride,
    tree_ptr,
    scale,
    k_scale,
    v_scale,
    sinks_ptr,
    k_ptr,
    v_ptr,
    rope_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEAD_SCALES: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    KEY_WARPS: tl.constexpr,
    TMA: tl.constexpr,
    PAIRS: tl.constexpr,
    WRITES: tl.constexpr,
    HALF: tl.constexpr,
    LARGEST: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (kv head, item). ONE_LOOP masks every block; otherwise blocks that all queries see whole are not masked.
    KEY_WARPS > 0: number of warps that each process a different block of BLOCK_N keys (attend_per_warp); 0 = all warps
    process the same block.

    8-bit K and V are cast to float16, which represents both formats exactly. q is cast too, after multiplication by
    `scale` so that it fits. The scales of K and V multiply scores and output. PAIRS reads V as 16-bit words of two
    adjacent columns and keeps separate sums for even and odd columns, since the hardware transposes 16-bit words on the
    way to the tensor cores, but 8-bit values only one by one.

    WRITES > 0: q_ptr holds q|k|v, before norm and rotary, of rows of at most WRITES tokens. A program norms and rotates
    its queries, and first writes the new keys and values in its range.
    """
    announce(PDL)
    wait(PDL)
    kv_head = tl.program_id(0)
    item = items_ptr + tl.program_id(1) * ITEM
    row = tl.load(item)
    if row < 0:
        return
    first = tl.load(item + 1)
    count = tl.load(item + 2)
    first_at = tl.load(item + 3)
    seen_from = tl.load(item + 4)
    lo = tl.load(item + 5)
    hi = tl.load(item + 6)
    part = tl.load(item + 7)
    splits = tl.load(item + 9)
    first_item = tl.load(item + 10)
    GROUP: tl.constexpr = H // K
    if HEAD_SCALES:
        k_scale = tl.load(k_scale + kv_head)
        v_scale = tl.load(v_scale + kv_head)

    row_m = tl.arange(0, BLOCK_M)
    query = row_m // GROUP
    head = kv_head * GROUP + row_m % GROUP
    dims = tl.arange(0, BLOCK_D)
    exists = query < count
    ok = exists[:, None] & (dims < D)[None, :]
    token = first + query
    offset = (token.to(tl.int64) * H + head) * D
    at = first_at + query
    table = table_ptr + row.to(tl.int64) * table_stride
    if WRITES:
        q_at = q_ptr + ((token.to(tl.int64) * (H + 2 * K) + head) * D)[:, None]
        q = _norm_rotate(q_at, at[:, None], q_weight_ptr, rope_ptr, eps, dims[None, :], exists[:, None], D, HALF)
        for i in tl.static_range(WRITES):
            key = first_at + i
            if (i < count) & (key >= lo) & (key < hi):
                k_at = q_ptr + ((first + i).to(tl.int64) * (H + 2 * K) + H + kv_head) * D
                v_at = k_at + K * D
                new_k = _norm_rotate(
                    k_at, key + tl.zeros((1, 1), tl.int32), k_weight_ptr, rope_ptr, eps, dims[None, :], True, D, HALF
                )
                new_v = tl.load(v_at + dims, mask=dims < D, other=0.0)
                to = (tl.load(table + key // PAGE).to(tl.int64) * PAGE + key % PAGE) * (K * D) + kv_head * D
                _put(k_ptr + to + dims[None, :], new_k, k_scale, (dims < D)[None, :], LARGEST)
                _put(v_ptr + to + dims, new_v, v_scale, dims < D, LARGEST)
        # Other threads of this block read below what was written here.
        tl.debug_barrier()
    else:
        q = tl.load(q_ptr + offset[:, None] + dims[None, :], mask=ok, other=0.0)
    qk_scale = scale * LOG2_E * k_scale
    if COMPUTE != q.dtype:
        q = (q.to(tl.float32) * scale).to(COMPUTE)
        qk_scale = LOG2_E * k_scale
    token = tl.where(exists, token, first)

    if KEY_WARPS:
        acc, total, m = attend_per_warp(
            q, k_source, v_source, table, tree_ptr, token, at, seen_from, lo, hi, kv_head, qk_scale, K, D, WINDOW,
            PAGE, KEY_WARPS, BLOCK_M, BLOCK_N, BLOCK_D, PAIRS, PRECISION, SOFT_CAP,
        )  # fmt: skip
    else:
        # Every query of the tile sees all keys of the blocks from whole_lo to whole_hi.
        whole_lo = lo
        whole_hi = lo
        if not ONE_LOOP:
            if WINDOW:
                whole_lo = tl.cdiv(tl.maximum(first_at + count - WINDOW, 0), BLOCK_N) * BLOCK_N
                whole_lo = tl.maximum(tl.minimum(whole_lo, tl.cdiv(hi, BLOCK_N) * BLOCK_N), lo)
            if tree_ptr is None:
                whole_hi = (first_at + 1) // BLOCK_N * BLOCK_N
            else:
                whole_hi = (tl.load(tree_ptr + first.to(tl.int64) * 3) + 1).to(tl.int32) // BLOCK_N * BLOCK_N
            whole_hi = tl.maximum(tl.minimum(whole_hi, hi // BLOCK_N * BLOCK_N), whole_lo)

        acc = tl.zeros((BLOCK_M, BLOCK_D // 2 if PAIRS else BLOCK_D), tl.float32)
        odd = acc if PAIRS else 0.0
        total = tl.zeros((BLOCK_M,), tl.float32)
        m = tl.full((BLOCK_M,), LOW, tl.float32)
        # Look up the page of the next block one block ahead, so its address does not wait for a load.
        page = _page(table, lo, hi, PAGE, BLOCK_N)
        if WINDOW and not ONE_LOOP:
            for n in range(lo, whole_lo, BLOCK_N):
                following = _page(table, n + BLOCK_N, hi, PAGE, BLOCK_N)
                acc, odd, total, m = _step(
                    q, acc, odd, total, m, page, n, k_source, v_source, tree_ptr, token, at, seen_from, hi, kv_head,
                    qk_scale, K, D, WINDOW, PAGE, BLOCK_N, BLOCK_D, True, TMA, PAIRS, PRECISION,
                    SOFT_CAP,
                )  # fmt: skip
                page = following
        if not ONE_LOOP:
            for n in range(whole_lo, whole_hi, BLOCK_N):
                following = _page(table, n + BLOCK_N, hi, PAGE, BLOCK_N)
                acc, odd, total, m = _step(
                    q, acc, odd, total, m, page, n, k_source, v_source, tree_ptr, token, at, seen_from, hi, kv_head,
                    qk_scale, K, D, WINDOW, PAGE, BLOCK_N, BLOCK_D, False, TMA, PAIRS, PRECISION,
                    SOFT_CAP,
                )  # fmt: skip
                page = following
        for n in range(whole_hi, hi, BLOCK_N):
            following = _page(table, n + BLOCK_N, hi, PAGE, BLOCK_N)
            acc, odd, total, m = _step(
                q, acc, odd, total, m, page, n, k_source, v_source, tree_ptr, token, at, seen_from, hi, kv_head,
                qk_scale, K, D, WINDOW, PAGE, BLOCK_N, BLOCK_D, True, TMA, PAIRS, PRECISION, SOFT_CAP,
            )  # fmt: skip
            page = following

        if PAIRS:
            acc = tl.reshape(tl.join(acc, odd), (BLOCK_M, BLOCK_D))

    if sinks_ptr is not None:
        # The first range of a row counts its sink.
        counts_sink = exists & (tl.program_id(1) == first_item)
        sink = tl.load(sinks_ptr + head, mask=counts_sink, other=float("-inf"))
        acc, total, m = add_sink(acc, total, m, sink)

    store_range(
        acc * v_scale, total, m, out_ptr, part_ptr, lse_ptr, count_ptr, offset, ok, exists, query, head, dims, part,
        splits, first_item, kv_head, H, K, D, BLOCK_M, BLOCK_D, BLOCK_M // GROUP,
    )  # fmt: skip
