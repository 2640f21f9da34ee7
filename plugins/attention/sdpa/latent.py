"""Attention over compressed latents in torch, absorbed or expanded.

Shapes: B rows, N tokens of a row (padded), S keys of a row (padded), H query heads, L kv rank, R rotary dim, O nope + v
rows of a head's up-projection, D query head dim (nope + R), V value dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.core.interfaces import AttentionLayer, KVPool
from dovetail.core.ops.latents import expands, read_latents
from dovetail.plugins.attention.sdpa.rows import RowBatch


def attend_latents(
    layer: AttentionLayer, pool: KVPool, rows: RowBatch, q_BNHD: torch.Tensor, up_HOL: torch.Tensor
) -> torch.Tensor:
    """Return [B, N, H, V]."""
    assert layer.mla is not None
    batch, count, _, _ = q_BNHD.shape
    # Stale pages may hold NaN, which a mask cannot remove from a sum.
    reached_BS1 = rows.exists_BL[:, :, None]
    latent_BSL, rotary_BSR = (
        torch.where(reached_BS1, read.view(batch, -1, read.shape[-1]), 0)
        for read in read_latents(layer, pool, rows.keys_BL.flatten(), q_BNHD.dtype)
    )
    attend = _expanded if expands(layer.mla, count) else _absorbed
    return attend(layer, rows, q_BNHD, latent_BSL, rotary_BSR, up_HOL)


def _absorbed(
    layer: AttentionLayer,
    rows: RowBatch,
    q_BNHD: torch.Tensor,
    latent_BSL: torch.Tensor,
    rotary_BSR: torch.Tensor,
    up_HOL: torch.Tensor,
) -> torch.Tensor:
    """All heads share one key, a latent with its rotated columns, and one value, the latent."""
    assert layer.mla is not None
    nope = layer.mla.nope_dim
    batch, count, heads, _ = q_BNHD.shape
    inner_BNHL = torch.einsum("bnhd,hdl->bnhl", q_BNHD[..., :nope], up_HOL[:, :nope])
    # Heads become query positions, so that keys are not copied per head.
    q_BMK = torch.cat((inner_BNHL, q_BNHD[..., nope:]), dim=-1).flatten(1, 2)
    out_BML = F.scaled_dot_product_attention(
        q_BMK,
        torch.cat((latent_BSL, rotary_BSR), dim=-1),
        latent_BSL,
        attn_mask=rows.mask_BNL(0).repeat_interleave(heads, dim=1),
        scale=layer.scale,
    )
    return torch.einsum("bnhl,hvl->bnhv", out_BML.view(batch, count, heads, -1), up_HOL[:, nope:])


def _expanded(
    layer: AttentionLayer,
    rows: RowBatch,
    q_BNHD: torch.Tensor,
    latent_BSL: torch.Tensor,
    rotary_BSR: torch.Tensor,
    up_HOL: torch.Tensor,
) -> torch.Tensor:
    assert layer.mla is not None
    nope = layer.mla.nope_dim
    k_BHSN, v_BHSV = (torch.einsum("bsl,hol->bhso", latent_BSL, up_HOL)).split((nope, up_HOL.shape[1] - nope), dim=-1)
    k_BHSD = torch.cat((k_BHSN, rotary_BSR[:, None].expand(-1, len(up_HOL), -1, -1)), dim=-1)
    q_BHND = q_BNHD.transpose(1, 2)
    if rows.whole_prompt:
        # The first chunk of a prompt needs no mask tensor, so torch can use a flash kernel.
        count = q_BNHD.shape[1]
        k_BHSD, v_BHSV = k_BHSD[:, :, :count], v_BHSV[:, :, :count]
        return F.scaled_dot_product_attention(q_BHND, k_BHSD, v_BHSV, is_causal=True, scale=layer.scale).transpose(1, 2)
    mask_BNS = rows.mask_BNL(0)
    return F.scaled_dot_product_attention(
        q_BHND, k_BHSD, v_BHSV, attn_mask=mask_BNS[:, None], scale=layer.scale
    ).transpose(1, 2)
