"""Conversion of E4M3 codes by integer operations, for GPUs that cannot convert or multiply 8-bit floats.

A code is shifted so that its sign, exponent and mantissa lie where the wider type has them. The result is too small by
a constant power of two, the difference of the exponents' biases. Multiplying by it is exact, also for subnormal codes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_e4m3(codes, dtype: tl.constexpr):
    """Return uint8 codes as numbers of any float dtype."""
    bits = codes.to(tl.uint32)
    small = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), small * 1.329227995784916e36).to(dtype)


@triton.jit
def decode_e4m3_words(codes, dtype: tl.constexpr):
    """Return uint8 codes as bfloat16 or float16, four codes at a time: 4 instructions per code where `decode_e4m3`
    takes 8. The summand of the multiply-add is NaN where the code is, and else zero.

    `codes` must be a multiple of four values per thread. Triton's interpreter does not support it."""
    BF16: tl.constexpr = dtype == tl.bfloat16
    SHIFT: tl.constexpr = "4" if BF16 else "1"
    FIELD: tl.constexpr = "0x07f007f0" if BF16 else "0x3f803f80"
    # 2^120 and 2^8, the ratios of the exponents' biases, twice each.
    RATIO: tl.constexpr = "0x7b807b80" if BF16 else "0x5c005c00"
    FMA: tl.constexpr = "fma.rn.bf16x2" if BF16 else "fma.rn.f16x2"
    return tl.inline_asm_elementwise(
        "{.reg .b32 ends, ratio, code, field, nan; and.b32 ends, $2, 0x7f7f7f7f; add.u32 ends, ends, 0x01010101; "
        + "mov.b32 ratio, "
        + RATIO
        + "; prmt.b32 code, $2, 0, 0x1404; prmt.b32 nan, ends, 0, 0x9988; shr.u32 field, code, "
        + SHIFT
        + "; and.b32 field, field, "
        + FIELD
        + "; lop3.b32 field, code, 0x80008000, field, 0xea; "
        + FMA
        + " $0, field, ratio, nan; prmt.b32 code, $2, 0, 0x3424; prmt.b32 nan, ends, 0, 0xbbaa; shr.u32 field, code, "
        + SHIFT
        + "; and.b32 field, field, "
        + FIELD
        + "; lop3.b32 field, code, 0x80008000, field, 0xea; "
        + FMA
        + " $1, field, ratio, nan;}",
        "=r,=r,r",
        [codes],
        dtype=dtype.value,
        is_pure=True,
        pack=4,
    )
