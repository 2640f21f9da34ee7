"""Unquantized experts, used by quant=none and by other quantizers for layers they skip. Shapes: E experts, C hidden
channels, F channels of an expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dovetail.core.interfaces import (
    SWIGLU,
    Activation,
    ExpertBias,
    ExpertMethod,
    ExpertPart,
    ExpertShape,
    GatedActivation,
    Routing,
)
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.ops import ExpertWeights, gated_experts
from dovetail.core.tuning.experts import expert_tunables


def place_of(part: ExpertPart, channels: int) -> tuple[str, slice]:
    """Return the tensor with a matrix, "up" [E, 2F, C] or "down" [E, C, F], and its rows."""
    if part == "down":
        return "down", slice(None)
    return "up", slice(0, channels) if part == "gate" else slice(channels, 2 * channels)


class PlainExperts(ExpertMethod):
    """Matrices and products in the model's dtype."""

    stacked = True

    def create(self, shape: ExpertShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.shape = shape
        experts, hidden, channels = shape.experts, shape.hidden, shape.intermediate
        return {
            "up": torch.empty(experts, 2 * channels, hidden, dtype=shape.dtype, device=device),
            "down": torch.empty(experts, hidden, channels, dtype=shape.dtype, device=device),
        }

    def load(
        self, params: dict[str, torch.Tensor], expert: int, part: ExpertPart, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        name, rows = place_of(part, self.shape.intermediate)
        params[name][expert, rows].copy_(tensors["weight"])

    def tunables(self, params: dict[str, torch.Tensor], rows: int, active: int, always: int = 0) -> Sequence[Tunable]:
        weights = ExpertWeights(params["up"], params["down"])
        return expert_tunables(weights, rows, active, always, self.input, self.shape.dtype)

    def apply(
        self,
        params: dict[str, torch.Tensor],
        x: Activation,
        routing: Routing,
        activation: GatedActivation = SWIGLU,
        bias: ExpertBias | None = None,
    ) -> torch.Tensor:
        weights = ExpertWeights(params["up"], params["down"])
        return gated_experts(x, routing, weights, activation, bias, dtype=self.shape.dtype)
