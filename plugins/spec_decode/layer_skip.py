"""Drafts by some of the target's own layers (self-speculative decoding, Zhang et al. 2023), over the target's pages.
The KV that a pass writes there is replaced when the step verifies. No weights, and no pages of its own. B rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Draft, DraftContext, TargetView, Verify
from dovetail.plugins.spec_decode.base import BuiltinDrafter
from dovetail.plugins.spec_decode.config import LayerSkipConfig


class LayerSkip(BuiltinDrafter):
    config: LayerSkipConfig
    autoregressive = True
    on_target_pages = True

    @property
    def verify(self) -> Verify:  # type: ignore[override]
        return self.config.verify

    def check_files(self, target: TargetView) -> None:
        skipped_layers(self.config.share, target.build.spec.layers)

    def bind(self, target: TargetView) -> None:
        super().bind(target)
        self._skip = skipped_layers(self.config.share, target.build.spec.layers)
        self._at_S = torch.zeros(target.max_seqs + 1, dtype=torch.int64, device=target.build.device)
        """Position of the next pass."""

    def propose(self, ctx: DraftContext) -> Draft:
        drafts: list[torch.Tensor] = []
        for w in range(ctx.k):
            self._at_S[ctx.slots_B] = ctx.lengths_B - 1 + w
            ids_B, forward = ctx.lay_out(self._at_S, 1)
            if drafts:
                # An id is -1 where logits were NaN; verification ends the drafts there.
                ids_B = drafts[-1].clamp_min(0)
            states_BC = self.target.forward(self.target.embed(ids_B), replace(forward, skip=self._skip)).states
            drafts.append(ctx.draw_from(self.target, self.target.logits, states_BC, w))
        return Draft(torch.stack(drafts, 1), torch.full_like(ctx.lengths_B, ctx.k))


def skipped_layers(share: float, layers: int) -> frozenset[int]:
    """Return the layers that drafts leave out: a share of the layers is kept, the first and the last among them, at
    equal distances."""
    if layers < 2:
        raise ConfigError("spec_decode=layer_skip: the model has one layer, so there is none to skip")
    kept = max(1, min(layers - 1, round(share * layers)))
    places = {round(i * (layers - 1) / max(kept - 1, 1)) for i in range(kept)}
    return frozenset(range(layers)) - places
