"""Operands of core.ops.kernels.specialized_packed: decoded strips of a weight, their scales and zeros.

Shapes: T tokens, I inputs of a strip, O outputs of a warp group, G groups.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from dovetail.core.ops.kernels.packed_ring import LANES


@gluon.jit
def of_block(ring, place, block, LAYOUT: gl.constexpr, INPUTS: gl.constexpr, SPAN: gl.constexpr, STEP: gl.constexpr,
             ROWS: gl.constexpr, GROUPS: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Return the scales or zeros of a block in the ring: [O] for every STEP inputs, or the word that has them. INPUTS:
    those of a block. SPAN: those of a scale or word. ROWS: scales of an output in the ring's block."""
    values = ()
    for at in gl.static_range(INPUTS // STEP):
        if INPUTS % SPAN == 0 or SPAN % INPUTS == 0:
            row = at * STEP // SPAN
        else:
            # Scales or words begin and end within blocks.
            row = (block * INPUTS + at * STEP) // SPAN - block * INPUTS // SPAN
        values += (ring.index((place * ROWS + row) * GROUPS + WHICH).load(LAYOUT),)  # type: ignore[assignment]
    return values


@gluon.jit
def scales_of_block(ring, place, block, LAYOUT: gl.constexpr, INPUTS: gl.constexpr, SPAN: gl.constexpr,
                    STEP: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, WHICH: gl.constexpr,
                    FACTORS: gl.constexpr):  # fmt: skip
    """Return the scales of each run of STEP inputs of a block, as of_block does. FACTORS: words, each with the scales
    of four runs."""
    if FACTORS:
        return of_block(ring, place, block, LAYOUT, INPUTS, SPAN, 4 * STEP, ROWS, GROUPS, WHICH)
    elif ring.dtype == gl.int32:
        words = of_block(ring, place, block, LAYOUT, INPUTS, SPAN, STEP, ROWS, GROUPS, WHICH)
        values = ()
        for run in gl.static_range(INPUTS // STEP):
            bits = words[run] >> ((block * INPUTS + run * STEP) // (SPAN // 4) % 4 * 8)
            values += (bits.to(gl.int8).to(gl.float8e4nv, bitcast=True),)  # type: ignore[assignment]
        return values
    else:
        return of_block(ring, place, block, LAYOUT, INPUTS, SPAN, STEP, ROWS, GROUPS, WHICH)


@gluon.jit
def decode(words, strip: gl.constexpr, zero, scale, DECODE: gl.constexpr, DTYPE: gl.constexpr, BITS: gl.constexpr,
            NARROW: gl.constexpr, SHIFT: gl.constexpr):  # fmt: skip
    """Return a strip of the left operand [O, I]. `zero`, `scale`: [O] or None; a zero that is no integer has a scale.
    NARROW: DECODE returns codes as they are multiplied. SHIFT: what DECODE adds, or None."""
    # E4M3 has no arithmetic, so words are decoded to float16, which holds its numbers.
    CODE: gl.constexpr = gl.float16 if DTYPE == gl.float8e4nv and not NARROW else DTYPE
    value = DECODE(words, strip * BITS, CODE)
    if in_float32(None if zero is None else zero.dtype, None if scale is None else scale.dtype, CODE):
        return scaled_once(value, zero, scale, DTYPE, SHIFT)
    if zero is not None:
        # Whole zeros are exact in 16 bits.
        zero = zero.to(CODE)
        if SHIFT is not None:
            zero += gl.full([], SHIFT, CODE)
        value -= zero[:, None]
    if scale is not None:
        # The product with a scale of few bits is rounded once.
        value *= scale.to(CODE)[:, None]
    return value.to(DTYPE)


@gluon.constexpr_function
def in_float32(zero, scale, code):
    """Return whether codes less zeros times scales need float32: the scale has more bits than `code`, the type they are
    decoded to, or the zero is no integer. `zero`, `scale`: their types, or None."""
    return scale is not None and (scale not in (code, gl.float8e4nv) or zero not in (None, gl.uint8))


@gluon.jit
def scaled_once(value, zero, scale, DTYPE: gl.constexpr, SHIFT: gl.constexpr):
    """Return (value - SHIFT - zero) * scale, rounded to DTYPE from float32, or from the sum of two products."""
    scale_O = scale.to(gl.float32)
    if SHIFT is not None:
        less_O = gl.full(scale_O.shape, SHIFT, gl.float32, scale_O.type.layout)
        if zero is not None:
            less_O += zero.to(gl.float32)
        return (value.to(gl.float32) * scale_O[:, None] - (less_O * scale_O)[:, None]).to(DTYPE)
    elif zero is not None:
        return ((value.to(gl.float32) - zero.to(gl.float32)[:, None]) * scale_O[:, None]).to(DTYPE)
    elif DTYPE == gl.bfloat16:
        # Half of the instructions: a scale is the sum of two numbers in bfloat16, but for its last bits.
        large_O = scale_O.to(gl.bfloat16)
        small_O = (scale_O - large_O.to(gl.float32)).to(gl.bfloat16)
        return gl.fma(value, large_O[:, None], value * small_O[:, None])
    else:
        return (value.to(gl.float32) * scale_O[:, None]).to(DTYPE)


@gluon.jit
def multiply(w_OI, x_IT, sums, nothing, FIRST: gl.constexpr):
    """Start sums + w @ x, or w @ x if it is the FIRST strip of a run."""
    if FIRST:
        return warpgroup_mma(w_OI, x_IT, nothing, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(w_OI, x_IT, sums, is_async=True)


@gluon.jit
def scaled(sums, of_x, scale, zero, LEFT_OVER: gl.constexpr, SUBTRACTS: gl.constexpr, SHIFT: gl.constexpr,
            UNIT: gl.constexpr):  # fmt: skip
    """Wait for a run's sums, but not for the last LEFT_OVER instructions, and scale them. `of_x`: sums of x alone."""
    scale_O = scale.to(gl.float32) * (1.0 / UNIT)
    if SUBTRACTS and zero is not None:
        sums, of_x = warpgroup_mma_wait(LEFT_OVER, deps=[sums, of_x])
        sums -= of_x * ((zero.to(gl.float32) + SHIFT) * UNIT)[:, None]
    else:
        sums = warpgroup_mma_wait(LEFT_OVER, deps=[sums])
    return sums * scale_O[:, None]


@gluon.jit
def subtract(acc, scales, zeros, sums, PAIR: gl.constexpr, SHIFT: gl.constexpr):
    """Start acc minus the scaled shifts and zeros of two runs of a block times the sums of x. `sums` has eight columns
    for each run, of which the first and second, and so on, are alike: the product of scale and shift is split into two
    numbers in bfloat16, which one matrix instruction multiplies by all parts of the sums."""
    GROUP_O: gl.constexpr = acc.shape[0]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    columns = gl.arange(0, 16, gl.SliceLayout(0, LEFT))[None, :]
    left = gl.zeros([GROUP_O, 16], gl.bfloat16, LEFT)
    for i in gl.static_range(2):
        if len(zeros) > 0:
            shift_O = zeros[2 * PAIR + i].to(gl.float32) + SHIFT
        else:
            shift_O = gl.full([GROUP_O], SHIFT, gl.float32, scales[0].type.layout)
        less_O = gl.convert_layout(-shift_O * scales[2 * PAIR + i].to(gl.float32), gl.SliceLayout(1, LEFT))
        large_O = less_O.to(gl.bfloat16)
        small_O = (less_O - large_O.to(gl.float32)).to(gl.bfloat16)
        both = gl.where(columns % 2 == 0, large_O[:, None], small_O[:, None])
        left = gl.where(columns // 8 == i, both, left)
    right = sums.slice(16 * PAIR, 16, 1).permute((1, 0))
    return warpgroup_mma(left, right, acc, is_async=True)


@gluon.constexpr_function
def restore(DTYPE):
    """Return the divisor of decoded codes of E2M1 with scales in E4M3, with which their factors are finite numbers."""
    return 2.0**64 if DTYPE == gl.bfloat16 else 2.0**10


@gluon.jit
def factor_of_scale(words_O, AT: gl.constexpr, DTYPE: gl.constexpr):
    """Return the factors for scaled_e2m1_words, divided by restore, of byte AT of words of scales in E4M3."""
    PLACES: gl.constexpr = ("0x4040", "0x5151", "0x6262", "0x7373")[AT]
    BF16: gl.constexpr = DTYPE == gl.bfloat16
    # The scale times 2^-120 or 2^-8, bits of a 16-bit float with the exponent's bias of E4M3.
    if BF16:
        low, high = (words_O << 4) & -0x0F0F0F10, (words_O >> 4) & 0x07070707
    else:
        low, high = (words_O << 7) & -0x7F7F7F80, (words_O >> 1) & 0x3F3F3F3F
    # The ratios of E2M1 are 2^126 and 2^14, so 2^182, in two steps, and 2^12 remain.
    TIMES: gl.constexpr = (
        "mov.b32 y, 0x7f007f00; mul.bf16x2 x, x, y; mov.b32 y, 0x5b005b00; mul.bf16x2 $0, x, y;"
        if BF16
        else "mov.b32 y, 0x6c006c00; mul.f16x2 $0, x, y;"
    )
    return gl.inline_asm_elementwise(
        "{.reg .b32 x, y; prmt.b32 x, $1, $2, " + PLACES + "; " + TIMES + "}",
        "=r,r,r",
        [low, high],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def load_words(box, LEFT: gl.constexpr, PIECES: gl.constexpr):
    """Return the words of a box as left operands of the same width: the first inputs of all strips, and so on."""
    WIDE: gl.constexpr = LANES // PIECES
    words = ()
    for piece in gl.static_range(PIECES):
        words += (box.slice(piece * WIDE, WIDE, 1).load(LEFT),)  # type: ignore[assignment]
    return words


@gluon.jit
def filled(GROUP_O: gl.constexpr, STRIP: gl.constexpr, BITS: gl.constexpr, DTYPE: gl.constexpr):
    """Return a left operand in shared memory whose numbers are all that of BITS in DTYPE."""
    SIZE: gl.constexpr = DTYPE.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=STRIP * SIZE // 8, element_bitwidth=SIZE, rank=2)
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, STRIP], [32, 1], [4, 1], [1, 0])
    # Converted from float32, every other number came out wrong: ptxas of Triton 3.6 takes a constant for two.
    bits = gl.full([GROUP_O, STRIP], BITS, gl.int8 if SIZE == 8 else gl.int16, BY_ROW)
    return gl.allocate_shared_memory(DTYPE, [GROUP_O, STRIP], LAYOUT, bits.to(DTYPE, bitcast=True))
