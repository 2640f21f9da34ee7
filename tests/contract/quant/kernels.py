"""A Triton encoding that truncates although its reference rounds."""

import triton
import triton.language as tl


@triton.jit
def encode_cut(x_GC, scale_in):
    amax_G = tl.maximum(tl.max(tl.abs(x_GC), axis=1), 1e-10)
    return (x_GC * (127.0 / amax_G)[:, None]).to(tl.int8), amax_G / 127.0
