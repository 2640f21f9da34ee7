"""Attention by torch's scaled_dot_product_attention over gathered pages: the reference backend, for any device.

Decode rows run as one padded batch, prefill rows one at a time. Masks are computed from lengths on the device, and the
host uses only upper bounds, so nothing waits for the device.

Shapes: T tokens, B rows, N tokens of a row (padded), L keys of a row (padded), H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    AttentionBackend,
    AttentionLayer,
    AttnCtx,
    BatchMeta,
    Bundle,
    HostBounds,
)
from dovetail.core.ops import encode
from dovetail.core.ops.kv_write import FLOAT8
from dovetail.plugins.attention.sdpa.latent import attend_latents
from dovetail.plugins.attention.sdpa.rows import RowBatch, plan_rows


class SDPA(AttentionBackend):
    exact_lengths = "device"

    def plan_device(self, meta: BatchMeta, host: HostBounds, state: object) -> AttnCtx:
        rows = [(0, host.num_decode)] if host.num_decode else []
        rows += [(row, row + 1) for row in range(host.num_decode, len(host.counts))]
        decode = host.num_decode
        planned = [plan_rows(meta, host, *row, None if row[0] >= decode else meta.tree) for row in rows]
        return AttnCtx(meta, host, planned)

    def attend(
        self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> Bundle:
        pool = self.pools[layer.group]
        k_SKD, v_SKD = (pool.layer(layer.local, name).flatten(0, 1) for name in ("k", "v"))
        out_THD = torch.zeros_like(q)
        for rows in ctx.state:
            # Stale pages may hold NaN, which a mask cannot remove from a sum.
            reached = rows.reached_BL(layer.window)[:, :, None, None]
            k_BLKD, v_BLKD = (
                torch.where(reached, _read(plane, rows.keys_BL, scale, q.dtype), 0)
                for plane, scale in ((k_SKD, layer.k_scale), (v_SKD, layer.v_scale))
            )
            out_BNHD = _attend(layer, rows, q[rows.gather_BN], k_BLKD, v_BLKD)
            out_THD[rows.tokens] = out_BNHD.flatten(0, 1)[rows.scatter_T]
        return encode(out_THD.flatten(1), emit)

    def attend_mla(
        self,
        layer: AttentionLayer,
        ctx: AttnCtx,
        q: torch.Tensor,
        up_HOL: torch.Tensor,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> Bundle:
        assert layer.mla is not None
        out_THV = q.new_zeros(len(q), layer.heads, layer.mla.v_dim)
        for rows in ctx.state:
            out_BNHV = attend_latents(layer, self.pools[layer.group], rows, q[rows.gather_BN], up_HOL)
            out_THV[rows.tokens] = out_BNHV.flatten(0, 1)[rows.scatter_T]
        return encode(out_THV.flatten(1), emit)


def _read(
    plane_SKD: torch.Tensor, slots_BL: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Read keys or values as [B, L, K, D] in `dtype`. 8-bit values are multiplied by the scale, one or one per head."""
    if plane_SKD.dtype not in FLOAT8:
        return plane_SKD[slots_BL].to(dtype)
    # torch cannot index 8-bit floats, so their bytes are indexed instead.
    stored = plane_SKD.view(torch.uint8)[slots_BL].view(plane_SKD.dtype).float()
    return (stored * (scale[:, None] if isinstance(scale, torch.Tensor) else scale)).to(dtype)


def _attend(
    layer: AttentionLayer, rows: RowBatch, q_BNHD: torch.Tensor, k_BLKD: torch.Tensor, v_BLKD: torch.Tensor
) -> torch.Tensor:
    batch, count, heads, dim = q_BNHD.shape
    kv_heads = k_BLKD.shape[2]
    group = heads // kv_heads
    changed = bool(layer.soft_cap) or layer.sinks is not None
    if rows.whole_prompt and not changed and not (layer.window and layer.window < count):
        # The first chunk of a prompt needs no mask tensor, so torch can use a flash kernel.
        q, k, v = (x.transpose(1, 2) for x in (q_BNHD, k_BLKD[:, :count], v_BLKD[:, :count]))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale).transpose(1, 2)
    # Query heads of one kv head become extra query positions, so keys and values are not copied per head.
    q_BKGND = q_BNHD.view(batch, count, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    mask_BNL = rows.mask_BNL(layer.window)
    if changed:
        out_BKGND = _attend_by_scores(layer, q_BKGND, k_BLKD.permute(0, 2, 3, 1), v_BLKD.transpose(1, 2), mask_BNL)
        return out_BKGND.permute(0, 3, 1, 2, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(
        q_BKGND.flatten(2, 3),
        k_BLKD.transpose(1, 2),
        v_BLKD.transpose(1, 2),
        attn_mask=mask_BNL.repeat(1, group, 1).unsqueeze(1),
        scale=layer.scale,
    )
    return out.view(batch, kv_heads, group, count, dim).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend_by_scores(
    layer: AttentionLayer, q_BKGND: torch.Tensor, k_BKDL: torch.Tensor, v_BKLD: torch.Tensor, mask_BNL: torch.Tensor
) -> torch.Tensor:
    """Attention with a cap or sinks, which torch's function lacks, in float32. G: query heads of a kv head."""
    scores_BKGNL = (q_BKGND.float() @ k_BKDL.float().unsqueeze(2)) * layer.scale
    if layer.soft_cap:
        scores_BKGNL = layer.soft_cap * torch.tanh(scores_BKGNL / layer.soft_cap)
    scores_BKGNL = scores_BKGNL.masked_fill(~mask_BNL[:, None, None], float("-inf"))
    keys = scores_BKGNL.shape[-1]
    if layer.sinks is not None:
        sinks_KG = layer.sinks.view(layer.kv_heads, -1)
        sinks_BKGN1 = sinks_KG[None, :, :, None, None].expand(*scores_BKGNL.shape[:-1], 1)
        scores_BKGNL = torch.cat((scores_BKGNL, sinks_BKGN1), dim=-1)
    weights_BKGNL = scores_BKGNL.softmax(-1)[..., :keys]
    return (weights_BKGNL @ v_BKLD.float().unsqueeze(2)).to(q_BKGND.dtype)
