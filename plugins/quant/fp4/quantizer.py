"""quant=fp4: E2M1 weights with a scale for each block of inputs, from published checkpoints or from plain weights.

NVFP4 has blocks of 16 inputs, whose E4M3 scales are relative to one scale of the matrix. MXFP4 (Open Compute Project,
Microscaling Formats 1.0) has blocks of 32 inputs, whose scales are powers of two. Input scales of a checkpoint are not
used: inputs keep the model's dtype, or have a scale per token in E4M3.

Shapes: T tokens, I input, O output, G blocks of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from dovetail.core.errors import TensorError
from dovetail.core.interfaces import PLAIN, ActFormat, Checkpoint, LinearMethod, LinearShape
from dovetail.core.interfaces.tensor_record import OUTPUTS, Axis, TensorRecord
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.layouts.words import unpack_nibbles
from dovetail.core.ops.weight_formats import E2M1
from dovetail.plugins.quant.base import StoredOrRounded
from dovetail.plugins.quant.config import FP4Config
from dovetail.plugins.quant.fp4.checkpoint import Stored, read_stored
from dovetail.plugins.quant.fp4.checkpoint import stored as measure
from dovetail.plugins.quant.fp8.format import E4M3, FP8_TOKEN, LARGEST, decode_e8m0
from dovetail.plugins.quant.fp8.quantizer import fp8_head

LARGEST_CODE = 6.0
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between adjacent magnitudes of E2M1."""


class FP4(StoredOrRounded[Stored]):
    config: FP4Config
    measure = staticmethod(measure)

    def parse(self, checkpoint: Checkpoint) -> Stored | None:
        return read_stored(checkpoint.config())

    def rounded(self, path: str, shape: LinearShape) -> LinearMethod:
        return RoundedFP4(self.config.block, self._activations)

    def of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        return StoredFP4(stored, self._activations)

    @property
    def _activations(self) -> ActFormat:
        return FP8_TOKEN if self.config.activations == "fp8" else PLAIN

    def rounded_head(self, path: str, shape: LinearShape) -> LinearMethod | None:
        return fp8_head(self.config.head, path, shape)

    def table_of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        return StoredFP4(stored, PLAIN)


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


def round_to_fp4(
    weight_OI: torch.Tensor, block: int, *, nvfp4: bool
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor | None]:
    """Return (codes uint8 [O, I], scale_OG, no zeros, scale of each row float32 [O] for NVFP4) of a float32 matrix."""
    inputs = weight_OI.shape[1]
    blocks_OGK = F.pad(weight_OI, (0, -inputs % block)).unflatten(1, (-1, block))
    amax_OG = blocks_OGK.abs().amax(-1)
    row_scale_O = None
    if nvfp4:
        whole = (amax_OG.max() / (LARGEST * LARGEST_CODE)).clamp(min=torch.finfo(torch.float32).tiny)
        # The least positive scale, for blocks of zeros.
        stored_OG = (amax_OG / LARGEST_CODE / whole).clamp(2**-9, LARGEST).to(E4M3)
        row_scale_O, scale_OG = whole.expand(len(weight_OI)), stored_OG.float() * whole
    else:
        exponent_OG = amax_OG.clamp(min=2.0**-120).log2().floor() - 2
        stored_OG = scale_OG = torch.exp2(exponent_OG)
    values_OGK = blocks_OGK / scale_OG.unsqueeze(-1)
    codes = torch.bucketize(values_OGK.abs(), torch.tensor(BOUNDS, device=weight_OI.device))
    codes = codes + 8 * (values_OGK < 0)
    return codes.flatten(1)[:, :inputs].to(torch.uint8), stored_OG, None, row_scale_O


class StoredFP4(FP4Linear):
    """Codes of the checkpoint."""

    def __init__(self, stored: Stored, activations: ActFormat) -> None:
        super().__init__(stored.block, activations)
        self.is_modelopt = stored.layout == "modelopt"
        one = (Axis("nothing"),)
        codes, whole = ("weight", "weight_scale_2") if self.is_modelopt else ("weight_packed", "weight_global_scale")
        self.names = codes, whole
        records = [
            TensorRecord(codes, (OUTPUTS, Axis("inputs", packed=2)), (torch.uint8,), unpack=unpack_nibbles),
            TensorRecord(
                "weight_scale", (OUTPUTS, Axis("inputs", stored.block)), (E4M3 if self.row_scale else torch.uint8,)
            ),
            TensorRecord("input_scale" if self.is_modelopt else "input_global_scale", one, optional=True),
        ]
        if self.row_scale:
            records.append(TensorRecord(whole, one))
        self.tensors = tuple(records)

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        codes, whole = self.names
        scale_OG, row_scale_O = tensors["weight_scale"], None
        if self.row_scale:
            factor = tensors[whole].float().flatten()
            if not (factor.isfinite() & (factor > 0)).all():
                raise TensorError(whole, f"must be a positive number; it is {factor.item():g}")
            row_scale_O = (factor if self.is_modelopt else 1 / factor).expand(part.stop - part.start)
            scale_OG = scale_OG.view(torch.uint8)
            scale_OG = self.shape.spread_groups(scale_OG, self.group).view(E4M3)
        else:
            scale_OG = decode_e8m0("weight_scale", self.shape.spread_groups(scale_OG, self.group))
        self.store(params, part, tensors[codes], scale_OG, None, row_scale_O)
