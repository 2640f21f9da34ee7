"""quant=gguf: blocks of GGUF files, mixed in a file as its maker chose. Logits and embedding are in blocks, too. Random
weights get the types of a usual mixture.

Shapes: T tokens, I input, O output, G groups of a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby

import torch

from dovetail.core.errors import ConfigError, TensorError, shown
from dovetail.core.interfaces import PLAIN, ActFormat, Checkpoint, LinearMethod, LinearShape, Quantizer
from dovetail.core.interfaces.tensor_record import OUTPUTS, PLAIN_WEIGHT, Axis, TensorRecord
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.layers.plain import PlainLinear
from dovetail.core.layers.stacked import StackedLinear
from dovetail.core.ops.weight_formats import INT4, INT6, INT8, UINT4, UINT8
from dovetail.plugins.quant.base import with_many_rows
from dovetail.plugins.quant.config import GGUFConfig
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.gguf.blocks import FORMATS, decode_blocks
from dovetail.plugins.quant.gguf.checkpoint import MIXES
from dovetail.plugins.quant.int4.rounding import round_to_nearest

PACKED = {"Q4_0": INT4, "Q8_0": INT8, "Q4_K": UINT4, "Q5_K": UINT8, "Q6_K": INT6}
"""GGUF type -> format of its codes. Those with zeros have minimums."""
WIDER = re.compile(r"\.(\d*[02468])\..*\b(v_proj|down_proj)$")
"""Names of the matrices with the second type: those of every other layer."""


class GGUF(Quantizer):
    config: GGUFConfig

    def __init__(self, config: GGUFConfig) -> None:
        super().__init__(config)
        self.types: dict[str, str] | None = None
        """Type by name of a matrix; None = weights are random."""

    def read_checkpoint(self, checkpoint: Checkpoint) -> None:
        stored = checkpoint.config().get("quantization_config")
        if stored is not None and stored.get("quant_method") != "gguf":
            super().read_checkpoint(checkpoint)
        if stored is None:
            raise ConfigError(
                f"{shown(checkpoint.path)}: quant=gguf reads weights in blocks of GGUF files, and these are plain. Set "
                "quant=none, or quant=int4 or another format that is made of plain weights"
            )
        for name, header in checkpoint.tensors().items():
            if header.blocks and header.blocks not in FORMATS:
                raise TensorError(name, f"is in {header.blocks}; quant=gguf reads {', '.join(FORMATS)}")
        self.types = {name.removesuffix(".weight"): header.blocks for name, header in checkpoint.tensors().items()}

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        types = [self._type(name, shape) for name in shape.names]
        # A plain part of a merged layer needs plain inputs.
        activations = FP8_TOKEN if self.config.activations == "fp8" and all(types) else PLAIN
        runs = [(kind, len(list(parts))) for kind, parts in groupby(types)]
        methods = [(with_many_rows(self._method(kind, shape, activations), self.config), count) for kind, count in runs]
        return methods[0][0] if len(methods) == 1 else StackedLinear(path, shape, methods)

    def table(self, path: str, shape: LinearShape, *, lookup: bool) -> LinearMethod | None:
        kind = self._type(shape.names[0], shape)
        return self._method(kind, shape, PLAIN) if kind else None

    def _method(self, kind: str, shape: LinearShape, activations: ActFormat) -> LinearMethod:
        if not kind:
            return PlainLinear()
        return (RandomBlocks if self.types is None else BlockLinear)(kind, shape, activations)

    def _type(self, name: str, shape: LinearShape) -> str:
        """Return the type of a matrix; "" = it is plain."""
        return self.type_of(name, shape.whole_inp) if self.types is None else self.types.get(name, "")

    def type_of(self, name: str, inputs: int) -> str:
        """Return the type of a matrix in the mixture `mix`; "" = it is plain."""
        most, wider, head = MIXES[self.config.mix]
        kind = wider if WIDER.search(name) else head if name.endswith("lm_head") else most
        # Rows that are no whole blocks of 256 are in smaller ones in files, too.
        return next((one for one in (kind, "Q8_0") if inputs % FORMATS[one].values == 0), "")


class BlockLinear(PackedLinear):
    """Blocks of one GGUF type, repacked."""

    def __init__(self, kind: str, shape: LinearShape, activations: ActFormat) -> None:
        # float16 holds a scale of 16 bits times one of 6 bits to 11 bits.
        dtype = torch.float32 if shape.dtype is torch.float32 else torch.float16
        block = FORMATS[kind]
        super().__init__(PACKED[kind], block.group, activations=activations, scale_dtype=dtype, zero_dtype=dtype)
        self.kind, self.block = kind, block
        self.tensors = (
            TensorRecord("weight", (OUTPUTS, Axis("inputs", block.values, entries=block.size)), (torch.uint8,)),
        )

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        codes = decode_blocks(self.kind, tensors["weight"].to(params["codes"].device))
        if not codes.scales_RG.isfinite().all():
            raise TensorError("weight", "has scales that are not finite")
        # The blocks that hold this rank's columns begin before these.
        before = self.shape.first_inp % self.block.values
        codes_OI = codes.codes_RC[:, before : before + self.shape.inp]
        first, last = before // self.group, -(-(before + self.shape.inp) // self.group)
        scale_OG, zero_OG = codes.scales_RG[:, first:last], None
        if codes.minimums_RG is not None:
            minimum_OG, largest = codes.minimums_RG[:, first:last], torch.finfo(self.zero_dtype).max
            codes_OI, scale_OG, zero_OG = _with_zeros(codes_OI, scale_OG, minimum_OG, self.group, largest)
        spread = self.shape.spread_groups
        self.store(
            params,
            part,
            codes_OI,
            spread(scale_OG, self.group),
            None if zero_OG is None else spread(zero_OG, self.group),
        )


class RandomBlocks(BlockLinear):
    """Random weights in the codes and groups of a GGUF type, to the nearest. Their scales have no scales of their
    own."""

    def __init__(self, kind: str, shape: LinearShape, activations: ActFormat) -> None:
        super().__init__(kind, shape, activations)
        self.tensors = (PLAIN_WEIGHT,)

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        weight_OI = tensors["weight"].to(params["codes"].device).float()
        self.store(params, part, *round_to_nearest(weight_OI, self.step, self.format, params["scale"].dtype))


def _with_zeros(
    codes_OI: torch.Tensor, scale_OG: torch.Tensor, minimum_OG: torch.Tensor, group: int, largest: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales and zeros with scale * (code - zero) = scale * code - minimum. In a group with scale 0,
    whose values are all -minimum, codes are 0, zero is 1 and the scale is the minimum. So they are where zero would
    exceed `largest`, since values then differ from -minimum by less than their dtype resolves."""
    constant_OG = (scale_OG == 0) | (minimum_OG.abs() > largest * scale_OG.abs())
    zero_OG = torch.where(constant_OG, 1.0, minimum_OG / scale_OG)
    if constant_OG.any():
        inside = constant_OG.repeat_interleave(group, 1)[:, : codes_OI.shape[1]]
        codes_OI = codes_OI.masked_fill(inside, 0)
    return codes_OI, torch.where(constant_OG, minimum_OG, scale_OG), zero_OG
