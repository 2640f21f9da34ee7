"""Routed experts of 8-bit values with a scale per output channel, and inputs of the same dtype with a scale per row.
Shapes: E experts, C hidden channels, F channels of an expert, O outputs, I inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch

from dovetail.core.errors import TensorError
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
from dovetail.core.interfaces.tensor_record import PLAIN_WEIGHT, TensorRecord
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.layers.plain_experts import place_of
from dovetail.core.ops import ExpertWeights, gated_experts
from dovetail.core.tuning.experts import expert_tunables


class ScaledExperts(ExpertMethod):
    """Subclasses state `input`, whose dtype the weights have too, and how plain weights become such values."""

    stacked = True
    fast_accum = True
    """Option of ops.matmul.scaled_matmul, which applies to E4M3 alone."""

    def __init__(self, stored: Sequence[TensorRecord] | None) -> None:
        """`stored`: tensors of a matrix in a quantized checkpoint, with a `weight_scale` for each output or one for
        all; None = plain weights, which are quantized as they load."""
        self.quantized, self.records = stored is not None, tuple(stored or (PLAIN_WEIGHT,))

    @abstractmethod
    def quantize(self, weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values of float32 rows, and float32 scales [O, 1]."""

    def tensors_of(self, name: str) -> tuple[TensorRecord, ...]:
        return self.records

    def create(self, shape: ExpertShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.shape, dtype = shape, self.input.dtype
        experts, hidden, channels = shape.experts, shape.hidden, shape.intermediate
        return {
            "up": torch.empty(experts, 2 * channels, hidden, dtype=dtype, device=device),
            "down": torch.empty(experts, hidden, channels, dtype=dtype, device=device),
            "up_scale": torch.empty(experts, 2 * channels, dtype=torch.float32, device=device),
            "down_scale": torch.empty(experts, hidden, dtype=torch.float32, device=device),
        }

    def load(
        self, params: dict[str, torch.Tensor], expert: int, part: ExpertPart, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        name, rows = place_of(part, self.shape.intermediate)
        if self.quantized:
            values_OI, scale_O = tensors["weight"], tensors["weight_scale"].float()
            check_scales("weight_scale", scale_O)
        else:
            values_OI, scale_O1 = self.quantize(tensors["weight"].to(params[name].device).float())
            scale_O = scale_O1.squeeze(-1)
        params[name][expert, rows] = values_OI
        params[f"{name}_scale"][expert, rows] = scale_O

    def tunables(self, params: dict[str, torch.Tensor], rows: int, active: int, always: int = 0) -> Sequence[Tunable]:
        weights = self.weights(params)
        return expert_tunables(weights, rows, active, always, self.input, self.shape.dtype)

    def apply(
        self,
        params: dict[str, torch.Tensor],
        x: Activation,
        routing: Routing,
        activation: GatedActivation = SWIGLU,
        bias: ExpertBias | None = None,
    ) -> torch.Tensor:
        return gated_experts(
            x,
            routing,
            self.weights(params),
            activation,
            bias,
            between=self.input,
            dtype=self.shape.dtype,
            fast_accum=self.fast_accum,
        )

    def weights(self, params: Mapping[str, torch.Tensor]) -> ExpertWeights:
        return ExpertWeights(params["up"], params["down"], params["up_scale"], params["down_scale"])


def check_scales(name: str, scale: torch.Tensor) -> None:
    """Raise TensorError unless all scales are positive numbers."""
    if not (scale.isfinite() & (scale > 0)).all():
        raise TensorError(
            name, f"must be one positive number, or one for each row or block; the least is {scale.min():g}"
        )
