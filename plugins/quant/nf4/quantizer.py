"""quant=nf4: weights in NF4 (Dettmers et al. 2023, QLoRA) or FP4, from checkpoints of bitsandbytes, also with double
quantization, or in NF4 from plain weights as they load. The library is not needed.

Shapes: T tokens, I input, O output, G groups of a row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import CapabilityError, TensorError, shown
from dovetail.core.interfaces import PLAIN, ActFormat, Checkpoint, LinearMethod, LinearShape
from dovetail.core.interfaces.tensor_record import OUTPUTS, Axis, TensorRecord
from dovetail.core.interfaces.weight import WeightFormat
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.ops.weight_formats import BITSANDBYTES_FP4, BITSANDBYTES_FP4_VALUES, NF4, NF4_VALUES
from dovetail.plugins.quant.base import StoredOrRounded
from dovetail.plugins.quant.config import NF4Config
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.fp8.quantizer import fp8_head
from dovetail.plugins.quant.nf4.checkpoint import Stored, read_stored
from dovetail.plugins.quant.nf4.checkpoint import stored as measure

BLOCK = 64
"""Weights that share a scale. In a checkpoint they follow each other over the ends of rows."""
LEAST_STEP = 16
"""Least inputs of a row with one scale."""
STATE = "weight.quant_state.bitsandbytes__"
"""Name, before the kind, of a tensor of bytes that hold JSON."""
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
        step = gcd(BLOCK, shape.whole_inp)
        if step < LEAST_STEP:
            raise CapabilityError(
                [
                    f"quant=nf4: {path} has {shape.whole_inp} inputs, of which blocks of {BLOCK} weights cut rows into "
                    f"pieces of {step}, and {LEAST_STEP} is the least. Would work: quant=int4 or quant=fp4, on a "
                    "checkpoint of theirs or a plain one"
                ]
            )
        return StoredNF4(stored, activations, step)

    @property
    def _activations(self) -> ActFormat:
        return FP8_TOKEN if self.config.activations == "fp8" else PLAIN


class RoundedNF4(PackedLinear):
    """Weights of a plain checkpoint: the nearest value of each block, relative to its largest magnitude."""

    def __init__(self, activations: ActFormat) -> None:
        super().__init__(NF4, BLOCK, activations=activations, scale_dtype=torch.float32)

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


@dataclass(frozen=True, slots=True)
class Kind:
    """A format of bitsandbytes."""

    format: WeightFormat
    values: tuple[float, ...]
    """Values of the codes."""
    largest: float = 1.0
    """Value that stands for the largest magnitude of a block."""


KINDS = {"nf4": Kind(NF4, NF4_VALUES), "fp4": Kind(BITSANDBYTES_FP4, BITSANDBYTES_FP4_VALUES, 12.0)}


class StoredNF4(PackedLinear):
    """Codes of the checkpoint, in NF4 or FP4."""

    def __init__(self, stored: Stored, activations: ActFormat, step: int = BLOCK) -> None:
        """`step`: inputs of a row that surely share a scale. Where blocks span rows, each scale is stored for every
        step of its block."""
        self.kind = KINDS[stored.kind]
        super().__init__(self.kind.format, step, activations=activations, scale_dtype=torch.float32)
        nested = ("weight.nested_absmax", "weight.nested_quant_map") if stored.nested else ()
        state = f"{STATE}{stored.kind}"
        self.tensors = (
            TensorRecord(
                "codes",
                dtypes=(torch.uint8,),
                sources=("weight", "weight.quant_map", state),
                combine=partial(_codes, kind=stored.kind),
                check=partial(_check_codes, kind=stored.kind),
            ),
            TensorRecord(
                "scale",
                (OUTPUTS, Axis("inputs", step)),
                (torch.float32,),
                sources=("weight.absmax", *nested, state),
                combine=partial(_scales, kind=stored.kind, step=step),
                check=_check_scales,
            ),
        )

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        scale_OG = self.shape.spread_groups(tensors["scale"], self.group) / self.kind.largest
        self.store(params, part, tensors["codes"], scale_OG)


def _check_codes(tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int, kind: str) -> None:
    packed, values = tensors["weight"], tensors["weight.quant_map"]
    if packed.dtype is not torch.uint8 or packed.numel() * 2 != outputs * inputs:
        raise TensorError(
            "weight",
            f"has {packed.numel()} entries of {packed.dtype}; {outputs} x {inputs} weights of 4 bits are "
            f"{outputs * inputs // 2} bytes",
        )
    if values.numel() != len(NF4_VALUES) or not values.is_floating_point():
        raise TensorError("weight.quant_map", f"has {values.numel()} entries of {values.dtype}, not {len(NF4_VALUES)}")
    name = f"{STATE}{kind}"
    text = tensors[name]
    if text.dtype is not torch.uint8 or text.numel() > LONGEST_STATE:
        raise TensorError(name, f"must be at most {LONGEST_STATE} bytes; it has {text.numel()} of {text.dtype}")


def _codes(tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int, kind: str) -> torch.Tensor:
    """The first of two codes is in the upper bits of a byte."""
    _state(tensors, outputs, inputs, kind)
    found = tensors["weight.quant_map"].float().cpu().flatten()
    if not torch.equal(found, torch.tensor(KINDS[kind].values) / KINDS[kind].largest):
        raise TensorError("weight.quant_map", f"has other values than {kind.upper()}: {shown(found.tolist())}")
    packed = tensors["weight"].flatten()
    return torch.stack((packed >> 4, packed & 15), -1).view(outputs, inputs)


def _check_scales(tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int) -> None:
    scales = tensors["weight.absmax"]
    nested = "weight.nested_absmax" in tensors
    wanted = torch.uint8 if nested else torch.float32
    if scales.numel() != ceil_div(outputs * inputs, BLOCK):
        raise TensorError("weight.absmax", f"has {scales.numel()} entries, not one per {BLOCK} weights")
    if scales.dtype is not wanted:
        raise TensorError("weight.absmax", f"is {scales.dtype}; it must be {wanted}")
    if nested and tensors["weight.nested_quant_map"].numel() != LEVELS:
        raise TensorError(
            "weight.nested_quant_map", f"has {tensors['weight.nested_quant_map'].numel()} entries, not {LEVELS}"
        )


def _scales(tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int, kind: str, step: int) -> torch.Tensor:
    state = _state(tensors, outputs, inputs, kind)
    scales = tensors["weight.absmax"].flatten()
    if "weight.nested_absmax" in tensors:
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if type(size) is not int or size < 1 or type(offset) not in (float, int):
            raise TensorError(f"{STATE}{kind}", f"has nested_blocksize {shown(size)}, nested_offset {shown(offset)}")
        each, levels = tensors["weight.nested_absmax"].flatten(), tensors["weight.nested_quant_map"].flatten()
        if len(each) != ceil_div(len(scales), size):
            raise TensorError(
                "weight.nested_absmax", f"has {len(each)} entries, not one per {size} of {len(scales)} scales"
            )
        blocks = torch.arange(len(scales), device=scales.device) // size
        scales = levels.float()[scales.long()] * each.float()[blocks] + offset
    if not scales.isfinite().all():
        raise TensorError("weight.absmax", "has values that are not finite")
    steps = torch.arange(0, outputs * inputs, step, device=scales.device)
    return scales.float()[steps // BLOCK].view(outputs, inputs // step)


def _state(tensors: Mapping[str, torch.Tensor], outputs: int, inputs: int, kind: str) -> Mapping[str, Any]:
    """Return the JSON that bitsandbytes stores with each matrix."""
    name = f"{STATE}{kind}"
    try:
        state = json.loads(bytes(tensors[name].flatten().tolist()))
    except (ValueError, RecursionError) as error:
        raise TensorError(name, f"is not JSON ({shown(error)})") from None
    wanted = {"quant_type": kind, "blocksize": BLOCK, "shape": [outputs, inputs]}
    for key, value in wanted.items():
        if not isinstance(state, dict) or state.get(key) != value:
            found = state.get(key) if isinstance(state, dict) else state
            raise TensorError(name, f"has {key} {shown(found)}; it must be {value}")
    return state
