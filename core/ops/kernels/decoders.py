"""Decoders of packed weights, which the matmul and row kernels inline: int32 codes of any shape -> values in DTYPE.

Integers are placed into the mantissa of a constant power of two, which one subtraction removes: conversion
instructions run at a quarter of the rate. A float of few bits is shifted to the fields of the wider type, and one
product corrects its exponent, also if the code is subnormal. All results are exact in DTYPE, except for codebooks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.core.ops.kernels.e4m3 import decode_e4m3


@triton.jit
def _integer(code, OFFSET: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Return code - OFFSET for codes of BITS bits."""
    if BITS == 4 and DTYPE == tl.bfloat16:
        # bfloat16 has 7 bits of mantissa: 0x4300 is 128.
        value = (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - tl.full((), 128 + OFFSET, tl.bfloat16)
    elif DTYPE == tl.float16 or DTYPE == tl.float8e4nv:
        # float16 has 10 bits of mantissa: 0x6400 is 1024.
        value = (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - tl.full((), 1024 + OFFSET, tl.float16)
    else:
        # float32 has 23 bits of mantissa: 0x4B000000 is 2^23.
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)
    return value.to(DTYPE)


@triton.jit
def decode_uint4(code, DTYPE: tl.constexpr):
    return _integer(code, 0, 4, DTYPE)


@triton.jit
def decode_int4(code, DTYPE: tl.constexpr):
    """Codes are offset by 8."""
    return _integer(code, 8, 4, DTYPE)


@triton.jit
def decode_int6(code, DTYPE: tl.constexpr):
    """Codes are offset by 32."""
    return _integer(code, 32, 6, DTYPE)


@triton.jit
def decode_uint8(code, DTYPE: tl.constexpr):
    return _integer(code, 0, 8, DTYPE)


@triton.jit
def decode_int8(code, DTYPE: tl.constexpr):
    """Codes are offset by 128."""
    return _integer(code, 128, 8, DTYPE)


@triton.jit
def decode_e2m1(code, DTYPE: tl.constexpr):
    """FP4: a sign, 2 bits of exponent and 1 of mantissa."""
    if DTYPE == tl.bfloat16:
        small = (((code & 8) << 12) | ((code & 7) << 6)).to(tl.int16).to(tl.bfloat16, bitcast=True)
        # 2^126, the ratio of the exponents' biases.
        return small * tl.full((), 8.507059173023462e37, tl.bfloat16)
    else:
        small = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
        return (small * tl.full((), 16384.0, tl.float16)).to(DTYPE)


@triton.jit
def decode_e4m3_code(code, DTYPE: tl.constexpr):
    if DTYPE == tl.float8e4nv:
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return decode_e4m3(code.to(tl.uint8), DTYPE)


@triton.jit
def decode_nf4(code, DTYPE: tl.constexpr):
    """NF4 (Dettmers et al. 2023): quantiles of the normal distribution. Rounds to DTYPE."""
    least = _one_of_four(code, -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
    less = _one_of_four(code, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
    more = _one_of_four(code, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
    most = _one_of_four(code, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
    negative = tl.where((code & 4) == 0, least, less)
    return tl.where((code & 8) == 0, negative, tl.where((code & 4) == 0, more, most)).to(DTYPE)


@triton.jit
def _one_of_four(code, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Select by the last two bits."""
    return tl.where((code & 2) == 0, tl.where((code & 1) == 0, A, B), tl.where((code & 1) == 0, C, D))
