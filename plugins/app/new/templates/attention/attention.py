"""Attention one token at a time. Shapes: T tokens, H heads, K kv heads, D head dim, L tokens of a context, S slots of
all pages."""

import torch
from dovetail.core.interfaces import PLAIN, AttentionBackend
from dovetail.core.ops import encode

from dovetail_mine.config import MineConfig


class Mine(AttentionBackend):
    config: MineConfig

    def attend(self, layer, ctx, q, emit=(PLAIN,)):
        dtype = torch.float64 if self.config.double else q.dtype
        out_THD = torch.zeros_like(q)
        starts = ctx.meta.row_start_B1.tolist()
        for row, length in enumerate(ctx.meta.kv_len_B.tolist()):
            for token in range(starts[row], starts[row + 1]):
                at = length - (starts[row + 1] - token)  # index of this token's own key
                first = max(at - layer.window + 1, 0) if layer.window else 0
                k_LHD, v_LHD = self._read(layer, ctx.meta, row, torch.arange(first, at + 1), dtype)
                score_HL = torch.einsum("hd,lhd->hl", q[token].to(dtype), k_LHD) * layer.scale
                out_THD[token] = torch.einsum("hl,lhd->hd", score_HL.softmax(-1), v_LHD).to(q.dtype)
        return encode(out_THD.flatten(1), emit)

    def _read(self, layer, meta, row, places_L, dtype):
        """Return keys and values of these tokens of a row, repeated for the heads that share them."""
        pool, share = self.pools[layer.group], layer.heads // layer.kv_heads
        pages_L = meta.page_table_BP[row, places_L // meta.page_tokens].long()
        slots_L = pages_L * meta.page_tokens + places_L % meta.page_tokens
        planes_SKD = (pool.layer(layer.local, name).flatten(0, 1) for name in ("k", "v"))
        return [x_SKD[slots_L].to(dtype).repeat_interleave(share, 1) for x_SKD in planes_SKD]
