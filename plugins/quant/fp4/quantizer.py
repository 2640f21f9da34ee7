"""quant=fp4: E2M1 weights with a scale for each block of inputs, from published checkpoints or from plain weights.

NVFP4 has blocks of 16 inputs, whose E4M3 scales are relative to one scale of the matrix. MXFP4 (Open Compute Project,
Microscaling Formats 1.0) has blocks of 32 inputs, whose scales are powers of two. Input scales of a checkpoint are not
used: inputs keep the model's dtype, or have a scale per token in E4M3, as for checkpoints with inputs of 8 bits.

Shapes: T tokens, I input, O output, G blocks of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dovetail.core.errors import TensorError
from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    Checkpoint,
    ExpertMethod,
    ExpertShape,
    LinearMethod,
    LinearShape,
)
from dovetail.core.interfaces.tensor_record import OUTPUTS, Axis, TensorRecord
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.layers.plain import PlainLinear
from dovetail.core.layouts.words import unpack_nibbles
from dovetail.core.ops.weight_formats import E2M1
from dovetail.plugins.quant.base import StoredOrRounded, input_format, note_inputs
from dovetail.plugins.quant.config import FP4Config
from dovetail.plugins.quant.fp4.checkpoint import MXFP4, Stored, read_stored
from dovetail.plugins.quant.fp4.checkpoint import stored as measure
from dovetail.plugins.quant.fp4.experts import MXFP4Experts, StoredMXFP4Experts, fits
from dovetail.plugins.quant.fp4.rounding import round_to_fp4
from dovetail.plugins.quant.fp8.format import E4M3, decode_e8m0
from dovetail.plugins.quant.fp8.quantizer import fp8_head


class FP4(StoredOrRounded[Stored]):
    config: FP4Config
    measure = staticmethod(measure)

    def parse(self, checkpoint: Checkpoint) -> Stored | None:
        stored = read_stored(checkpoint.config())
        if stored is not None:
            note_inputs("fp4", self.config.activations, stored.inputs)
        return stored

    def rounded(self, path: str, shape: LinearShape) -> LinearMethod:
        if self._leaves_plain(path):
            return PlainLinear()
        return RoundedFP4(self.config.block, self._activations)

    def _leaves_plain(self, path: str) -> bool:
        """Whether the option `layers` leaves a matrix plain. Shared experts are no routed ones."""
        return self.config.layers == "experts" and ".experts." not in path

    def _plain(self, path: str, shape: ExpertShape, expert: int) -> bool | None:
        if self.stored is None and self._leaves_plain(f"{shape.path_of(path, expert)}."):
            return True
        return super()._plain(path, shape, expert)

    def of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        return StoredFP4(stored, self._activations)

    def quantized_experts(self, path: str, shape: ExpertShape) -> ExpertMethod | None:
        block = self.config.block if self.stored is None else self.stored.block
        # Blocks of NVFP4, and parts of blocks, have products of single matrices only.
        if block != MXFP4 or not fits(shape):
            return None
        return (
            MXFP4Experts(self._activations)
            if self.stored is None
            else StoredMXFP4Experts(self.stored, self._activations)
        )

    @property
    def _activations(self) -> ActFormat:
        return input_format("fp4", self.config.activations, None if self.stored is None else self.stored.inputs)

    def rounded_head(self, path: str, shape: LinearShape) -> LinearMethod | None:
        return fp8_head(self.config.head, path, shape)

    def table_of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        return StoredFP4(stored, PLAIN)


LARGEST = 0x7E
"""Bits of the largest number in E4M3."""


class FP4Linear(PackedLinear):
    def __init__(self, block: int, activations: ActFormat) -> None:
        # Powers of two are exact in bfloat16.
        scales = E4M3 if block == 16 else torch.bfloat16
        super().__init__(E2M1, block, activations=activations, scale_dtype=scales, row_scale=block == 16)


class RoundedFP4(FP4Linear):
    """Weights of a plain checkpoint, rounded to nearest as they load."""

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        weight_OI = tensors["weight"].to(params["codes"].device).float()
        self.store(params, part, *round_to_fp4(weight_OI, self.step, nvfp4=self.row_scale))


class StoredFP4(FP4Linear):
    """Codes of the checkpoint."""

    def __init__(self, stored: Stored, activations: ActFormat) -> None:
        super().__init__(stored.block, activations)
        self.names = names = stored.names
        one = (Axis("nothing"),)
        records = [
            TensorRecord(names.codes, (OUTPUTS, Axis("inputs", packed=2)), (torch.uint8,), unpack=unpack_nibbles),
            TensorRecord(
                names.scale, (OUTPUTS, Axis("inputs", stored.block)), (E4M3 if self.row_scale else torch.uint8,)
            ),
            TensorRecord(names.input, one, optional=True),
        ]
        if self.row_scale:
            records.append(TensorRecord(names.whole, one))
        self.tensors = tuple(records)

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        names = self.names
        scale_OG, row_scale_O = tensors[names.scale], None
        if self.row_scale:
            factor = tensors[names.whole].float().flatten()
            if not (factor.isfinite() & (factor > 0)).all():
                raise TensorError(names.whole, f"must be a positive number; it is {factor.item():g}")
            row_scale_O = (1 / factor if names.divides else factor).expand(part.stop - part.start)
            scale_OG = scale_OG.view(torch.uint8)
            if (scale_OG > LARGEST).any():  # Hopper's kernel decodes neither.
                raise TensorError(names.scale, "has scales that are negative or not numbers")
            scale_OG = self.shape.spread_groups(scale_OG, self.group).view(E4M3)
        else:
            scale_OG = decode_e8m0(names.scale, self.shape.spread_groups(scale_OG, self.group))
        self.store(params, part, tensors[names.codes], scale_OG, None, row_scale_O)
