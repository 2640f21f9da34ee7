"""Codes of a packed matrix in int32 words, and their values in torch.

n = 32 / stored_bits codes share a word. A block of 32 n inputs takes 32 words of a row, and code j of word w is input
32 j + w of the block. So the same bits of 32 words are 32 consecutive inputs, and a kernel that decodes them needs no
exchange between threads. The last block is filled up with zeros.

Four scales in E4M3 of an output may share an int32 word, the first of them in its lowest byte. The last word is filled
up with zeros.

Shapes: O outputs, I inputs, W words, G groups.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.weight import PackedWeight

LANES = 32
"""Words of a block."""
MOST_E4M3 = 448.0
"""The largest number in E4M3."""
SCALES = 4
"""Scales in E4M3 of a word."""
MAPPED = 16
"""Outputs of which a row of scales or zeros has a multiple in memory, so that it has a multiple of 16 bytes."""
TINY = 2.0**-100
"""Least scale to round with, whose inverse is finite."""


def empty_by_group(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor [.., O, G] of scales or zeros in which outputs are next to each other in memory:
    a kernel's block has one or two groups of many outputs, and reads whole sectors of them so. Groups begin at
    multiples of MAPPED outputs, for tensor maps (`maps_groups`)."""
    *experts, outputs, groups = shape
    stored = ceil_div(outputs, MAPPED) * MAPPED
    return torch.empty(*experts, groups, stored, dtype=dtype, device=device).narrow(-1, 0, outputs).transpose(-1, -2)


def empty_alike(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor in the same order in memory, with as many spare elements between rows."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def by_group(x_OG: torch.Tensor) -> torch.Tensor:
    """Return a copy in which outputs are next to each other in memory."""
    return empty_by_group(*x_OG.shape, dtype=x_OG.dtype, device=x_OG.device).copy_(x_OG)


def maps_groups(packed: PackedWeight) -> bool:
    """Return whether tensor maps can read scales and zeros of a matrix: outputs are next to each other in memory, and
    groups begin at multiples of 16 bytes."""
    return all(
        (one.shape[0] == 1 or one.stride(0) == 1)
        and (one.shape[1] == 1 or (one.stride(1) >= one.shape[0] and one.stride(1) * one.element_size() % 16 == 0))
        and one.data_ptr() % 16 == 0
        for one in (packed.scale, packed.zero)
        if one is not None
    )


def pack_scales(scale_OG: torch.Tensor) -> torch.Tensor:
    """Return words of scales in E4M3, int32 [.., O, ceil(G / SCALES)], with outputs next to each other in memory."""
    bits = F.pad(scale_OG.view(torch.uint8), (0, -scale_OG.shape[-1] % SCALES)).to(torch.int32)
    return by_group((bits.unflatten(-1, (-1, SCALES)) << _shifts(8, bits.device)).sum(-1, dtype=torch.int32))


def scales_of(packed: PackedWeight, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
    """Return scales [.., O, G] of the matrix, or of some rows, in E4M3 if they are in words."""
    scale = packed.scale[rows]
    if scale.dtype is not torch.int32:
        return scale
    bits = (scale.unsqueeze(-1) >> _shifts(8, scale.device)) & 0xFF
    return bits.flatten(-2)[..., : packed.groups].to(torch.uint8).view(torch.float8_e4m3fn)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    """Shifts of the fields of so many bits in a word."""
    return torch.arange(0, 32, bits, dtype=torch.int32, device=device)


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
    words = words_OW.unflatten(1, (-1, 1, LANES))
    codes = (words >> _shifts(stored_bits, words.device)[:, None]) & ((1 << stored_bits) - 1)
    return codes.flatten(1)[:, :inputs].to(torch.uint8)


def dequantize(packed: PackedWeight, rows: torch.Tensor | slice = slice(None)) -> torch.Tensor:
    """Return rows of the matrix in float32."""
    codes_OI = unpack(packed.codes[rows], packed.format.stored_bits, packed.inputs)
    weight_OI = packed.format.reference(codes_OI)
    if packed.zero is not None:
        weight_OI = weight_OI - _spread(packed.zero[rows], packed)
    weight_OI = weight_OI * _spread(scales_of(packed, rows), packed)
    return weight_OI if packed.row_scale is None else weight_OI * packed.row_scale[rows].unsqueeze(-1)


def scales_to_round(packed: PackedWeight) -> torch.Tensor:
    """Return the scale of each output, float32 [O], with which the matrix is rounded to E4M3: the scale of a group,
    divided by a power of two. That is the largest for which no possible number exceeds MOST_E4M3 in any group, so that
    codes of one group stay exact. Numbers a thousand times smaller than the largest of their output have fewer bits."""
    fmt, zero_OG = packed.format, packed.zero
    values = fmt.reference(torch.arange(1 << fmt.bits, dtype=torch.uint8, device=packed.codes.device))
    # Matrices have no code that stands for no number.
    finite = values.isfinite()
    low, high = torch.where(finite, values, torch.inf).min(), torch.where(finite, values, -torch.inf).max()
    if zero_OG is None:
        largest_OG = torch.maximum(high, -low)
    elif zero_OG.dtype is torch.uint8:
        # At least the usual zeros, so that outputs with equal scales are rounded alike.
        largest_OG = torch.maximum(high, zero_OG.amax(1, keepdim=True).clamp(min=(1 << fmt.bits) - 1) - low)
    else:
        largest_OG = torch.maximum(high - zero_OG.float(), zero_OG.float() - low)
    # The power of two of a float32 is its exponent's bits. torch.exp2 would be compiled first, in each process.
    bits_OG = (MOST_E4M3 / largest_OG.float().clamp(min=TINY)).view(torch.int32)
    unit_OG = (bits_OG & 0x7F800000).view(torch.float32)
    scale_O = (scales_of(packed).float().abs() / unit_OG).amax(1)
    if packed.row_scale is not None:
        scale_O = scale_O * packed.row_scale.abs()
    # All numbers of such an output become zero.
    return scale_O.where(scale_O > TINY, 1.0)


def rounded(packed: PackedWeight) -> torch.Tensor:
    """Return the matrix divided by its `rounded_scale`, in E4M3."""
    assert packed.rounded_scale is not None
    return (dequantize(packed) * (1 / packed.rounded_scale)[:, None]).to(torch.float8_e4m3fn)


def _spread(values_OG: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
    """One value for each input, in float32."""
    values = values_OG.float()
    return values if packed.group == 0 else values.repeat_interleave(packed.group, -1)[..., : packed.inputs]
