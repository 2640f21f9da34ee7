"""Codes of a packed matrix in int32 words, and their values in torch.

n = 32 / stored_bits codes share a word. A block of 32 n inputs takes 32 words of a row, and code j of word w is input
32 j + w of the block. So the same bits of 32 words are 32 consecutive inputs, and a kernel that decodes them needs no
exchange between threads. The last block is filled up with zeros.

Shapes: O outputs, I inputs, W words, G groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.weight import PackedWeight

LANES = 32
"""Words of a block."""


def words_of_row(inputs: int, stored_bits: int) -> int:
    """Return the number of words of a row."""
    return ceil_div(inputs, LANES * (32 // stored_bits)) * LANES


def pack(codes_OI: torch.Tensor, stored_bits: int) -> torch.Tensor:
    """Pack codes below 2 ** stored_bits into int32 [O, W]."""
    each = 32 // stored_bits
    codes_OI = F.pad(codes_OI, (0, -codes_OI.shape[1] % (LANES * each)))
    codes = codes_OI.unflatten(1, (-1, each, LANES)).to(torch.int32)
    words = codes[:, :, 0].clone()
    for at in range(1, each):
        words |= codes[:, :, at] << (at * stored_bits)
    return words.flatten(1)


def unpack(words_OW: torch.Tensor, stored_bits: int, inputs: int) -> torch.Tensor:
    """Return the codes uint8 [O, inputs]."""
    shifts = torch.arange(0, 32, stored_bits, dtype=torch.int32, device=words_OW.device)
    words = words_OW.unflatten(1, (-1, 1, LANES))
    codes = (words >> shifts[:, None]) & ((1 << stored_bits) - 1)
    return codes.flatten(1)[:, :inputs].to(torch.uint8)


def dequantize(packed: PackedWeight, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
    """Return rows of the matrix in float32."""
    codes_OI = unpack(packed.codes[rows], packed.format.stored_bits, packed.inputs)
    weight_OI = packed.format.reference(codes_OI)
    if packed.zero is not None:
        weight_OI = weight_OI - _spread(packed.zero[rows], packed)
    weight_OI = weight_OI * _spread(packed.scale[rows], packed)
    return weight_OI if packed.row_scale is None else weight_OI * packed.row_scale[rows].unsqueeze(-1)


def _spread(values_OG: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """One value for each input, in float32."""
    values = values_OG.float()
    return values if packed.group == 0 else values.repeat_interleave(packed.group, -1)[..., : packed.inputs]
