"""Consumer warp groups of specialized_experts.py for weights in 4 bits (core.ops.packed_experts), which they decode.

Decoded weights are the left operand, whose registers the tensor cores read while the next strip is decoded. Exponents
are applied to them, as with many rows in packed_experts.py.

Shapes: O outputs of a box, I inputs of a strip.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from dovetail.core.ops.kernels.decoders import scaled_e2m1_words
from dovetail.core.ops.kernels.expert_units import BOX, factors_of, finish, keep, pairs_of, unit_of
from dovetail.core.ops.kernels.gluon import advance
from dovetail.core.ops.packed_experts import EACH, SPANS

LANES = gl.constexpr(SPANS[0])
"""Words of a span."""
STRIPS = gl.constexpr(EACH)
FLIGHT = gl.constexpr(2)
"""Strips in flight. Each holds the registers of its left operand until it has been multiplied."""
BELOW = gl.constexpr(64)
"""In bfloat16, decoded weights are smaller by the factor 2^BELOW, so that one product applies the exponents of codes
and of blocks: the ratio of the exponents' biases is 2^126, which leaves room for factors up to 2^1."""
RESTORE = gl.constexpr(float(2**64))
"""2^BELOW."""
X_BOXES = gl.constexpr(4)
"""Boxes of x in a span, of 64 inputs in 16 bits."""


