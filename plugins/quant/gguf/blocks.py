"""Decoders of GGUF's blocks (ggml-quants.c) into codes with a scale for each group of inputs.

Shapes: R rows, C columns, G groups of a row, B blocks of a row, S bytes or values of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dovetail.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Codes:
    """Weights as value = scale * (code - zero) - minimum. In float32 this is exactly the value that ggml computes, but
    for the sign of zeros."""

    codes_RC: torch.Tensor
    """uint8, of at most `BlockFormat.bits` bits."""
    scales_RG: torch.Tensor
    """float32."""
    zero: int
    """Code of the value 0 in a group without a minimum."""
    minimums_RG: torch.Tensor | None = None
    """float32; None = all are 0."""

    def offsets_RG(self) -> torch.Tensor:
        """Return what is subtracted from scale * code. The product of scale and zero is exact."""
        offsets_RG = self.scales_RG * self.zero
        return offsets_RG if self.minimums_RG is None else offsets_RG + self.minimums_RG

    def values_RC(self) -> torch.Tensor:
        """Return the weights in float32."""
        rows, groups = self.scales_RG.shape
        centred = self.codes_RC.reshape(rows, groups, -1).float() - self.zero
        values = self.scales_RG.unsqueeze(-1) * centred
        if self.minimums_RG is not None:
            values = values - self.minimums_RG.unsqueeze(-1)
        return values.reshape(rows, -1)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A GGUF type of quantized values."""

    values: int
    """Values of a block."""
    size: int
    """Bytes of a block."""
    group: int
    """Columns with one scale."""
    bits: int
    """Bits of a code."""
    decode: Callable[[torch.Tensor], Codes]
    """Decodes blocks_RBS."""


def decode_blocks(name: str, bytes_RS: torch.Tensor) -> Codes:
    """Decode rows of blocks, or whole blocks of their columns, on the tensor's device. `name`: the GGUF type, such as
    "Q4_K". Raises ConfigError for a type without a decoder."""
    if name not in FORMATS:
        raise ConfigError(f"GGUF blocks in {name} are not decoded; there are {', '.join(FORMATS)}")
    rows, width = bytes_RS.shape
    assert width % FORMATS[name].size == 0, f"{width} bytes are not whole blocks of {FORMATS[name].size}"
    return FORMATS[name].decode(bytes_RS.reshape(rows, -1, FORMATS[name].size))


def _q4_0(blocks_RBS: torch.Tensor) -> Codes:
    scale_RB1, packed = blocks_RBS.split((2, 16), dim=-1)
    return Codes(_rows(_nibbles(packed, 16)), _rows(_half(scale_RB1)), zero=8)


def _q8_0(blocks_RBS: torch.Tensor) -> Codes:
    scale_RB1, values = blocks_RBS.split((2, 32), dim=-1)
    # Two's complement with the sign bit flipped is the value + 128.
    return Codes(_rows(values ^ 128), _rows(_half(scale_RB1)), zero=128)


def _q4_k(blocks_RBS: torch.Tensor) -> Codes:
    scale, minimum, packed_scales, packed = blocks_RBS.split((2, 2, 12, 128), dim=-1)
    return _with_minimums(_nibbles(packed, 32), scale, minimum, packed_scales)


def _q5_k(blocks_RBS: torch.Tensor) -> Codes:
    scale, minimum, packed_scales, high, packed = blocks_RBS.split((2, 2, 12, 32, 128), dim=-1)
    # Bit g of byte i is the fifth bit of value i in group g.
    fifth = torch.stack([high >> group & 1 for group in range(8)], dim=-2).flatten(-2)
    return _with_minimums(_nibbles(packed, 32) | fifth << 4, scale, minimum, packed_scales)


def _q6_k(blocks_RBS: torch.Tensor) -> Codes:
    low, high, scales, scale_RB1 = blocks_RBS.split((128, 64, 16, 2), dim=-1)
    # Each half block of 128 values has 32 bytes of upper bits: bits 2 g and 2 g + 1 belong to quarter g.
    halves = high.unflatten(-1, (2, 32))
    upper = torch.stack([halves >> 2 * quarter & 3 for quarter in range(4)], dim=-2).flatten(-3)
    codes = _nibbles(low, 64) | upper << 4
    return Codes(_rows(codes), _rows(_half(scale_RB1) * scales.view(torch.int8).float()), zero=32)


def _with_minimums(
    codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, packed_scales: torch.Tensor
) -> Codes:
    """Combine K-quants' codes with the scales of scales. Eight groups have six bits for the scale and for the minimum:
    those of the first four in bytes 0 to 7, and of the others four bits in bytes 8 to 11, two at the top of the former.
    """
    first, second, rest = packed_scales.split(4, dim=-1)
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), dim=-1)
    minimums = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), dim=-1)
    return Codes(
        _rows(codes), _rows(_half(scale) * scales.float()), zero=0, minimums_RG=_rows(_half(minimum) * minimums.float())
    )


def _nibbles(packed: torch.Tensor, run: int) -> torch.Tensor:
    """Unpack two values per byte: the low halves of `run` bytes, then their high halves, and so on."""
    runs = packed.unflatten(-1, (-1, run))
    return torch.stack((runs & 15, runs >> 4), dim=-2).flatten(-3)


def _half(two_bytes: torch.Tensor) -> torch.Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


def _rows(per_block: torch.Tensor) -> torch.Tensor:
    return per_block.flatten(-2)


FORMATS = {
    "Q4_0": BlockFormat(32, 18, 32, 4, _q4_0),
    "Q8_0": BlockFormat(32, 34, 32, 8, _q8_0),
    "Q4_K": BlockFormat(256, 144, 32, 4, _q4_k),
    "Q5_K": BlockFormat(256, 176, 32, 5, _q5_k),
    "Q6_K": BlockFormat(256, 210, 16, 6, _q6_k),
}
