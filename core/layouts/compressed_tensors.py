"""The layout "pack-quantized" of compressed-tensors. Shapes: O outputs, I inputs, G groups of inputs, W words.

Codes are unsigned: code - zero is the integer that a scale multiplies, and zero is 2**(bits - 1) in symmetric formats.
Inputs of a row follow each other in words; zero points do so along outputs. Codes of 0 fill the last word.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from dovetail.core.layouts.words import pack_words, unpack_words


def pack(
    codes_OI: torch.Tensor, scale_OG: torch.Tensor, zero_OG: torch.Tensor | None, bits: int
) -> dict[str, torch.Tensor]:
    """Return weight_packed int32 [O, W], weight_scale [O, G], weight_shape int64 [2] and, unless `zero_OG` is None,
    weight_zero_point int32 [W, G]. Codes and zeros are uint8."""
    each = 32 // bits
    tensors = {
        "weight_packed": pack_words(F.pad(codes_OI, (0, -codes_OI.shape[1] % each)), bits, axis=1),
        "weight_scale": scale_OG,
        "weight_shape": torch.tensor(codes_OI.shape),
    }
    if zero_OG is not None:
        filled_OG = F.pad(zero_OG, (0, 0, 0, -len(zero_OG) % each))
        tensors["weight_zero_point"] = pack_words(filled_OG, bits, axis=0).contiguous()
    return tensors


def unpack(tensors: Mapping[str, torch.Tensor], bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (codes uint8 [O, I], scale_OG, zero uint8 [O, G] or None): the inverse of `pack`."""
    outputs, inputs = tensors["weight_shape"].tolist()
    codes_OI = unpack_words(tensors["weight_packed"], bits, axis=1)[:, :inputs]
    words = tensors.get("weight_zero_point")
    zero_OG = None if words is None else unpack_words(words, bits, axis=0)[:outputs]
    return codes_OI, tensors["weight_scale"], zero_OG
