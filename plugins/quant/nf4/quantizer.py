"""quant=nf4: weights in NF4 (Dettmers et al. 2023, QLoRA), from checkpoints of bitsandbytes, also with double
quantization, or from plain weights as they load. The library is not needed.

Shapes: T tokens, I input, O output, G groups of a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import CapabilityError, TensorError, shown
from dovetail.core.interfaces import PLAIN, ActFormat, Checkpoint, LinearMethod, LinearShape
from dovetail.core.interfaces.tensor_record import OUTPUTS, Axis, TensorRecord
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.ops.weight_formats import NF4, NF4_VALUES
from dovetail.plugins.quant.base import StoredOrRounded
from dovetail.plugins.quant.config import NF4Config
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.fp8.quantizer import fp8_head
from dovetail.plugins.quant.nf4.checkpoint import Stored, read_stored
from dovetail.plugins.quant.nf4.checkpoint import stored as measure

BLOCK = 64
"""Weights that share a scale."""
STATE = "weight.quant_state.bitsandbytes__nf4"
"""JSON in a tensor of bytes."""
LONGEST_STATE = 1 << 16
LEVELS = 256
"""Values of quantized scales."""


class NF4Quantizer(StoredOrRounded[Stored]):
    config: NF4Config
    measure = staticmethod(measure)

    def parse(self, checkpoint: Checkpoint) -> Stored | None:
        return read_stored(checkpoint.config())

    def rounded(self, path: str, shape: LinearShape) -> LinearMethod:
        return RoundedNF4(self._activations)

    def of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        return self._stored(path, shape, stored, self._activations)

    def rounded_head(self, path: str, shape: LinearShape) -> LinearMethod | None:
        return fp8_head(self.config.head, path, shape)

    def table_of_checkpoint(self, path: str, shape: LinearShape, stored: Stored) -> LinearMethod:
        return self._stored(path, shape, stored, PLAIN)

    def _stored(self, path: str, shape: LinearShape, stored: Stored, activations: ActFormat) -> LinearMethod:
        if shape.whole_inp % BLOCK:
            raise CapabilityError(
                [f"quant=nf4: {path} has {shape.whole_inp} inputs, so that blocks of {BLOCK} weights span rows"]
            )
        return StoredNF4(stored, activations)

    @property
    def _activations(self) -> ActFormat:
        return FP8_TOKEN if self.config.activations == "fp8" else PLAIN


class NF4Linear(PackedLinear):
    def __init__(self, activations: ActFormat) -> None:
        super().__init__(NF4, BLOCK, activations=activations, scale_dtype=torch.float32)


class RoundedNF4(NF4Linear):
    """Weights of a plain checkpoint: the nearest value of each block, relative to its largest magnitude."""

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        weight_OI = tensors["weight"].to(params["codes"].device).float()
        self.store(params, part, *round_to_nf4(weight_OI, self.step))


def round_to_nf4(weight_OI: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes uint8 [O, I], scale_OG float32) of a float32 matrix."""
    inputs = weight_OI.shape[1]
    blocks_OGK = F.pad(weight_OI, (0, -inputs % block)).unflatten(1, (-1, block))
    scale_OG = blocks_OGK.abs().amax(-1)
    values = torch.tensor(NF4_VALUES, device=weight_OI.device)
    bounds = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(blocks_OGK / scale_OG.clamp(min=1e-30).unsqueeze(-1), bounds)
    return codes.flatten(1)[:, :inputs].to(torch.uint8), scale_OG


class StoredNF4(NF4Linear):
    """Codes of the checkpoint."""

    def __init__(self, stored: Stored, activations: ActFormat) -> None:
        super().__init__(activations)
        nested = ("weight.nested_absmax", "weight.nested_quant_map") if stored.nested else ()
        self.tensors = (
            TensorRecord(
                "codes",
                dtypes=(torch.uint8,),
                sources=("weight", "weight.quant_map", STATE),
                combine=_codes,
                check=_check_codes,
            ),
            TensorRecord(
                "scale",
                (OUTPUTS, Axis("inputs", BLOCK)),
                (torch.float32,),
                sources=("weight.absmax", *nested, STATE),
                combine=_scales,
                check=_check_scales,
            ),
        )

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        self.store(params, part, tensors["codes"], self.shape.spread_groups(tensors["scale"], self.group))


