"""Matrices in the layouts of published integer checkpoints, for tests. Shapes: O outputs, I inputs, G groups."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dovetail.core.layouts.words import AWQ_4, pack_words
from dovetail.core.ops.weight_formats import NF4_VALUES
from dovetail.plugins.quant.int4.quantizer import FORMATS
from dovetail.plugins.quant.int4.rounding import round_to_nearest
from dovetail.plugins.quant.nf4.quantizer import round_to_nf4

STATE = "weight.quant_state.bitsandbytes__nf4"


def pack_quantized(**weights: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@dataclass(frozen=True)
class Rounded:
    """Codes uint8 [O, I], scale float32 [O, G], zero uint8 [O, G], group of each input int32 [I]."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    group: torch.Tensor

    def weight(self) -> torch.Tensor:
        return (self.codes.float() - self.zero.float()[:, self.group]) * self.scale[:, self.group]


def rounded(weight_OI: torch.Tensor, bits: int, group: int, zeros: bool, act_order: bool = False) -> Rounded:
    """Round to nearest. With act_order, groups are scattered over the inputs, alike for all matrices of a width."""
    inputs = weight_OI.shape[1]
    order = torch.arange(inputs)
    if act_order:
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    codes, scale, zero = round_to_nearest(weight_OI.float()[:, order], group, FORMATS[bits, zeros], torch.float32)
    if zero is None:
        zero = torch.full_like(scale, 2 ** (bits - 1)).to(torch.uint8)
    back, groups = order.argsort(), torch.arange(inputs) // (group or inputs)
    return Rounded(codes[:, back], scale, zero, groups[back].int())


def compressed_tensors(m: Rounded, bits: int, zeros: bool, act_order: bool = False) -> dict[str, torch.Tensor]:
    each = 32 // bits
    stored = {
        "weight_packed": pack_words(F.pad(m.codes, (0, -m.codes.shape[1] % each)), bits, 1),
        "weight_scale": m.scale,
        "weight_shape": torch.tensor(m.codes.shape),
    }
    if zeros:
        stored["weight_zero_point"] = pack_words(F.pad(m.zero, (0, 0, 0, -len(m.zero) % each)), bits, 0)
    if act_order:
        stored["weight_g_idx"] = m.group
    return stored


def awq(m: Rounded) -> dict[str, torch.Tensor]:
    codes, zero = (F.pad(x, (0, 0, 0, -len(x) % 8)).t() for x in (m.codes, m.zero))
    packed = {"qweight": pack_words(codes, 4, 1, AWQ_4), "qzeros": pack_words(zero, 4, 1, AWQ_4)}
    return {**packed, "scales": m.scale.t().contiguous()}


def gptq(m: Rounded, bits: int = 4, offset: int = 1) -> dict[str, torch.Tensor]:
    """`offset`: subtracted from zeros, as version 1 does."""
    each = 32 // bits
    zero = F.pad(m.zero.int() - offset, (0, 0, 0, -len(m.zero) % each)).clamp(min=0)
    return {
        "qweight": pack_words(F.pad(m.codes, (0, -m.codes.shape[1] % each)).t(), bits, 0),
        "qzeros": pack_words(zero.t(), bits, 1),
        "scales": m.scale.t().contiguous(),
        "g_idx": m.group,
        "bias": torch.zeros(len(m.codes)),
    }


def bitsandbytes(weight_OI: torch.Tensor, nested: bool) -> dict[str, torch.Tensor]:
    """Return a matrix in NF4 as bitsandbytes stores it. `nested`: scales are quantized, too."""
    # Blocks follow each other over the ends of rows.
    codes, scale = round_to_nf4(weight_OI.reshape(1, -1), 64)
    flat, scales = codes.flatten(), scale.flatten()
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight_OI.shape)}
    tensors = {"weight": (flat[::2] << 4 | flat[1::2])[:, None], "weight.quant_map": torch.tensor(NF4_VALUES)}
    if nested:
        offset = float(scales.mean())
        blocks = F.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
        absmax, levels = blocks.abs().amax(1), torch.linspace(-1, 1, 256)
        nearest = (blocks / absmax[:, None].clamp(min=1e-9)).flatten()[: len(scales)]
        tensors |= {"weight.nested_absmax": absmax, "weight.nested_quant_map": levels}
        scales = ((nearest + 1) * 127.5).round().to(torch.uint8)
        state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
    encoded = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {**tensors, "weight.absmax": scales, STATE: encoded}
