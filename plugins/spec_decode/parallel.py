"""All drafts from one pass of an EAGLE-3 layer, or of several layers (P-EAGLE; the idea of mask tokens is PARD's, An et
al. 2025): behind the last token the pass feeds K - 1 mask tokens, each with the mask's feature, and draft w comes from
mask token w. The layout is that of EAGLE-3, and a tensor `mask_hidden`, the feature in place of the fused states (3 C
values), and `ptd_token_id` in config.json, the token whose embedding the masks have. Shapes: B rows, T tokens, F
channels of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.interfaces import BuildContext, Draft, DraftContext, ForwardContext, Partial
from dovetail.core.layers import Linear, RMSNorm, Taker, Weight
from dovetail.plugins.spec_decode.config import ParallelConfig
from dovetail.plugins.spec_decode.eagle import Eagle3
from dovetail.plugins.spec_decode.eagle_files import EagleShape, read_parallel
from dovetail.plugins.spec_decode.eagle_layer import Block, Eagle3Layer
from dovetail.plugins.spec_decode.own_pages import last_states


class ParallelLayer(Eagle3Layer):
    """An EAGLE-3 layer, or several: those after the first one are ordinary layers `layers.1` and so on, and the first
    one may be called `layers.0`."""

    def __init__(self, build: BuildContext, shape: EagleShape, biased: Callable[[str], bool]) -> None:
        spec = build.spec
        if spec.layers > 1 and not biased(f"{self.layer}.self_attn.q_proj.weight"):
            self.layer = "layers.0"
        super().__init__(build, shape, biased)
        names = [f"layers.{index}" for index in range(1, spec.layers)]
        self.later = [
            Block(build, shape, biased, name, 1, self.groups[0], index) for index, name in enumerate(names, 1)
        ]
        self.input_norms = [RMSNorm(f"{name}.input_layernorm", build, spec.hidden, shape.eps) for name in names]
        # Some files have this norm in every layer; it is that of the feature, which only the first one reads.
        self.ignored = (*self.ignored, *(f"{name}.hidden_norm.weight" for name in names))
        self.mask_id = shape.mask_id
        self.mask_F = torch.empty(shape.fused * build.spec.hidden, dtype=build.dtype, device=build.device)

    def linears(self) -> Iterator[Linear]:
        yield from super().linears()
        for block in self.later:
            yield from block.linears()

    def run_later(self, mixed: Partial, residual_TC: torch.Tensor, ctx: ForwardContext) -> tuple[Partial, torch.Tensor]:
        for block, norm in zip(self.later, self.input_norms, strict=True):
            normed, residual_TC = self.build.collective.boundary(mixed, residual_TC, norm, block.qkv.inputs)
            mixed, residual_TC = block.run(normed, residual_TC, ctx)
        return mixed, residual_TC

    def others(self) -> Iterator[Taker]:
        yield from super().others()
        for block, norm in zip(self.later, self.input_norms, strict=True):
            yield from block.others()
            yield from norm.weights()

        def take(lazy: LazyTensor) -> None:
            self.mask_F.copy_(lazy[:])

        yield Weight("mask_hidden", take, tuple(self.mask_F.shape))


class Parallel(Eagle3):
    config: ParallelConfig
    autoregressive = False
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
        drafts = [self._draw(ctx, states_BC, w) for w, states_BC in enumerate(states)]
        return Draft(torch.stack(drafts, 1), (index_B < self.pages.window) * ctx.k)
