"""Shifted decoders (ShiftedDecoder) for Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def code_plus_128(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    return (((words >> AT) & 15) + 128).to(DTYPE)


@triton.jit
def code_less_8(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    return (((words >> AT) & 15) - 8).to(DTYPE)


@triton.jit
def code_over_512(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    return (((words >> AT) & 15).to(tl.float32) / 512.0).to(DTYPE)
