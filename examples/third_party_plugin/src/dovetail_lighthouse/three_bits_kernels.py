"""Triton functions that Dovetail's matmul and norm kernels inline."""

import triton
import triton.language as tl


@triton.jit
def decode_three_bits(code, DTYPE: tl.constexpr):
    """Values 0.25, 0.75, 1.25 and 2 for codes 4 to 7, and the same with a sign, in reverse, for codes 0 to 3."""
    positive = code >= 4
    at = tl.where(positive, code - 4, 3 - code)
    value = tl.where(at == 3, 2.0, 0.25 + 0.5 * at.to(tl.float32))
    return tl.where(positive, value, -value).to(DTYPE)


@triton.jit
def encode_power(x_GC, scale_in):
    amax_G = tl.maximum(tl.max(tl.abs(x_GC), axis=1), 1e-10)
    scale_G = tl.exp2(tl.ceil(tl.log2(amax_G)) - 8)
    return (x_GC / scale_G[:, None]).to(tl.float8e4nv), scale_G
