"""The component attention=triton."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import PLAIN, ActFormat, AttentionLayer, AttnCtx, Bundle
from dovetail.core.ops.formats import encode
from dovetail.plugins.attention.triton.latent import attend_latents
from dovetail.plugins.attention.triton.paged import PagedTriton


class Triton(PagedTriton):
    """Paged attention, over compressed latents, too."""

    def attend_mla(
        self,
        layer: AttentionLayer,
        ctx: AttnCtx,
        q: torch.Tensor,
        up_HOL: torch.Tensor,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> Bundle:
        return encode(attend_latents(self, layer, ctx, q.contiguous(), up_HOL), emit)