def _check_codes(tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> None:
    packed, values = tensors["weight"], tensors["weight.quant_map"]
    if packed.dtype is not torch.uint8 or packed.numel() * 2 != outputs * inputs:
        raise TensorError(
            "weight",
            f"has {packed.numel()} entries of {packed.dtype}; {outputs} x {inputs} weights of 4 bits are "
            f"{outputs * inputs // 2} bytes",
        )
    if values.numel() != len(NF4_VALUES) or not values.is_floating_point():
        raise TensorError("weight.quant_map", f"has {values.numel()} entries of {values.dtype}, not {len(NF4_VALUES)}")
    text = tensors[STATE]
    if text.dtype is not torch.uint8 or text.numel() > LONGEST_STATE:
        raise TensorError(STATE, f"must be at most {LONGEST_STATE} bytes; it has {text.numel()} of {text.dtype}")


def _codes(tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> torch.Tensor:
    """The first of two codes is in the upper bits of a byte."""
    _state(tensors, outputs, inputs)
    found = tensors["weight.quant_map"].float().cpu().flatten()
    if not torch.equal(found, torch.tensor(NF4_VALUES)):
        raise TensorError("weight.quant_map", f"has other values than NF4: {shown(found.tolist())}")
    packed = tensors["weight"].flatten()
    return torch.stack((packed >> 4, packed & 15), -1).view(outputs, inputs)


def _check_scales(tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> None:
    scales = tensors["weight.absmax"]
    nested = "weight.nested_absmax" in tensors
    wanted = torch.uint8 if nested else torch.float32
    if scales.numel() * BLOCK != outputs * inputs:
        raise TensorError("weight.absmax", f"has {scales.numel()} entries, not one per {BLOCK} weights")
    if scales.dtype is not wanted:
        raise TensorError("weight.absmax", f"is {scales.dtype}; it must be {wanted}")
    if nested and tensors["weight.nested_quant_map"].numel() != LEVELS:
        raise TensorError(
            "weight.nested_quant_map", f"has {tensors['weight.nested_quant_map'].numel()} entries, not {LEVELS}"
        )


def _scales(tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> torch.Tensor:
    state = _state(tensors, outputs, inputs)
    scales = tensors["weight.absmax"].flatten()
    if "weight.nested_absmax" in tensors:
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if type(size) is not int or size < 1 or type(offset) not in (float, int):
            raise TensorError(STATE, f"has nested_blocksize {shown(size)}, nested_offset {shown(offset)}")
        each, levels = tensors["weight.nested_absmax"].flatten(), tensors["weight.nested_quant_map"].flatten()
        if len(each) != ceil_div(len(scales), size):
            raise TensorError(
                "weight.nested_absmax", f"has {len(each)} entries, not one per {size} of {len(scales)} scales"
            )
        blocks = torch.arange(len(scales), device=scales.device) // size
        scales = levels.float()[scales.long()] * each.float()[blocks] + offset
    if not scales.isfinite().all():
        raise TensorError("weight.absmax", "has values that are not finite")
    return scales.float().view(outputs, inputs // BLOCK)


def _state(tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> Mapping[str, Any]:
    """Return the JSON that bitsandbytes stores with each matrix."""
    try:
        state = json.loads(bytes(tensors[STATE].flatten().tolist()))
    except (ValueError, RecursionError) as error:
        raise TensorError(STATE, f"is not JSON ({shown(error)})") from None
    wanted = {"quant_type": "nf4", "blocksize": BLOCK, "shape": [outputs, inputs]}
    for key, value in wanted.items():
        if not isinstance(state, dict) or state.get(key) != value:
            found = state.get(key) if isinstance(state, dict) else state
            raise TensorError(STATE, f"has {key} {shown(found)}; it must be {value}")
    return state
