"""Routed experts in E4M3 with a scale per output channel or block, and inputs with a scale per row. Shapes: E experts,
C hidden channels, F channels of an expert, O outputs, G groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from dovetail.core.arithmetic import ceil_div
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
from dovetail.core.layers.looped_experts import linear_shapes
from dovetail.core.layers.plain_experts import place_of
from dovetail.core.ops import ExpertWeights, gated_experts
from dovetail.plugins.quant.fp8.checkpoint import Stored
from dovetail.plugins.quant.fp8.format import E4M3, FP8_TOKEN, quantize_blocks, quantize_rows


class FP8Experts(ExpertMethod):
    input = FP8_TOKEN
    stacked = True

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
        return gated_experts(
            x,
            routing,
            self.weights(params),
            activation,
            bias,
            between=FP8_TOKEN,
            dtype=self.shape.dtype,
            fast_accum=self.fast_accum,
        )

    def weights(self, params: Mapping[str, torch.Tensor]) -> ExpertWeights:
        return ExpertWeights(params["up"], params["down"], params["up_scale"], params["down_scale"])


LEAST_GROUP = 32
"""Inputs that a tensor core multiplies at once."""


class BlockFP8Experts(FP8Experts):
    """E4M3 weights of the checkpoint, with a scale for each square block of outputs and inputs (DeepSeek-V3, 2024)."""

    def __init__(self, stored: Stored) -> None:
        self.fast_accum, self.name, (self.block, _) = True, stored.scale, stored.block
        axes = Axis("outputs", self.block), Axis("inputs", self.block)
        self.records = (TensorRecord("weight", dtypes=(E4M3,)), TensorRecord(stored.scale, axes))

    def create(self, shape: ExpertShape, device: torch.device) -> dict[str, torch.Tensor]:
        params = super().create(shape, device)
        self.step = step_of(shape, self.block)
        groups_C, groups_F = ceil_div(shape.hidden, self.block), ceil_div(shape.intermediate, self.step)
        params["up_scale"] = torch.empty(shape.experts, 2 * groups_F, groups_C, dtype=torch.float32, device=device)
        params["down_scale"] = torch.empty(shape.experts, groups_C, groups_F, dtype=torch.float32, device=device)
        return params

    def load(
        self, params: dict[str, torch.Tensor], expert: int, part: ExpertPart, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        name, rows = place_of(part, self.shape.intermediate)
        scale_OG = tensors[self.name].float()
        check_scales(self.name, scale_OG)
        params[name][expert, rows] = tensors["weight"]
        if part == "down":
            _, down = linear_shapes(self.shape, expert)
            params["down_scale"][expert] = down.spread_groups(scale_OG[:: self.block], self.block)
            return
        gate, up = params["up_scale"][expert].chunk(2)
        (gate if part == "gate" else up).copy_(scale_OG[:: self.step])

    def weights(self, params: Mapping[str, torch.Tensor]) -> ExpertWeights:
        return replace(super().weights(params), block=(self.block, self.step))


class RoundedBlockFP8Experts(BlockFP8Experts):
    """The same from plain weights, which are quantized as they load. Blocks begin at a rank's first channel."""

    def __init__(self, stored: Stored) -> None:
        """`stored`: the blocks to make."""
        super().__init__(stored)
        self.records = (PLAIN_WEIGHT,)

    def load(
        self, params: dict[str, torch.Tensor], expert: int, part: ExpertPart, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        name, rows = place_of(part, self.shape.intermediate)
        blocks = (self.block, self.step) if part == "down" else (self.step, self.block)
        weight_OI = tensors["weight"].to(params[name].device).float()
        params[name][expert, rows], scale_OG = quantize_blocks(weight_OI, *blocks)
        scales = params[f"{name}_scale"][expert]
        if part != "down":
            scales = scales.chunk(2)[part == "up"]
        scales.copy_(scale_OG)


def step_of(shape: ExpertShape, block: int) -> int:
    """Return the channels of this rank's experts that share a scale."""
    _, down = linear_shapes(shape, 0)
    return down.group_step(block)


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
