"""All drafts from one pass of an EAGLE-3 layer (P-EAGLE; the idea of mask tokens is PARD's, An et al. 2025): behind the
last token the pass feeds K - 1 mask tokens, each with the mask's feature, and draft w comes from mask token w. The
layout is that of EAGLE-3, and a tensor `mask_hidden`, the feature in place of the fused states (3 C values), and
`ptd_token_id` in config.json, the token whose embedding the masks have. Shapes: B rows, T tokens, F channels of a
feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.interfaces import BuildContext, Draft, DraftContext
from dovetail.core.layers import Taker, Weight
from dovetail.plugins.spec_decode.config import ParallelConfig
from dovetail.plugins.spec_decode.eagle import Eagle3
from dovetail.plugins.spec_decode.eagle_files import EagleShape, read_parallel
from dovetail.plugins.spec_decode.eagle_layer import Eagle3Layer
from dovetail.plugins.spec_decode.own_pages import last_states


class ParallelLayer(Eagle3Layer):
    def __init__(self, build: BuildContext, shape: EagleShape, biased: Callable[[str], bool]) -> None:
        super().__init__(build, shape, biased)
        self.mask_id = shape.mask_id
        self.mask_F = torch.empty(shape.fused * build.spec.hidden, dtype=build.dtype, device=build.device)

    def others(self) -> Iterator[Taker]:
        yield from super().others()

        def take(lazy: LazyTensor) -> None:
            self.mask_F.copy_(lazy[:])

        yield Weight("mask_hidden", take, tuple(self.mask_F.shape))


class Parallel(Eagle3):
    config: ParallelConfig
    name = "parallel"
    layer_class = ParallelLayer
    layer: ParallelLayer

    def shape(self) -> EagleShape:
        return read_parallel(self.config)

    def propose(self, ctx: DraftContext) -> Draft:
        masks = ctx.k - 1
        ids_T, forward, index_B = self.pages.catch_up(ctx, masks)
        each = self.pages.window + masks
        slots_T, lengths_T = (column_B.repeat_interleave(each) for column_B in (ctx.slots_B, ctx.lengths_B))
        masked_T = forward.positions_T >= lengths_T
        # Features are kept of the latest positions alone, of which masks have none.
        kept_TF = self.features.at(slots_T, forward.positions_T - 1)
        feature_TF = torch.where(masked_T[:, None], self.layer.mask_F, kept_TF)
        embeds_TC = self._embed(torch.where(masked_T, self.layer.mask_id, ids_T))
        _, states_TC = self.layer.forward(embeds_TC, self.layer.fuse(feature_TF), forward)
        # Of rows that are not caught up, no draft counts.
        states = [last_states(states_TC, index_B + w) for w in range(ctx.k)]
        drafts = [ctx.draw(self._logits(states_BC), w) for w, states_BC in enumerate(states)]
        return Draft(torch.stack(drafts, 1), (index_B < self.pages.window) * ctx.k)
