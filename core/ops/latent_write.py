"""Inputs of attention over compressed latents: norm and rotate them, rotate queries, write latents to their pages.
Shapes: T tokens, H query heads, N dims of a query that are not rotated, R rotary dim, D = N + R, L kv rank,
G groups of the columns of a latent."""

from __future__ import annotations

import torch

from dovetail.core.interfaces.attention import AttentionLayer, BatchMeta, KVPool, LatentNorm, Rope
from dovetail.core.ops.kv_write import rotate
from dovetail.core.ops.latents import LATENT, ROTARY, SCALES, quantize_latents
from dovetail.core.ops.norm import normalize


def latent_write(
    layer: AttentionLayer,
    meta: BatchMeta,
    pool: KVPool,
    q: torch.Tensor,
    latents: torch.Tensor,
    rope: Rope | None,
    norm: LatentNorm,
) -> torch.Tensor:
    """Return q_THD with rotated columns, and write latents [T, L + R] to the slots meta.write_T. See
    AttentionBackend.write_mla. Rows of q and latents may be strided."""
    if q.is_cuda:
        from dovetail.core.ops.kernels.latent_write import latent_write_triton

        return latent_write_triton(layer, meta, pool, q, latents, rope, norm)
    return latent_write_reference(layer, meta, pool, q, latents, rope, norm)


def latent_write_reference(
    layer: AttentionLayer,
    meta: BatchMeta,
    pool: KVPool,
    q: torch.Tensor,
    latents: torch.Tensor,
    rope: Rope | None,
    norm: LatentNorm,
) -> torch.Tensor:
    mla = layer.mla
    assert mla is not None
    nope_THN, rotary_THR = q.reshape(len(q), layer.heads, -1).split((mla.nope_dim, mla.rope_dim), dim=2)
    latent_TL, key_TR = latents.split((mla.kv_rank, mla.rope_dim), dim=1)
    latent_TL = normalize(latent_TL, norm.weight_L, norm.eps)
    if rope is not None:
        table_TR = rope.table[meta.positions_T]
        rotary_THR, key_TR = rotate(rotary_THR, table_TR), rotate(key_TR[:, None], table_TR)[:, 0]
    slots = {name: pool.layer(layer.local, name).flatten(0, 1) for name in pool.planes}
    if SCALES in slots:
        values_TL, scales_TG = quantize_latents(latent_TL)
        # torch cannot index 8-bit floats, so their bytes are indexed instead.
        slots[LATENT].view(torch.uint8)[meta.write_T] = values_TL.view(torch.uint8)
        slots[SCALES][meta.write_T] = scales_TG
        slots[ROTARY][meta.write_T] = key_TR.to(slots[ROTARY].dtype)
    else:
        slots[LATENT][meta.write_T] = torch.cat((latent_TL, key_TR), dim=1).to(slots[LATENT].dtype)
    return torch.cat((nope_THN, rotary_THR), dim=2)
