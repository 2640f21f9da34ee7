"""Encoders of GGUF's K-quants, which the package gguf decodes and does not encode. They round to the nearest;
llama.cpp's search for scales with a smaller error.

Shapes: B blocks of 256 values, G groups of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def encode(values: Floats, kind: str) -> Bytes:
    """Return the bytes [rows, bytes of a row] of a matrix whose rows are whole blocks."""
    rows = len(values)
    blocks: Bytes = ENCODERS[kind](values.reshape(-1, 256).astype(np.float32))
    return blocks.reshape(rows, -1)


def _q4_k(values: Floats) -> Bytes:
    codes_BGV, head = _with_minimums(values, 15)
    return np.concatenate([head, _nibbles(codes_BGV)], axis=1)


def _q5_k(values: Floats) -> Bytes:
    codes_BGV, head = _with_minimums(values, 31)
    places = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = ((codes_BGV >> 4) << places).sum(axis=1, dtype=np.uint8)
    return np.concatenate([head, fifth, _nibbles(codes_BGV & 15)], axis=1)


def _q6_k(values: Floats) -> Bytes:
    groups = values.reshape(len(values), 16, 16)
    scales_BG = np.abs(groups).max(axis=2) / 31
    one_B = np.float16(scales_BG.max(axis=1, keepdims=True) / 127)
    whole_BG = np.round(_divided(scales_BG, one_B.astype(np.float32)))
    steps = (whole_BG * one_B.astype(np.float32))[..., None]
    codes = np.clip(np.round(_divided(groups, steps)) + 32, 0, 63).astype(np.uint8).reshape(len(values), 2, 4, 32)
    # A half block has its first 64 values in the low halves of 64 bytes.
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    shifts = 2 * np.arange(4, dtype=np.uint8)[None, None, :, None]
    high = ((codes >> 4) << shifts).sum(axis=2, dtype=np.uint8)
    flat = (part.reshape(len(values), -1) for part in (low, high))
    return np.concatenate([*flat, whole_BG.astype(np.int8).view(np.uint8), one_B.view(np.uint8)], axis=1)


ENCODERS: dict[str, Callable[[Floats], Bytes]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}


def _with_minimums(values: Floats, largest: int) -> tuple[Bytes, Bytes]:
    """Return the codes of eight groups of 32, and the 16 bytes that hold their scales and minimums."""
    groups = values.reshape(len(values), 8, 32)
    low_BG = -np.minimum(groups.min(axis=2), 0)
    scale_BG = (np.maximum(groups.max(axis=2), 0) + low_BG) / largest
    halves = [np.float16(each.max(axis=1, keepdims=True) / 63) for each in (scale_BG, low_BG)]
    whole = [
        np.clip(np.round(_divided(each, half.astype(np.float32))), 0, 63).astype(np.uint8)
        for each, half in zip((scale_BG, low_BG), halves, strict=True)
    ]
    steps, lows = (each * half.astype(np.float32) for each, half in zip(whole, halves, strict=True))
    codes = np.clip(np.round(_divided(groups + lows[..., None], steps[..., None])), 0, largest).astype(np.uint8)
    scales, minimums = whole
    first, second = (each[:, :4] | (each[:, 4:] >> 4) << 6 for each in whole)
    rest = scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4
    return codes, np.concatenate([*(half.view(np.uint8) for half in halves), first, second, rest], axis=1)


def _nibbles(codes_BGV: Bytes) -> Bytes:
    """Join each two groups: those of the second one in the high halves."""
    return (codes_BGV[:, ::2] | codes_BGV[:, 1::2] << 4).reshape(len(codes_BGV), -1)


def _divided(values: Floats, steps: Floats) -> Floats:
    return values / np.where(steps == 0, 1, steps)