@gluon.jit
def _factor(packed_O, AT: gl.constexpr, DTYPE: gl.constexpr):
    """Return the factors for scaled_e2m1_words of the exponents at bit AT of int64."""
    word = (packed_O >> AT // 32 * 32).to(gl.int32)
    BYTE: gl.constexpr = "prmt.b32 $0, $1, 0, 0x444" + ("0", "1", "2", "3")[AT % 32 // 8] + ";"
    exponent = gl.inline_asm_elementwise(BYTE, "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)
    if DTYPE == gl.bfloat16:
        return (exponent + (126 - BELOW)) * 0x00800080
    else:
        # 2^14, the ratio of the exponents' biases.
        value = (gl.minimum(exponent + 14, 254) << 23).to(gl.float32, bitcast=True).to(DTYPE)
        return (value.to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) * 0x00010001


@gluon.jit
def _add_span(acc, box, x, x_place, exponents_O, LEFT: gl.constexpr, WORDS: gl.constexpr):
    """Start acc + weight @ x of a span of WORDS words, 32 or 16."""
    words = box.load(LEFT)
    for strip in gl.static_range(STRIPS):
        factor_O = _factor(exponents_O, strip * WORDS // 32 * 8, x.dtype)
        weight_OI = scaled_e2m1_words(words, factor_O[:, None], 4 * strip, x.dtype)
        x_box = x.index(x_place + strip * WORDS // 64)
        x_IT = x_box.slice(strip * WORDS % 64, WORDS, 1).permute((1, 0))
        acc = warpgroup_mma(weight_OI, x_IT, acc, is_async=True)
        if strip >= FLIGHT - 1:
            acc = warpgroup_mma_wait(FLIGHT - 1, deps=[acc])
    return acc


@gluon.jit
def _add_short_span(acc, box, x_box, exponents_O, LEFT: gl.constexpr):
    """The same with 8 words: two codes of each are 16 consecutive inputs."""
    SHORT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
    words = box.load(SHORT)
    for step in gl.static_range(4):
        factor_O = gl.convert_layout(_factor(exponents_O, step // 2 * 8, x_box.dtype), gl.SliceLayout(1, SHORT))
        low = scaled_e2m1_words(words, factor_O[:, None], 8 * step, x_box.dtype)
        high = scaled_e2m1_words(words, factor_O[:, None], 8 * step + 4, x_box.dtype)
        value_OI = gl.join(low, high).permute((0, 2, 1)).reshape((64, 16))
        weight_OI = gl.convert_layout(value_OI, LEFT)
        acc = warpgroup_mma(weight_OI, x_box.slice(step * 16, 16, 1).permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def _exponents(ptr, at, o, outputs, leap, GATED: gl.constexpr):
    """Return the exponents of a span for both boxes."""
    next_o = o if GATED else o + BOX
    first = gl.load(ptr + at + o, mask=o < outputs, other=0)
    return first, gl.load(ptr + at + leap + o, mask=next_o < outputs, other=0)


@gluon.jit
def consume_packed(rings, work, notes, scale, epilogue, size, BLOCK_T: gl.constexpr, ACTIVE: gl.constexpr,
                   GATED: gl.constexpr, LIMITED: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
                   PLACES: gl.constexpr, TAIL: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Consumer warp group for outputs [WIDE * WHICH, WIDE * (WHICH + 1)) of each tile."""
    x, codes, full, empty = rings
    tiles_ptr, live, o_tiles, order_ptr = work
    outputs, rows, leap, blocks = size
    exponents_ptr, groups = scale
    spans = blocks - (TAIL > 0)
    WIDE: gl.constexpr = BOX if GATED else 2 * BOX
    TAILS: gl.constexpr = (TAIL > 0) + (TAIL == 192)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    o_code = gl.arange(0, BOX, gl.SliceLayout(1, LEFT))
    units = live * o_tiles
    row_spans = rows.to(gl.int64) * (spans + TAILS)
    place, phase = 0, 0
    unit = gl.program_id(0)
    expert, first, end, o_tile = unit_of(tiles_ptr, unit, live, o_tiles, GROUP)
    start = (o_tile * GROUPS + WHICH) * WIDE
    of_a, of_b = _exponents(exponents_ptr, expert * row_spans, start + o_code, outputs, leap, GATED)
    pair_T = pairs_of(order_ptr, first, end, BLOCK_T)
    while unit < units:
        unit += gl.num_programs(0)
        next_expert, next_first, next_end, next_o = unit_of(tiles_ptr, unit, live, o_tiles, GROUP)
        of_rows = factors_of(epilogue, pair_T, first, end, ACTIVE, GATED)
        next_start = (next_o * GROUPS + WHICH) * WIDE
        acc = gl.zeros([BOX, BLOCK_T], gl.float32, ACC)
        more = acc
        for span in range(spans):
            mbarrier.wait(full.index(place), phase)
            # Those of the next block, whose latency overlaps with this one.
            ends = (span + 1 == spans) & (TAIL == 0)
            at = gl.where(ends, next_expert * row_spans, expert * row_spans + (span + 1) * rows)
            o = gl.where(ends, next_start, start) + o_code
            next_a, next_b = _exponents(exponents_ptr, at, o, outputs, leap, GATED)
            box = codes.index((place * 2) * GROUPS + WHICH)
            acc = _add_span(acc, box, x, place * X_BOXES, of_a, LEFT, LANES)
            box = codes.index((place * 2 + 1) * GROUPS + WHICH)
            more = _add_span(more, box, x, place * X_BOXES, of_b, LEFT, LANES)
            acc, more = warpgroup_mma_wait(0, deps=[acc, more])
            mbarrier.arrive(empty.index(place))
            place, phase = advance(place, phase, PLACES)
            of_a, of_b = next_a, next_b
        if TAIL > 0:
            mbarrier.wait(full.index(place), phase)
            next_a, next_b = _exponents(
                exponents_ptr, next_expert * row_spans, next_start + o_code, outputs, leap, GATED
            )
            box = codes.index((place * 2) * GROUPS + WHICH)
            box_up = codes.index((place * 2 + 1) * GROUPS + WHICH)
            if TAIL >= 128:
                acc = _add_span(acc, box.slice(0, 16, 1), x, place * X_BOXES, of_a, LEFT, 16)
                more = _add_span(more, box_up.slice(0, 16, 1), x, place * X_BOXES, of_b, LEFT, 16)
            if TAIL == 192:
                at = expert * row_spans + (spans + 1) * rows
                of_a, of_b = _exponents(exponents_ptr, at, start + o_code, outputs, leap, GATED)
            if TAIL % 128 == 64:
                AT: gl.constexpr = TAIL // 128 * 16
                x_box = x.index(place * X_BOXES + TAIL // 64 - 1)
                acc = _add_short_span(acc, box.slice(AT, 8, 1), x_box, of_a, LEFT)
                more = _add_short_span(more, box_up.slice(AT, 8, 1), x_box, of_b, LEFT)
            acc, more = warpgroup_mma_wait(0, deps=[acc, more])
            mbarrier.arrive(empty.index(place))
            place, phase = advance(place, phase, PLACES)
            of_a, of_b = next_a, next_b
        if x.dtype == gl.bfloat16:
            acc, more = acc * RESTORE, more * RESTORE
        pair_T = pairs_of(order_ptr, next_first, next_end, BLOCK_T)
        keep(notes, epilogue, of_rows, GATED, WHICH)
        finish(acc, more, (expert, first, end), notes, epilogue, size, start, GATED, LIMITED, WHICH)
        expert, first, end, start = next_expert, next_first, next_end, next_start
