"""Attention of few queries over many keys, without communication between warps until the end.

Each warp processes different blocks of keys, with a separate running maximum, sum and output. They are joined once,
after the last block, like the ranges of a split row (FlashDecoding, Dao et al. 2023). If all warps worked on the same
block, they would synchronise several times per block: for the maximum, for the sum and for the weights.

Keys are the rows of the matmuls and queries the columns: a matrix instruction takes 16 rows but only 8 columns, which
is often the number of query heads per kv head. The warp is the batch dimension of tl.dot, and Triton assigns one warp
to each batch entry.

Shapes: L warps, N keys of a warp's block, M queries, D head dim (or half of it, if V is read in pairs).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.plugins.attention.triton.scores import LOW, cap_scores
from dovetail.plugins.attention.triton.visible import visible


@triton.jit
def attend_per_warp(
    q,
    k_ptr,
    v_ptr,
    table,
    tree_ptr,
    token,
    at,
    seen_from,
    lo,
    hi,
    kv_head,
    qk_scale,
    K: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAIRS: tl.constexpr,
    PRECISION: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Return (weighted sum of values [M, D], sum of weights [M], maximum [M]) over keys [lo, hi). Keys before seen_from
    are ignored. q is [M, D]; at_M is the index of each query's own key."""
    SPAN: tl.constexpr = KEY_WARPS * BLOCK_N
    V: tl.constexpr = D // 2 if PAIRS else D
    BLOCK_V: tl.constexpr = BLOCK_D // 2 if PAIRS else BLOCK_D
    offset = tl.arange(0, KEY_WARPS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    dims = tl.arange(0, BLOCK_D)[None, None, :]
    words = tl.arange(0, BLOCK_V)[None, :, None]
    q_LDM = tl.broadcast_to(tl.trans(q)[None, :, :], (KEY_WARPS, BLOCK_D, BLOCK_M))
    acc = tl.zeros((KEY_WARPS, BLOCK_V, BLOCK_M), tl.float32)
    odd = acc if PAIRS else 0.0
    total = tl.zeros((KEY_WARPS, BLOCK_M), tl.float32)
    m = tl.full((KEY_WARPS, BLOCK_M), LOW, tl.float32)
    # Look up the pages of the next block one block ahead, so its addresses do not wait for a load.
    page = _pages(table, lo, hi, PAGE, KEY_WARPS, BLOCK_N)
    for n in range(lo, hi, SPAN):
        following = _pages(table, n + SPAN, hi, PAGE, KEY_WARPS, BLOCK_N)
        keys = n + offset
        exists = (keys >= seen_from) & (keys < hi)
        slot = page.to(tl.int64) * PAGE + keys % PAGE
        # Keys that no query sees may be NaN.
        k_mask = exists[:, :, None] if BLOCK_D == D else exists[:, :, None] & (dims < D)
        k = tl.load(k_ptr + slot[:, :, None] * (K * D) + kv_head * D + dims, mask=k_mask, other=0.0)
        s = tl.dot(k.to(q.dtype), q_LDM, input_precision=PRECISION) * qk_scale
        if SOFT_CAP is not None:
            s = cap_scores(s, SOFT_CAP)
        key = keys[:, :, None]
        seen = visible(key, at[None, None, :], token[None, None, :], tree_ptr, hi, WINDOW)
        s = tl.where(seen, s, float("-inf"))
        new_m = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - new_m[:, None, :])
        alpha = tl.exp2(m - new_m)
        total = total * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None, :]
        p = p.to(q.dtype)
        # Load V transposed. Transposing after the load would prevent prefetching.
        v_mask = exists[:, None, :] if BLOCK_V == V else exists[:, None, :] & (words < V)
        v = tl.load(v_ptr + slot[:, None, :] * (K * V) + kv_head * V + words, mask=v_mask, other=0 if PAIRS else 0.0)
        if PAIRS:
            odd = odd * alpha[:, None, :]
            even_v, odd_v = unpair(v, k_ptr.dtype.element_ty == tl.float8e4nv)
            acc = tl.dot(even_v, p, acc)
            odd = tl.dot(odd_v, p, odd)
        else:
            acc = tl.dot(v.to(q.dtype), p, acc, input_precision=PRECISION)
        m = new_m
        page = following

    top = tl.max(m, axis=0)
    weight = tl.exp2(m - top[None, :])
    summed = tl.trans(tl.sum(acc * weight[:, None, :], axis=0))
    if PAIRS:
        other = tl.trans(tl.sum(odd * weight[:, None, :], axis=0))
        summed = tl.reshape(tl.join(summed, other), (BLOCK_M, BLOCK_D))
    return summed, tl.sum(total * weight, axis=0), top


@triton.jit
def _pages(table, n, hi, PAGE: tl.constexpr, KEY_WARPS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids that broadcast to [L, N]: one for all warps, one per warp's block, or one per key, by page size."""
    if PAGE % (KEY_WARPS * BLOCK_N) == 0:
        return tl.load(table + n // PAGE, mask=n < hi, other=0)
    elif PAGE % BLOCK_N == 0:
        first = n + tl.arange(0, KEY_WARPS)[:, None] * BLOCK_N
        return tl.load(table + first // PAGE, mask=first < hi, other=0)
    else:
        keys = n + tl.arange(0, KEY_WARPS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        return tl.load(table + keys // PAGE, mask=keys < hi, other=0)


@triton.jit
def unpair(x, E4M3: tl.constexpr):
    """Return the lower and the upper 8-bit value of each 16-bit word, as float16. It processes two words at a time: a
    byte permutation groups the lower and the upper bytes, and both pairs are converted. E5M2 is the upper half of a
    float16, so the permutation suffices."""
    return tl.inline_asm_elementwise(
        "{.reg .b32 bytes; .reg .b16 lower, upper; prmt.b32 bytes, $2, 0, 0x3120; mov.b32 {lower, upper}, bytes; "
        "cvt.rn.f16x2.e4m3x2 $0, lower; cvt.rn.f16x2.e4m3x2 $1, upper;}"
        if E4M3
        else "prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;",
        "=r,=r,r",
        [x],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
