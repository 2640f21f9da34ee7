"""A backend without faults, from which those of test_broken.py are made. Shapes: T tokens, L keys of a row, H query
heads, K kv heads, D head dim."""

from __future__ import annotations

from dataclasses import replace

import torch

from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    AttentionBackend,
    AttentionLayer,
    AttnCtx,
    BatchMeta,
    Bundle,
)
from dovetail.core.ops import encode


class Sound(AttentionBackend):
    """Correct backend that works token by token, with one overridable method per possible fault."""

    def __init__(self) -> None:
        super().__init__(None)

    def attend(
        self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> Bundle:
        out = torch.empty_like(q).zero_()
        for token in range(int(ctx.meta.row_start_B1[-1])):
            out[token] = self.attend_token(layer, ctx, q[token], token)
        return encode(out.flatten(1), emit)

    def attend_token(self, layer: AttentionLayer, ctx: AttnCtx, q_HD: torch.Tensor, token: int) -> torch.Tensor:
        row = int(ctx.meta.rows_T[token])
        key_L = torch.arange(self.length(ctx, row))
        at = int(ctx.meta.kv_len_B[row]) - int(ctx.meta.row_start_B1[row + 1]) + token
        meta = ctx.meta if self.may_feed_trees(ctx, row) else replace(ctx.meta, tree=None)
        seen_L = self.seen(layer, at, key_L, meta, row, token)
        slots_L = self.slots(ctx.meta, row, key_L)
        pool = self.pools[layer.group]
        k_LKD, v_LKD = (
            # 8-bit floats cannot be indexed.
            scaled(pool.layer(layer.local, name).flatten(0, 1).to(q_HD.dtype)[slots_L], pool.planes[name].dtype, scale)
            for name, scale in zip(("k", "v"), self.kv_scales(layer), strict=True)
        )
        return self.mix(layer, q_HD, k_LKD, v_LKD, seen_L)

    def may_feed_trees(self, ctx: AttnCtx, row: int) -> bool:
        return row < ctx.host.num_decode

    def kv_scales(self, layer: AttentionLayer) -> tuple[float | torch.Tensor, float | torch.Tensor]:
        return layer.k_scale, layer.v_scale

    def length(self, ctx: AttnCtx, row: int) -> int:
        return int(ctx.meta.kv_len_B[row])

    def slots(self, meta: BatchMeta, row: int, key_L: torch.Tensor) -> torch.Tensor:
        pages = meta.page_table_BP[row].long()
        return pages[key_L // meta.page_tokens] * meta.page_tokens + key_L % meta.page_tokens

    def seen(
        self, layer: AttentionLayer, at: int, key_L: torch.Tensor, meta: BatchMeta, row: int, token: int
    ) -> torch.Tensor:
        if meta.tree is not None:
            return self.seen_in_tree(layer, key_L, meta, token)
        seen_L = key_L <= at
        return seen_L & (key_L > at - layer.window) if layer.window else seen_L

    def seen_in_tree(self, layer: AttentionLayer, key_L: torch.Tensor, meta: BatchMeta, token: int) -> torch.Tensor:
        back_L = key_L - int(meta.tree.root_T[token]) - 1
        path_L = (back_L < 0) | (meta.tree.ancestors_T[token] >> back_L.clamp(0, 63) & 1 != 0)
        return path_L & (path_L.flip(0).cumsum(0).flip(0) <= layer.window) if layer.window else path_L

    def mix(
        self, layer: AttentionLayer, q_HD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, seen_L: torch.Tensor
    ) -> torch.Tensor:
        head_H = self.kv_head_H(layer)
        k_LHD, v_LHD = k_LKD[seen_L][:, head_H].float(), v_LKD[seen_L][:, head_H].float()
        scores_HL = torch.einsum("hd,lhd->hl", q_HD.float(), k_LHD) * layer.scale
        if layer.soft_cap:
            scores_HL = layer.soft_cap * torch.tanh(scores_HL / layer.soft_cap)
        if layer.sinks is not None:
            scores_HL = torch.cat((scores_HL, layer.sinks[:, None]), dim=1)
        weights_HL = self.softmax(scores_HL)[:, : len(k_LHD)]
        return torch.einsum("hl,lhd->hd", weights_HL, v_LHD).to(q_HD.dtype)

    def kv_head_H(self, layer: AttentionLayer) -> torch.Tensor:
        return torch.arange(layer.heads) // (layer.heads // layer.kv_heads)

    def softmax(self, scores_HL: torch.Tensor) -> torch.Tensor:
        return scores_HL.softmax(-1)


def scaled(x_LKD: torch.Tensor, stored: torch.dtype, scale: float | torch.Tensor) -> torch.Tensor:
    if stored.itemsize > 1:
        return x_LKD
    return x_LKD * (scale[:, None] if isinstance(scale, torch.Tensor) else scale)
