"""Routed experts in E4M3 with a scale per output channel, and inputs with a scale per row. Shapes: E experts, C hidden
channels, F channels of an expert, O outputs."""

from __future__ import annotations

from collections.abc import Mapping

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
from dovetail.core.interfaces.tensor_record import PLAIN_WEIGHT, Axis, TensorRecord
from dovetail.core.layers.plain_experts import place_of
from dovetail.core.ops import ExpertWeights, gated_experts
from dovetail.plugins.quant.fp8.checkpoint import Stored
from dovetail.plugins.quant.fp8.format import E4M3, FP8_TOKEN, quantize_rows


class FP8Experts(ExpertMethod):
    input = FP8_TOKEN

    def __init__(self, fast_accum: bool, stored: Stored | None) -> None:
        """`stored`: description of a quantized checkpoint; None = plain weights, which are quantized as they load."""
        self.fast_accum, self.quantized = fast_accum, stored is not None
        self.records = (PLAIN_WEIGHT,) if stored is None else records_of(stored)

    def tensors_of(self, name: str) -> tuple[TensorRecord, ...]:
        return self.records

    def create(self, shape: ExpertShape, device: torch.device) -> dict[str, torch.Tensor]:
        self.shape = shape
        experts, hidden, channels = shape.experts, shape.hidden, shape.intermediate
        return {
            "up": torch.empty(experts, 2 * channels, hidden, dtype=E4M3, device=device),
            "down": torch.empty(experts, hidden, channels, dtype=E4M3, device=device),
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
            values_OI, scale_O1 = quantize_rows(tensors["weight"].to(params[name].device).float())
            scale_O = scale_O1.squeeze(-1)
        params[name][expert, rows] = values_OI
        params[f"{name}_scale"][expert, rows] = scale_O

    def apply(
        self,
        params: dict[str, torch.Tensor],
        x: Activation,
        routing: Routing,
        activation: GatedActivation = SWIGLU,
        bias: ExpertBias | None = None,
    ) -> torch.Tensor:
        weights = ExpertWeights(params["up"], params["down"], params["up_scale"], params["down_scale"])
        return gated_experts(
            x,
            routing,
            weights,
            activation,
            bias,
            between=FP8_TOKEN,
            dtype=self.shape.dtype,
            fast_accum=self.fast_accum,
        )


def records_of(stored: Stored) -> tuple[TensorRecord, ...]:
    """Return the tensors of a matrix with a scale for all of it or one per row. Static input scales are ignored."""
    records = (
        TensorRecord("weight", dtypes=(E4M3,)),
        TensorRecord("weight_scale", (Axis("outputs", stored.block[0]),)),
    )
    return (*records, TensorRecord("input_scale", (Axis("nothing"),))) if stored.input_scales else records


def check_scales(name: str, scale: torch.Tensor) -> None:
    """Raise TensorError unless all scales are positive numbers."""
    if not (scale.isfinite() & (scale > 0)).all():
        raise TensorError(
            name, f"must be one positive number, or one for each row or block; the least is {scale.min():g}"
        )
