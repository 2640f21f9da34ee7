"""Routed experts in E4M3 with a scale per output channel or block, and inputs with a scale per row. Shapes: E experts,
C hidden channels, F channels of an expert, O outputs, G groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import ExpertPart, ExpertShape
from dovetail.core.interfaces.tensor_record import PLAIN_WEIGHT, Axis, TensorRecord
from dovetail.core.layers.looped_experts import linear_shapes
from dovetail.core.layers.plain_experts import place_of
from dovetail.core.layers.scaled_experts import ScaledExperts, check_scales
from dovetail.core.ops import ExpertWeights
from dovetail.plugins.quant.fp8.checkpoint import Stored
from dovetail.plugins.quant.fp8.format import E4M3, FP8_TOKEN, quantize_blocks, quantize_rows


class FP8Experts(ScaledExperts):
    input = FP8_TOKEN

    def __init__(self, fast_accum: bool, stored: Stored | None) -> None:
        """`stored`: description of a quantized checkpoint; None = plain weights, which are quantized as they load."""
        super().__init__(None if stored is None else records_of(stored))
        self.fast_accum = fast_accum

    def quantize(self, weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows(weight_OI)


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
