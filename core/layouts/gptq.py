"""The layout of GPTQ checkpoints, version 1, 4 or 8 bits. Shapes: O outputs, I inputs, G groups of inputs.

Tensors have inputs first. A word of `qweight` has consecutive inputs of one output, a word of `qzeros` consecutive
outputs. Stored zero points are smaller by one than those used, so a zero point of 0 has no stored form.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dovetail.core.layouts.words import pack_words, unpack_words


def multiple(bits: int) -> int:
    """Return what the numbers of inputs and outputs must be multiples of."""
    return 32 // bits


def pack(
    codes_OI: torch.Tensor, scale_OG: torch.Tensor, zero_OG: torch.Tensor, group_I: torch.Tensor, bits: int
) -> dict[str, torch.Tensor]:
    """Return qweight int32 [I * bits / 32, O], qzeros int32 [G, O * bits / 32], scales float16 [G, O] and g_idx int32
    [I], the group of each input. Codes and zeros are uint8, zeros at least 1."""
    return {
        "qweight": pack_words(codes_OI.t(), bits, 0).contiguous(),
        "qzeros": pack_words(zero_OG.t() - 1, bits, 1).contiguous(),
        "scales": scale_OG.t().to(torch.float16).contiguous(),
        "g_idx": group_I.to(torch.int32),
    }


def unpack(
    tensors: Mapping[str, torch.Tensor], bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes uint8 [O, I], scale_OG, zero uint8 [O, G], g_idx): the inverse of `pack`."""
    codes_IO, zero_GO = unpack_words(tensors["qweight"], bits, 0), unpack_words(tensors["qzeros"], bits, 1)
    return codes_IO.t(), tensors["scales"].t(), zero_GO.t() + 1, tensors["g_idx"]
