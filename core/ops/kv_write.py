"""Turn the output of the merged q|k|v matmul into attention inputs: norm and rotate q and k, write k and v to pages.
Shapes: T tokens, H query heads, K kv heads, D head dim, R rotary dim (R <= D)."""

from __future__ import annotations

import torch

from dovetail.core.interfaces.attention import AttentionLayer, BatchMeta, KVPool, QKNorm, Rope
from dovetail.core.ops.norm import normalize

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Scaled cache formats. The other formats hold K and V unscaled."""


def rope_kv_write(
    layer: AttentionLayer,
    meta: BatchMeta,
    pool: KVPool,
    qkv: torch.Tensor,
    rope: Rope | None,
    qk_norm: QKNorm | None = None,
) -> torch.Tensor:
    """Return q_THD of qkv [T, (H + 2K) * D]; write k and v to the slots meta.write_T of the planes "k" and "v". Padding
    tokens have a slot of scratch page 0, so every token is written without a check."""
    if qkv.is_cuda:
        from dovetail.core.ops.kernels.kv_write import rope_kv_write_triton

        return rope_kv_write_triton(layer, meta, pool, qkv, rope, qk_norm)
    return rope_kv_write_reference(layer, meta, pool, qkv, rope, qk_norm)


def rope_kv_write_reference(
    layer: AttentionLayer,
    meta: BatchMeta,
    pool: KVPool,
    qkv: torch.Tensor,
    rope: Rope | None,
    qk_norm: QKNorm | None = None,
) -> torch.Tensor:
    qkv_THD = qkv.view(qkv.shape[0], layer.heads + 2 * layer.kv_heads, layer.head_dim)
    q, k, v = qkv_THD.split((layer.heads, layer.kv_heads, layer.kv_heads), dim=1)
    if qk_norm is not None:
        q, k = normalize(q, qk_norm.q_weight_D, qk_norm.eps), normalize(k, qk_norm.k_weight_D, qk_norm.eps)
    if rope is not None:
        table_TR = rope.table[meta.positions_T]
        q, k = rotate(q, table_TR), rotate(k, table_TR)
    for name, new, scale in (("k", k, layer.k_scale), ("v", v, layer.v_scale)):
        slots = pool.layer(layer.local, name).flatten(0, 1)
        if slots.dtype in FLOAT8:
            # torch cannot index 8-bit floats, so their bytes are indexed instead.
            slots.view(torch.uint8)[meta.write_T] = to_float8(new, scale, slots.dtype).view(torch.uint8)
        else:
            slots[meta.write_T] = new.to(slots.dtype)
    return q.contiguous()


def to_float8(x_TKD: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x / scale, clamped to the format's range. The scale is one number or one per head."""
    largest = torch.finfo(dtype).max
    per_head = scale[:, None] if isinstance(scale, torch.Tensor) else scale
    return (x_TKD.float() / per_head).clamp(-largest, largest).to(dtype)


def rotate(x_THD: torch.Tensor, table_TR: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021) of the first R dimensions in float32, with halves paired as in GPT-NeoX."""
    cos, sin = table_TR.unsqueeze(1).chunk(2, dim=-1)
    half = cos.shape[-1]
    x1, x2, rest = x_THD.float().split((half, half, x_THD.shape[-1] - 2 * half), dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1).to(x_THD.dtype)
