"""Norm and rotate q and k, and write k and v to pages, in one pass. A program processes a few heads of one token.
Shapes: T tokens, H query heads, K kv heads, D head dim, R rotary dim (R <= D)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.interfaces.attention import AttentionLayer, BatchMeta, KVPool, QKNorm, Rope
from dovetail.core.ops.kernels.norm import weigh
from dovetail.core.ops.kv_write import FLOAT8

HEADS_PER_PROGRAM = 4


@triton.jit
def _load_norm_weight(q_weight_ptr, k_weight_ptr, is_q, dims, inside):
    q_weight = tl.load(q_weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q_weight[None, :], k_weight[None, :])


@triton.jit
def _normalize(x, inverse, weight, is_v, dtype: tl.constexpr, weight_dtype: tl.constexpr):
    scaled = weigh(x * inverse[:, None], weight, dtype, weight_dtype).to(tl.float32)
    return tl.where(is_v[:, None], x, scaled)


@triton.jit
def _store(x, q_ptr, k_ptr, v_ptr, q_at, k_at, v_at, is_q, is_k, is_v, dims, inside, scale, LARGEST: tl.constexpr):
    x = x.to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + q_at[:, None] + dims, x, mask=is_q[:, None] & inside)
    if LARGEST is not None:
        x = tl.clamp(x.to(tl.float32) / scale[:, None], -LARGEST, LARGEST)
    tl.store(k_ptr + k_at[:, None] + dims, x.to(k_ptr.dtype.element_ty), mask=is_k[:, None] & inside)
    tl.store(v_ptr + v_at[:, None] + dims, x.to(v_ptr.dtype.element_ty), mask=is_v[:, None] & inside)


@triton.jit
def _rope_kv_write(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    write_ptr,
    positions_ptr,
    table_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    k_scale,
    v_scale,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    LARGEST: tl.constexpr,
    HEAD_SCALES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_q = head < H
    is_k = (head >= H) & (head < H + K)
    is_v = (head >= H + K) & (head < H + 2 * K)
    slot = tl.load(write_ptr + token).to(tl.int64)
    source = qkv_ptr + ((token * (H + 2 * K) + head) * D)[:, None]
    q_at = (token * H + head) * D
    k_at = (slot * K + head - H) * D
    v_at = (slot * K + head - H - K) * D
    exists = (head < H + 2 * K)[:, None]
    dtype = qkv_ptr.dtype.element_ty

    # A head is processed as three tiles: the two rotated halves and the dimensions past the rotary ones.
    dims = tl.arange(0, HALF_BLOCK)
    in_half = dims < HALF
    rest_dims = 2 * HALF + tl.arange(0, REST_BLOCK)
    in_rest = rest_dims < D
    x1 = tl.load(source + dims, mask=exists & in_half, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF + dims, mask=exists & in_half, other=0.0).to(tl.float32)
    rest = tl.load(source + rest_dims, mask=exists & in_rest, other=0.0).to(tl.float32)
    if q_weight_ptr is not None:
        squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1) + tl.sum(rest * rest, axis=1)
        inverse = tl.rsqrt(squares / D + eps)
        weight = _load_norm_weight(q_weight_ptr, k_weight_ptr, is_q, dims, in_half)
        x1 = _normalize(x1, inverse, weight, is_v, dtype, q_weight_ptr.dtype.element_ty)
        weight = _load_norm_weight(q_weight_ptr, k_weight_ptr, is_q, HALF + dims, in_half)
        x2 = _normalize(x2, inverse, weight, is_v, dtype, q_weight_ptr.dtype.element_ty)
        weight = _load_norm_weight(q_weight_ptr, k_weight_ptr, is_q, rest_dims, in_rest)
        rest = _normalize(rest, inverse, weight, is_v, dtype, q_weight_ptr.dtype.element_ty)
    if table_ptr is not None:
        row = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
        cos = tl.load(row + dims, mask=in_half, other=1.0)[None, :]
        sin = tl.load(row + HALF + dims, mask=in_half, other=0.0)[None, :]
        rotated1, rotated2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        x1 = tl.where(is_v[:, None], x1, rotated1)
        x2 = tl.where(is_v[:, None], x2, rotated2)
    scale = tl.full((HEADS,), 1.0, tl.float32)
    if LARGEST is not None:
        if HEAD_SCALES:
            scale = tl.load(k_scale + head - H, mask=is_k, other=1.0)
            scale = tl.where(is_v, tl.load(v_scale + head - H - K, mask=is_v, other=1.0), scale)
        else:
            scale = tl.where(is_k, k_scale, tl.where(is_v, v_scale, 1.0))
    _store(x1, q_ptr, k_ptr, v_ptr, q_at, k_at, v_at, is_q, is_k, is_v, dims, in_half, scale, LARGEST)
    _store(x2, q_ptr, k_ptr, v_ptr, q_at, k_at, v_at, is_q, is_k, is_v, HALF + dims, in_half, scale, LARGEST)
    _store(rest, q_ptr, k_ptr, v_ptr, q_at, k_at, v_at, is_q, is_k, is_v, rest_dims, in_rest, scale, LARGEST)


def rope_kv_write_triton(
    layer: AttentionLayer,
    meta: BatchMeta,
    pool: KVPool,
    qkv: torch.Tensor,
    rope: Rope | None,
    qk_norm: QKNorm | None = None,
) -> torch.Tensor:
    qkv = qkv.contiguous()
    tokens, heads, kv_heads, dim = qkv.shape[0], layer.heads, layer.kv_heads, layer.head_dim
    half = dim // 2 if rope is None else rope.table.shape[-1] // 2
    q_THD = qkv.new_empty(tokens, heads, dim)
    k, v = pool.layer(layer.local, "k"), pool.layer(layer.local, "v")
    if tokens:
        _rope_kv_write[(tokens, ceil_div(heads + 2 * kv_heads, HEADS_PER_PROGRAM))](
            qkv,
            q_THD,
            k,
            v,
            meta.write_T,
            meta.positions_T,
            None if rope is None else rope.table,
            None if qk_norm is None else qk_norm.q_weight_D,
            None if qk_norm is None else qk_norm.k_weight_D,
            0.0 if qk_norm is None else qk_norm.eps,
            layer.k_scale,
            layer.v_scale,
            H=heads,
            K=kv_heads,
            D=dim,
            HALF=half,
            HALF_BLOCK=power_of_2(half),
            REST_BLOCK=power_of_2(max(dim - 2 * half, 1)),
            HEADS=HEADS_PER_PROGRAM,
            LARGEST=torch.finfo(k.dtype).max if k.dtype in FLOAT8 else None,
            HEAD_SCALES=isinstance(layer.k_scale, torch.Tensor),
            num_warps=1,
        )
    return q_THD
