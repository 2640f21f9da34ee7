"""Drafts by the checkpoint's own layer for multi-token prediction (DeepSeek-V3, 2024), applied again for more than one
draft. It is fed as an EAGLE head is: slot p of its pages holds what follows from token p and the hidden state of p - 1.

Shapes: T tokens, B rows, C hidden channels.
"""

from __future__ import annotations

import torch

from dovetail.core.checkpoint import located
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ForwardContext, KVGroup, MTPLayer, TargetView
from dovetail.core.worker.features import FeatureStore
from dovetail.core.worker.fill import fill
from dovetail.plugins.spec_decode.base import BuiltinDrafter
from dovetail.plugins.spec_decode.config import MTPConfig
from dovetail.plugins.spec_decode.eagle import Eagle, check_windows
from dovetail.plugins.spec_decode.own_pages import OwnPages


class MTP(Eagle):
    config: MTPConfig  # type: ignore[assignment]
    name = "mtp"
    layer: Recurrent  # type: ignore[assignment]

    def check_files(self, target: TargetView) -> None:
        layer, weights = self._built(target), target.source.weights
        if weights is not None:
            with located(weights):
                layer.check_checkpoint(weights)

    def bind(self, target: TargetView) -> None:
        BuiltinDrafter.bind(self, target)
        layer = self._built(target)
        fill(layer, target.source)
        self.layer = Recurrent(layer)
        self.pages = OwnPages(target, self.window, resumes=False)
        self.features = FeatureStore(target, self.lookahead + 1, target.build.spec.hidden)
        self._last_id = target.build.spec.vocab - 1

    def _built(self, target: TargetView) -> MTPLayer:
        """Return the layer without weights."""
        spec = target.build.spec.mtp
        if spec is None:
            raise ConfigError(
                f"spec_decode=mtp: {target.build.spec.architecture} has no layer for multi-token prediction. Set "
                "spec_decode=ngram or spec_decode=none"
            )
        check_windows(self.name, target)
        return target.mtp_layer(target.build_context(spec, target.build.quantizer))


class Recurrent:
    """The layer as Eagle runs one: the states that it returns are also the features of the next pass."""

    def __init__(self, layer: MTPLayer) -> None:
        self.layer = layer

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        return self.layer.kv_groups

    def fuse(self, features_TC: torch.Tensor) -> torch.Tensor:
        return features_TC

    def forward(
        self, embeds_TC: torch.Tensor, features_TC: torch.Tensor, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states_TC = self.layer.forward(embeds_TC, features_TC, ctx)
        return states_TC, states_TC

    def logits(self, states_BC: torch.Tensor) -> torch.Tensor | None:
        """Return None: the model's head makes the logits."""
        return None
