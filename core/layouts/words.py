"""Codes in int32 words along the last axis, in a given order of the codes of a word. Shapes: W words, C codes."""

from __future__ import annotations

import torch

AWQ_4 = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's GEMM layout: the i-th nibble of a word is this one of its eight columns."""


def unpack_words(words: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 words -> uint8 codes along `axis`. Code order[i] of a word is in its i-th `bits` bits; None = in order."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.movedim(axis, -1).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    if order is not None:
        codes = codes[..., torch.tensor(order, device=words.device).argsort()]
    return codes.flatten(-2).to(torch.uint8).movedim(-1, axis)


def pack_words(codes: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """The inverse of unpack_words, for a number of codes that fills whole words."""
    each = 32 // bits
    codes = codes.movedim(axis, -1).to(torch.int32).unflatten(-1, (-1, each))
    if order is not None:
        codes = codes[..., torch.tensor(order, device=codes.device)]
    words = codes[..., 0].clone()
    for at in range(1, each):
        words |= codes[..., at] << (at * bits)
    return words.movedim(-1, axis)


def unpack_nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """uint8 pairs along the last axis -> codes of 4 bits, the one in the lower bits first."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of unpack_nibbles, for an even number of codes."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4
