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
def _from_words(words, AT: tl.constexpr, TO_VALUES: tl.constexpr, DTYPE: tl.constexpr):
    """Return values of codes of 4 bits. Halves of two words are joined, so that the instructions TO_VALUES serve two
    codes, at bit AT % 16 of each half of `code`; the compiler joins the halves once for four values of AT.

    There must be a multiple of two words per thread. Triton's interpreter does not support it."""
    HALVES: tl.constexpr = "0x5410" if AT < 16 else "0x7632"
    return tl.inline_asm_elementwise(
        "{.reg .b32 code, more, last; prmt.b32 code, $1, $2, " + HALVES + "; " + TO_VALUES + "}",
        "=r,r,r",
        [words],
        dtype=DTYPE.value,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _integer_words(words, AT: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Return the codes less OFFSET, which is 0 or 8."""
    BF16: tl.constexpr = DTYPE == tl.bfloat16
    RIGHT: tl.constexpr = ("0", "4", "8", "12")[AT % 16 // 4]
    # 128 or 1024, and the same plus the offset.
    BASE: tl.constexpr = "0x43004300" if BF16 else "0x64006400"
    WITH_8: tl.constexpr = "0x43084308; " if BF16 else "0x64086408; "
    LESS: tl.constexpr = WITH_8 if OFFSET == 8 else BASE + "; "
    MINUS: tl.constexpr = (
        "mov.b32 last, 0xbf80bf80; fma.rn.bf16x2 $0, more, last, code; " if BF16 else "sub.f16x2 $0, code, more; "
    )
    JOINED: tl.constexpr = "shr.u32 code, code, " + RIGHT + "; lop3.b32 code, code, 0x000f000f, " + BASE + ", 0xea; "
    return _from_words(words, AT, JOINED + "mov.b32 more, " + LESS + MINUS, DTYPE)


@triton.jit
def decode_uint4_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    return _integer_words(words, AT, 0, DTYPE)


@triton.jit
def decode_int4_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    return _integer_words(words, AT, 8, DTYPE)


@triton.jit
def decode_large_uint4_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the codes plus 128 in bfloat16, plus 1024 in float16."""
    RIGHT: tl.constexpr = ("0", "4", "8", "12")[AT % 16 // 4]
    BASE: tl.constexpr = "0x43004300" if DTYPE == tl.bfloat16 else "0x64006400"
    return _from_words(
        words, AT, "shr.u32 code, code, " + RIGHT + "; lop3.b32 $0, code, 0x000f000f, " + BASE + ", 0xea; ", DTYPE
    )


@triton.jit
def decode_small_uint4_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the codes / 512 in E4M3, whose subnormal numbers and those of the next exponent are multiples of 1 / 512.
    There must be a multiple of four words per thread."""
    # The byte that holds the code, of two words.
    BYTES: tl.constexpr = ("0x0040; ", "0x0051; ", "0x0062; ", "0x0073; ")[AT // 8]
    SHIFT: tl.constexpr = "" if AT % 8 == 0 else "shr.u32 a, a, 4; "
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b; prmt.b32 a, $1, $2, " + BYTES + "prmt.b32 b, $3, $4, " + BYTES
        + "prmt.b32 a, a, b, 0x5410; " + SHIFT + "and.b32 $0, a, 0x0f0f0f0f;}",
        "=r,r,r,r,r",
        [words],
        dtype=tl.float8e4nv,
        is_pure=True,
        pack=4,
    )  # fmt: skip


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
def _byte_words(words, AT: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Return codes of 8 bits less OFFSET, which is 0, 32 or 128, two at a time. With 32 they have 6 bits."""
    PLACE: tl.constexpr = AT // 8
    # 2^23 and 1024, and the same plus the offset.
    BIG: tl.constexpr = "0f4B000000" if OFFSET == 0 else "0f4B000080"
    SMALL: tl.constexpr = "0x64006400" if OFFSET == 0 else "0x64206420" if OFFSET == 32 else "0x64806480"
    # A byte below the upper bytes of 2^23.
    UNDER: tl.constexpr = ("0x7440", "0x7441", "0x7442", "0x7443")[PLACE]
    BOTH: tl.constexpr = ("0x0040", "0x0051", "0x0062", "0x0073")[PLACE]
    # bfloat16 has too few bits for a constant with 8 bits in its mantissa. 128 holds 6.
    TO_BF16: tl.constexpr = (
        "prmt.b32 x, $1, $2, " + ("0x4400", "0x5511", "0x6622", "0x7733")[PLACE]
        + "; lop3.b32 x, x, 0x003f003f, 0x43004300, 0xea; mov.b32 y, 0x43204320; mov.b32 last, 0xbf80bf80; "
        + "fma.rn.bf16x2 $0, y, last, x; "
        if OFFSET == 32
        else "prmt.b32 x, $1, 0x4b000000, " + UNDER + "; prmt.b32 y, $2, 0x4b000000, " + UNDER
        + "; mov.b32 a, x; mov.b32 b, y; sub.f32 a, a, " + BIG + "; sub.f32 b, b, " + BIG
        + "; cvt.rn.bf16x2.f32 $0, b, a; "
    )  # fmt: skip
    TO_FP16: tl.constexpr = (
        "prmt.b32 x, $1, $2, " + BOTH + "; prmt.b32 x, x, 0x64646464, 0x4140; mov.b32 y, " + SMALL
        + "; sub.f16x2 $0, x, y; "
    )  # fmt: skip
    VALUES: tl.constexpr = TO_BF16 if DTYPE == tl.bfloat16 else TO_FP16
    return tl.inline_asm_elementwise(
        "{.reg .b32 x, y, last; .reg .f32 a, b; " + VALUES + "}",
        "=r,r,r",
        [words],
        dtype=DTYPE.value,
        is_pure=True,
        pack=2,
    )  # fmt: skip


@triton.jit
def decode_uint8_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    return _byte_words(words, AT, 0, DTYPE)


@triton.jit
def decode_int8_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    return _byte_words(words, AT, 128, DTYPE)


@triton.jit
def decode_int6_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    return _byte_words(words, AT, 32, DTYPE)


@triton.jit
def decode_large_byte_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the codes plus 2^15 in float32, whatever DTYPE is: a byte above the lowest one of 2^15."""
    PLACE: tl.constexpr = ("0x7404;", "0x7414;", "0x7424;", "0x7434;")[AT // 8]
    # A permutation has one constant at most. If the compiler knew the other, it would move it to a register each time.
    HIDDEN: tl.constexpr = "mov.u32 a, %lanemask_gt; mov.u32 b, %lanemask_lt; and.b32 a, a, b; "
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b; " + HIDDEN + "xor.b32 a, a, 0x47000000; prmt.b32 $0, $1, a, " + PLACE + "}",
        "=r,r",
        [words],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def decode_e4m3_code_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    """No code may be NaN. E4M3 takes a multiple of four words per thread."""
    PLACE: tl.constexpr = AT // 8
    if DTYPE == tl.float8e4nv:
        BOTH: tl.constexpr = ("0x0040; ", "0x0051; ", "0x0062; ", "0x0073; ")[PLACE]
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, b; prmt.b32 a, $1, $2, " + BOTH + "prmt.b32 b, $3, $4, " + BOTH
            + "prmt.b32 $0, a, b, 0x5410;}",
            "=r,r,r,r,r",
            [words],
            dtype=tl.float8e4nv,
            is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        BF16: tl.constexpr = DTYPE == tl.bfloat16
        # To the upper byte of each half.
        UPPER: tl.constexpr = ("0x4400; ", "0x5511; ", "0x6622; ", "0x7733; ")[PLACE]
        FIELD: tl.constexpr = (
            "shr.u32 field, code, 4; and.b32 field, field, 0x07f007f0; "
            if BF16
            else "shr.u32 field, code, 1; and.b32 field, field, 0x3f803f80; "
        )
        # 2^120 and 2^8, the ratios of the exponents' biases; the summand is -0.
        RATIO: tl.constexpr = "mov.b32 none, 0x80008000; mov.b32 ratio, " + ("0x7b807b80; " if BF16 else "0x5c005c00; ")
        TIMES: tl.constexpr = "fma.rn.bf16x2" if BF16 else "fma.rn.f16x2"
        return tl.inline_asm_elementwise(
            "{.reg .b32 code, field, ratio, none; prmt.b32 code, $1, $2, " + UPPER + FIELD
            + "lop3.b32 field, code, 0x80008000, field, 0xea; " + RATIO + TIMES + " $0, field, ratio, none;}",
            "=r,r,r",
            [words],
            dtype=DTYPE.value,
            is_pure=True,
            pack=2,
        )  # fmt: skip


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
def decode_small_e2m1_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    """FP4 / 64 in E4M3, with the same fields, so that no product is needed. There must be a multiple of four words per
    thread."""
    # The byte that holds the code, of two words.
    BYTES: tl.constexpr = ("0x0040; ", "0x0051; ", "0x0062; ", "0x0073; ")[AT // 8]
    SHIFTS: tl.constexpr = "shl.b32 b, a, 4; shl.b32 a, a, 2; " if AT % 8 == 0 else "mov.b32 b, a; shr.u32 a, a, 2; "
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b; prmt.b32 a, $1, $2, " + BYTES + "prmt.b32 b, $3, $4, " + BYTES
        + "prmt.b32 a, a, b, 0x5410; " + SHIFTS
        + "and.b32 b, b, 0x80808080; lop3.b32 $0, a, 0x1c1c1c1c, b, 0xea;}",
        "=r,r,r,r,r",
        [words],
        dtype=tl.float8e4nv,
        is_pure=True,
        pack=4,
    )  # fmt: skip


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
def decode_bitsandbytes_fp4(code, DTYPE: tl.constexpr):
    """FP4 of bitsandbytes, times 12: a sign and 3 bits for magnitudes in an order of their own. Exact in E4M3."""
    low, high = _one_of_four(code, 0.0, 0.0625, 8.0, 12.0), _one_of_four(code, 4.0, 6.0, 2.0, 3.0)
    magnitude = tl.where((code & 4) == 0, low, high)
    return tl.where((code & 8) == 0, magnitude, -magnitude).to(DTYPE)


@triton.jit
def _one_of_four(code, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """Select by the last two bits."""
    return tl.where((code & 2) == 0, tl.where((code & 1) == 0, A, B), tl.where((code & 1) == 0, C, D))


@triton.constexpr_function
def _place_e2m1(at, bf16):
    """Return instructions that move the fields of the codes at bit `at` % 16 of each half of `code` to those of 16-bit
    floats."""
    sign = ("12", "8", "4", "0")[at % 16 // 4]
    # Exponent and mantissa to bit 6 or 9.
    field = (
        ("shl.b32 code, code, 6", "shl.b32 code, code, 2", "shr.u32 code, code, 2", "shr.u32 code, code, 6")
        if bf16
        else ("shl.b32 code, code, 9", "shl.b32 code, code, 5", "shl.b32 code, code, 1", "shr.u32 code, code, 3")
    )[at % 16 // 4]
    mask = "0x01c001c0" if bf16 else "0x0e000e00"
    sign = f"shl.b32 more, code, {sign}; and.b32 more, more, 0x80008000; "
    return f"{sign}{field}; lop3.b32 code, code, {mask}, more, 0xea; "


@triton.jit
def decode_e2m1_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    BF16: tl.constexpr = DTYPE == tl.bfloat16
    # 2^126 and 2^14, the ratios of the exponents' biases; the summand is -0.
    TIMES: tl.constexpr = "fma.rn.bf16x2 $0, code, more, last; " if BF16 else "fma.rn.f16x2 $0, code, more, last; "
    RATIO: tl.constexpr = "mov.b32 last, 0x80008000; mov.b32 more, " + ("0x7e807e80; " if BF16 else "0x74007400; ")
    JOINED: tl.constexpr = _place_e2m1(AT, BF16)
    return _from_words(words, AT, JOINED + RATIO + TIMES, DTYPE)


@triton.jit
def scaled_e2m1_words(words, factors, AT: tl.constexpr, DTYPE: tl.constexpr):
    """FP4 times a factor, rounded once. `factors`: int32, in both halves a power of two in DTYPE that includes the
    ratio of the exponents' biases, 2^126 in bfloat16 and 2^14 in float16. Both words of a pair have the same factor.
    There must be a multiple of two words per thread."""
    PLACED: tl.constexpr = _multiply_e2m1(AT, DTYPE == tl.bfloat16)
    return tl.inline_asm_elementwise(
        "{.reg .b32 code, more; " + PLACED + "}",
        "=r,r,r,r,r",
        [words, factors],
        dtype=DTYPE.value,
        is_pure=True,
        pack=2,
    )


@triton.constexpr_function
def _multiply_e2m1(at, bf16):
    """Return the instructions of scaled_e2m1_words."""
    if not bf16:
        halves = "0x5410" if at < 16 else "0x7632"
        return f"prmt.b32 code, $1, $2, {halves}; {_place_e2m1(at, False)}mul.f16x2 $0, code, $3;"
    # The byte of each word that holds the code. A product copies the code to two places, which have the sign and the
    # other fields, on another pipeline than shifts.
    byte = at // 8
    mask, copies = ("0x000f000f", "0x1040") if at % 8 == 0 else ("0x00f000f0", "0x0104")
    return (
        f"prmt.b32 code, $1, $2, 0x{byte + 4}{byte + 4}{byte}{byte}; and.b32 code, code, {mask}; "
        f"mul.lo.u32 code, code, {copies}; and.b32 code, code, 0x81c081c0; mul.bf16x2 $0, code, $3;"
    )


@triton.jit
def decode_nf4_words(words, AT: tl.constexpr, DTYPE: tl.constexpr):
    """Look up four codes at a time: a permutation selects four of eight bytes, so the lower and the upper bytes of the
    16 values take two each, and a third one chooses between these by the codes' last bits. There must be a multiple of
    four words per thread."""
    BF16: tl.constexpr = DTYPE == tl.bfloat16
    HALVES: tl.constexpr = "0x5410; " if AT < 16 else "0x7632; "
    RIGHT: tl.constexpr = ("0; ", "4; ", "8; ", "12; ")[AT % 16 // 4]
    RIGHT_LESS_4: tl.constexpr = ("shl.b32 b, b, 4; ", "", "shr.u32 b, b, 4; ", "shr.u32 b, b, 8; ")[AT % 16 // 4]
    # Lower bytes of values 0 to 3, 4 to 7 and so on, then upper bytes. A permutation has one constant at most. The
    # compiler would move the others to registers each time, if it knew them: no lane is above and below itself.
    TABLE: tl.constexpr = (
        "xor.b32 l0, none, 0xca063280; mov.b32 l1, 0x00ba3d92; xor.b32 l2, none, 0xad7c25a3; mov.b32 l3, 0x803910e2; "
        "xor.b32 u0, none, 0xbebfbfbf; mov.b32 u1, 0x00bdbebe; xor.b32 u2, none, 0x3e3e3e3d; mov.b32 u3, 0x3f3f3f3e; "
        if BF16
        else "xor.b32 l0, none, 0x52339200; mov.b32 l1, 0x00d4ea8d; xor.b32 l2, none, 0x68e02618; "
        "mov.b32 l3, 0x00c9800d; xor.b32 u0, none, 0xb6b8b9bc; mov.b32 u1, 0x00adb1b4; "
        "xor.b32 u2, none, 0x3533312d; mov.b32 u3, 0x3c393837; "
    )
    return tl.inline_asm_elementwise(
        "{.reg .b32 a, b, last, none, l0, l1, l2, l3, u0, u1, u2, u3; "
        + "mov.u32 none, %lanemask_gt; mov.u32 a, %lanemask_lt; and.b32 none, none, a; " + TABLE
        + "prmt.b32 a, $2, $3, " + HALVES + "prmt.b32 b, $4, $5, " + HALVES
        # One selector with the codes 0, 2, 1, 3.
        + "shr.u32 a, a, " + RIGHT + "and.b32 a, a, 0x000f000f; " + RIGHT_LESS_4
        + "lop3.b32 a, b, 0x00f000f0, a, 0xea; prmt.b32 a, a, 0, 0x4420; "
        + "shr.u32 last, a, 1; lop3.b32 last, last, 0x4444, 0x3210, 0xea; and.b32 a, a, 0x7777; "
        + "prmt.b32 l0, l0, l1, a; prmt.b32 l2, l2, l3, a; prmt.b32 l0, l0, l2, last; "
        + "prmt.b32 u0, u0, u1, a; prmt.b32 u2, u2, u3, a; prmt.b32 u0, u0, u2, last; "
        + "prmt.b32 $0, l0, u0, 0x6240; prmt.b32 $1, l0, u0, 0x7351;}",
        "=r,=r,r,r,r,r",
        [words],
        dtype=DTYPE.value,
        is_pure=True,
        pack=4,
    )  # fmt: skip
