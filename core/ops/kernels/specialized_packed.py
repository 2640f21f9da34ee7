"""x @ weight^T with a packed weight on Hopper: a producer warp fetches blocks, warp groups decode and multiply them.

Decoding takes about as long as reading the codes, and the tensor cores as long again with some tens of rows, so none of
the three may wait for another. A producer warp keeps a ring of blocks in shared memory filled, across tiles. Each
consumer warp group has some rows of the weight: it decodes them into the registers of the left operand, and decodes the
next strip while the tensor cores multiply this one. The first codes and scales are fetched before the preceding kernel
has ended.

The work is divided as in matmul.py (Stream-K), scales are applied as in packed_matmul.py.

Shapes: T tokens, I inputs of a strip, O outputs of a warp group, G groups.
"""

from __future__ import annotations

from math import gcd, prod

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops.formats import SUM_COLUMNS
from dovetail.core.ops.kernels.decoders import scaled_e2m1_words
from dovetail.core.ops.kernels.gluon import (
    LINE,
    PRODUCER_REGISTERS,
    advance,
    barrier,
    consumer_registers,
    launch_registers,
    tensor_map,
)
from dovetail.core.ops.kernels.launch import dependent
from dovetail.core.ops.kernels.packed_end import reduce_split, write
from dovetail.core.ops.kernels.packed_operands import (
    decode,
    factor_of_scale,
    filled,
    load_words,
    multiply,
    of_block,
    restore,
    scaled,
    scales_of_block,
    subtract,
)
from dovetail.core.ops.kernels.packed_ring import LANES, fill, following, group_map, map_of_sums, produce
from dovetail.core.ops.packed_tiles import MOST_SUBTRACTED, SUMMED, places_that_fit
from dovetail.core.ops.packing import SCALES, maps_groups
from dovetail.core.ops.padding import readable_rows
from dovetail.core.ops.tiles import MatmulTile
from dovetail.core.ops.weight_formats import E2M1

WHOLE = 1 << 30
"""SPAN of a matrix with one scale for each row: a multiple of every block."""
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ONE = {torch.float8_e4m3fn: 0x38, torch.bfloat16: 0x3F80, torch.float16: 0x3C00}
"""Bits of 1."""
MOST_IN_FLIGHT = gl.constexpr(64)
"""Tokens of a tile up to which matrix instructions of a run stay in flight while the sums of the one before are scaled.
With more, threads lack registers for two sums beside the result."""


@gluon.jit
def _consume(rings, work, begin, split, less, epilogue, size, GROUP_O: gl.constexpr,
             BLOCK_T: gl.constexpr, BOXES: gl.constexpr, X_BOXES: gl.constexpr, GROUPS: gl.constexpr,
             PLACES: gl.constexpr, BITS: gl.constexpr, SPAN: gl.constexpr, RUN: gl.constexpr, SUMS: gl.constexpr,
             STRIP: gl.constexpr, DECODE: gl.constexpr, NARROW: gl.constexpr, SHIFT: gl.constexpr, UNIT: gl.constexpr,
             FACTORS: gl.constexpr, SCALE_ROWS: gl.constexpr, ZERO_ROWS: gl.constexpr,
             WHICH: gl.constexpr):  # fmt: skip
    """Consumer warp group for outputs [GROUP_O * WHICH, GROUP_O * (WHICH + 1)) of each tile."""
    x, codes, scale_ring, zero_ring, sum_ring, full, empty = rings
    ZERO: gl.constexpr = zero_ring is not None
    # Sums of x are in memory: one matrix instruction for two runs subtracts shifts and zeros.
    SUMMED: gl.constexpr = sum_ring is not None
    lo, hi, blocks, t_tiles = work
    part_ptr, count_ptr, units = split
    tokens, outputs = size
    DTYPE: gl.constexpr = x.dtype
    STRIPS: gl.constexpr = 32 // BITS
    PIECES: gl.constexpr = LANES // STRIP
    RUNS: gl.constexpr = STRIPS * BOXES * PIECES // RUN
    STEP: gl.constexpr = RUN * STRIP
    INPUTS: gl.constexpr = RUNS * STEP
    X_STRIPS: gl.constexpr = STRIPS * BOXES // X_BOXES
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 256 // DTYPE.primitive_bitwidth])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 32 // DTYPE.primitive_bitwidth)
    # The same order of numbers, but the type of instructions in bfloat16, which subtract.
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16]) if SUMMED else ACC
    BY_SUM: gl.constexpr = gl.SliceLayout(1, ACC)
    BY_CODE: gl.constexpr = gl.SliceLayout(1, LEFT)
    SCALED: gl.constexpr = BY_SUM if SUMS else BY_CODE
    # A second matrix instruction for each strip subtracts shifts from sums of codes.
    SUBTRACTS: gl.constexpr = NARROW and SHIFT is not None and not SUMMED
    BY_ZERO: gl.constexpr = BY_SUM if SUBTRACTS or SUMMED else BY_CODE
    # A wait counts to 7 at most.
    IN_RUN: gl.constexpr = min(RUN * (2 if SUBTRACTS else 1), 7)
    FLIGHT: gl.constexpr = BLOCK_T <= MOST_IN_FLIGHT
    # With FACTORS, four scales are loaded in a word.
    IN_WORD: gl.constexpr = 4 if FACTORS else 1
    place, phase = 0, 0
    o_tile, t_tile, first = begin
    unit = lo
    while unit < hi:
        last = gl.minimum(first + hi - unit, blocks)
        row_o = (o_tile * GROUPS + WHICH) * GROUP_O
        acc = gl.zeros([GROUP_O, BLOCK_T], gl.float32, RESULT)
        for block in range(first, last):
            mbarrier.wait(full.index(place), phase)
            scales = scales_of_block(
                scale_ring, place, block, SCALED, INPUTS, SPAN, STEP, SCALE_ROWS, GROUPS, WHICH, FACTORS
            )
            zeros = ()
            if ZERO:
                zeros = of_block(zero_ring, place, block, BY_ZERO, INPUTS, SPAN, STEP, ZERO_ROWS, GROUPS, WHICH)
            nothing = gl.zeros([GROUP_O, BLOCK_T], gl.float32, ACC)
            sums, of_x = nothing, nothing
            for run in gl.static_range(RUNS):
                before, x_before = sums, of_x
                if SUMMED and run % 2 == 0:
                    acc = subtract(acc, scales, zeros, sum_ring.index(place), run // 2, SHIFT)
                for at in gl.static_range(run * RUN, run * RUN + RUN):
                    if at % (STRIPS * PIECES) == 0:
                        box = codes.index((place * BOXES + at // (STRIPS * PIECES)) * GROUPS + WHICH)
                        words = load_words(box, LEFT, PIECES)
                    zero = zeros[run] if ZERO and not (SUBTRACTS or SUMMED) else None
                    scale = None if SUMS else scales[run // IN_WORD]
                    strip_words = words[at % PIECES]
                    if FACTORS:
                        factor_O1 = factor_of_scale(scale, run % IN_WORD, DTYPE)[:, None]
                        w_OI = scaled_e2m1_words(strip_words, factor_O1, at // PIECES % STRIPS * BITS, DTYPE)
                    else:
                        w_OI = decode(
                            strip_words, at // PIECES % STRIPS, zero, scale, DECODE, DTYPE, BITS, NARROW, SHIFT
                        )
                    x_box = x.index(place * X_BOXES + at // (X_STRIPS * PIECES))
                    x_IT = x_box.slice(at % (X_STRIPS * PIECES) * STRIP, STRIP, 1).permute((1, 0))
                    if SUMS:
                        sums = multiply(w_OI, x_IT, sums, nothing, at == run * RUN)
                        if SUBTRACTS:
                            if not ZERO:
                                sums = warpgroup_mma(less, x_IT, sums, is_async=True)
                            else:
                                of_x = multiply(less, x_IT, of_x, nothing, at == run * RUN)
                    else:
                        acc = warpgroup_mma(w_OI, x_IT, acc, is_async=True)
                if SUMS and FLIGHT:
                    if run > 0:
                        # This run's instructions stay in flight.
                        zero = zeros[run - 1] if ZERO else None
                        if SUMMED and (run == 1 or run % 2 == 0):
                            before, acc = warpgroup_mma_wait(IN_RUN, deps=[before, acc])
                        acc += gl.convert_layout(
                            scaled(before, x_before, scales[run - 1], zero, IN_RUN, SUBTRACTS, SHIFT, UNIT), RESULT
                        )
                elif SUMS:
                    zero = zeros[run] if ZERO else None
                    if SUMMED and run % 2 == 0:
                        sums, acc = warpgroup_mma_wait(0, deps=[sums, acc])
                    acc += gl.convert_layout(scaled(sums, of_x, scales[run], zero, 0, SUBTRACTS, SHIFT, UNIT), RESULT)
            if SUMS and FLIGHT:
                zero = zeros[RUNS - 1] if ZERO else None
                acc += gl.convert_layout(scaled(sums, of_x, scales[RUNS - 1], zero, 0, SUBTRACTS, SHIFT, UNIT), RESULT)
            elif not SUMS:
                acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(place))
            place, phase = advance(place, phase, PLACES)
        row_t = t_tile * BLOCK_T
        if FACTORS:
            acc = acc * restore(DTYPE)
        if part_ptr is None:
            write(acc, row_o, row_t, epilogue, tokens, outputs, GROUP_O, BLOCK_T)
        elif last - first == blocks:
            write(acc, row_o, row_t, epilogue, tokens, outputs, GROUP_O, BLOCK_T)
        else:
            tile = o_tile * t_tiles + t_tile
            total, is_last = reduce_split(acc, tile, last - first, (units, blocks), part_ptr, count_ptr, GROUP_O,
                                          BLOCK_T, GROUPS, WHICH)  # fmt: skip
            if is_last:
                write(total, row_o, row_t, epilogue, tokens, outputs, GROUP_O, BLOCK_T)
        unit += last - first
        o_tile, t_tile, first = following((o_tile, t_tile, blocks - 1), blocks, t_tiles)


@gluon.jit(do_not_specialize=["tokens", "x_scale_st", "t_tiles", "blocks", "units"])
def packed_specialized(
    x_source,
    source,
    scale_source,
    zero_source,
    sum_source,
    x_scale_ptr,
    row_scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    tokens,
    outputs,
    x_scale_st,
    t_tiles,
    blocks,
    units,
    GROUPS: gl.constexpr,
    BOXES: gl.constexpr,
    X_BOXES: gl.constexpr,
    PLACES: gl.constexpr,
    BITS: gl.constexpr,
    SPAN: gl.constexpr,
    RUN: gl.constexpr,
    SUMS: gl.constexpr,
    STRIP: gl.constexpr,
    DECODE: gl.constexpr,
    NARROW: gl.constexpr,
    SHIFT: gl.constexpr,
    UNIT: gl.constexpr,
    FACTORS: gl.constexpr,
    LESS: gl.constexpr,
    RESIDENTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A block has BOXES boxes of LANES words and X_BOXES of x. GROUPS: consumer warp groups, 1, 2 or 4. PLACES:
    blocks in the ring. SPAN: inputs of a scale, or of a word of scales. STRIP: inputs that are decoded together, LANES
    or half as many. RUN: strips that are summed together. LESS: bits of a number in the type of x that multiplies sums
    of x, or None."""
    GROUP_O: gl.constexpr = source.block_type.shape[0]
    BLOCK_T: gl.constexpr = x_source.block_type.shape[0]
    codes = gl.allocate_shared_memory(gl.int32, [PLACES * BOXES * GROUPS, GROUP_O, LANES], source.layout)
    x = gl.allocate_shared_memory(x_source.dtype, [PLACES * X_BOXES, BLOCK_T, x_source.block_type.shape[1]],
                                  x_source.layout)  # fmt: skip
    INPUTS: gl.constexpr = BOXES * LANES * (32 // BITS)
    SCALE_ROWS: gl.constexpr = scale_source.block_type.shape[0]
    scales = gl.allocate_shared_memory(scale_source.dtype, [PLACES, SCALE_ROWS, GROUPS * GROUP_O], scale_source.layout)
    scale_ring = scales._reinterpret(scales.dtype, [PLACES * SCALE_ROWS * GROUPS, GROUP_O], VECTOR)
    zeros, zero_ring, sums = None, None, None
    ZERO_ROWS: gl.constexpr = 0 if zero_source is None else zero_source.block_type.shape[0]
    OF_ZEROS: gl.constexpr = 0 if zero_source is None else zero_source.block_type.nbytes
    OF_CODES: gl.constexpr = BOXES * GROUPS * source.block_type.nbytes
    OF_X: gl.constexpr = X_BOXES * x_source.block_type.nbytes
    OF_SUMS: gl.constexpr = 0 if sum_source is None else sum_source.block_type.nbytes
    BYTES: gl.constexpr = OF_CODES + OF_X + scale_source.block_type.nbytes + OF_ZEROS + OF_SUMS
    if zero_source is not None:
        zeros = gl.allocate_shared_memory(zero_source.dtype, [PLACES, ZERO_ROWS, GROUPS * GROUP_O], zero_source.layout)
        zero_ring = zeros._reinterpret(zeros.dtype, [PLACES * ZERO_ROWS * GROUPS, GROUP_O], VECTOR)
    if sum_source is not None:
        sums = gl.allocate_shared_memory(
            sum_source.dtype, [PLACES, BLOCK_T, sum_source.block_type.shape[1]], sum_source.layout
        )
    less = x
    if LESS is not None:
        less = filled(GROUP_O, STRIP, LESS, x.dtype)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    barrier()
    mine, programs = gl.program_id(0), gl.num_programs(0)
    if part_ptr is None:
        tiles = units // blocks
        lo, hi = mine * tiles // programs * blocks, (mine + 1) * tiles // programs * blocks
    else:
        lo, hi = mine * units // programs, (mine + 1) * units // programs
    work = (lo, hi, blocks, t_tiles)
    tile = lo // blocks
    begin = (tile // t_tiles, tile % t_tiles, lo - tile * blocks)
    copied = (x, codes, scales, zeros, sums, full, empty)
    rings = (x, codes, scale_ring, zero_ring, sums, full, empty)
    sources = (source, scale_source, zero_source)
    x_sources = (x_source, sum_source)
    epilogue = (x_scale_ptr, x_scale_st, row_scale_ptr, bias_ptr, out_ptr)
    size = (tokens, outputs)
    split = (part_ptr, count_ptr, units)
    unit = fill(x_sources, sources, copied, work, begin, INPUTS, SPAN, BYTES, BOXES, X_BOXES, GROUPS, PLACES, PDL)
    # The partitions start after the wait, so all of them see what earlier kernels wrote.
    REGISTERS: gl.constexpr = consumer_registers(GROUPS, RESIDENTS)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (rings, work, begin, split, less, epilogue, size, GROUP_O, BLOCK_T, BOXES, X_BOXES, GROUPS,
                            PLACES, BITS, SPAN, RUN, SUMS, STRIP, DECODE, NARROW, SHIFT, UNIT, FACTORS, SCALE_ROWS,
                            ZERO_ROWS, 0)),
                (produce, (x_sources, sources, copied, work, unit, INPUTS, SPAN, BYTES, BOXES, X_BOXES, GROUPS, PLACES,
                           PDL)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (rings, work, begin, split, less, epilogue, size, GROUP_O, BLOCK_T, BOXES, X_BOXES, GROUPS,
                            PLACES, BITS, SPAN, RUN, SUMS, STRIP, DECODE, NARROW, SHIFT, UNIT, FACTORS, SCALE_ROWS,
                            ZERO_ROWS, 0)),
                (_consume, (rings, work, begin, split, less, epilogue, size, GROUP_O, BLOCK_T, BOXES, X_BOXES, GROUPS,
                            PLACES, BITS, SPAN, RUN, SUMS, STRIP, DECODE, NARROW, SHIFT, UNIT, FACTORS, SCALE_ROWS,
                            ZERO_ROWS, 1)),
                (produce, (x_sources, sources, copied, work, unit, INPUTS, SPAN, BYTES, BOXES, X_BOXES, GROUPS, PLACES,
                           PDL)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (rings, work, begin, split, less, epilogue, size, GROUP_O, BLOCK_T, BOXES, X_BOXES, GROUPS,
                            PLACES, BITS, SPAN, RUN, SUMS, STRIP, DECODE, NARROW, SHIFT, UNIT, FACTORS, SCALE_ROWS,
                            ZERO_ROWS, 0)),
                (_consume, (rings, work, begin, split, less, epilogue, size, GROUP_O, BLOCK_T, BOXES, X_BOXES, GROUPS,
                            PLACES, BITS, SPAN, RUN, SUMS, STRIP, DECODE, NARROW, SHIFT, UNIT, FACTORS, SCALE_ROWS,
                            ZERO_ROWS, 1)),
                (_consume, (rings, work, begin, split, less, epilogue, size, GROUP_O, BLOCK_T, BOXES, X_BOXES, GROUPS,
                            PLACES, BITS, SPAN, RUN, SUMS, STRIP, DECODE, NARROW, SHIFT, UNIT, FACTORS, SCALE_ROWS,
                            ZERO_ROWS, 2)),
                (_consume, (rings, work, begin, split, less, epilogue, size, GROUP_O, BLOCK_T, BOXES, X_BOXES, GROUPS,
                            PLACES, BITS, SPAN, RUN, SUMS, STRIP, DECODE, NARROW, SHIFT, UNIT, FACTORS, SCALE_ROWS,
                            ZERO_ROWS, 3)),
                (produce, (x_sources, sources, copied, work, unit, INPUTS, SPAN, BYTES, BOXES, X_BOXES, GROUPS, PLACES,
                           PDL)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def launch_packed(
    x_TI: torch.Tensor,
    packed: PackedWeight,
    out_TO: torch.Tensor,
    tile: MatmulTile,
    parts: torch.Tensor | None,
    counts: torch.Tensor | None,
    x_scale_T1: torch.Tensor | None,
    bias_O: torch.Tensor | None,
    sums_TS: torch.Tensor | None = None,
) -> None:
    """Launch the kernel. Arguments as in core.ops.kernels.packed_matmul."""
    tokens, inputs = x_TI.shape
    outputs = len(packed.codes)
    if not maps_groups(packed):
        raise ValueError(
            f"scales have the strides {packed.scale.stride()}: the kernel for Hopper reads those that "
            "dovetail.core.ops.packing.empty_by_group allocates"
        )
    warp_groups = tile.warps // 4
    t_tiles, tiles, blocks, programs = tile.launch(tokens, outputs, inputs)
    fp8 = x_TI.dtype is torch.float8_e4m3fn
    strip = min(packed.group or LANES.value, LANES.value)
    span = min(WHOLE, (packed.group or WHOLE) * (SCALES if packed.scale.dtype is torch.int32 else 1))
    _, step = packed.steps
    maps = [None if one is None else group_map(one, step, tile, span) for one in (packed.scale, packed.zero)]
    # More FP8 products than a line has would lose bits in the tensor core's accumulator.
    run = min(gcd(packed.group, tile.inputs) // strip, LINE.value // strip if fp8 else tile.inputs)
    whole_zeros = packed.zero is None or packed.zero.dtype is torch.uint8
    # Zeros that are no integers and scales with more bits than x take more instructions of a weight than of a sum.
    short = whole_zeros and packed.scale.dtype in (x_TI.dtype, torch.float8_e4m3fn, torch.int32)
    subtracted = whole_zeros or x_TI.dtype in packed.format.shifted
    sums = fp8 or (subtracted and (4 if short else 2) * tile.tokens <= strip * run)
    narrow, shifted, less = fp8 and packed.format.narrow_words, None, None
    sum_map, runs = None, tile.inputs // (strip * run)
    fits = strip * run == SUMMED and runs % 2 == 0
    summed = sums_TS is not None and fp8 and torch.float8_e4m3fn in packed.format.shifted
    if summed and fits and tile.tokens > MOST_SUBTRACTED:
        narrow, shifted = True, packed.format.shifted[torch.float8_e4m3fn]
        sum_map = map_of_sums(sums_TS, tile.tokens, SUM_COLUMNS * runs)
    elif fp8 and tile.tokens <= MOST_SUBTRACTED and torch.float8_e4m3fn in packed.format.shifted:
        narrow, shifted = True, packed.format.shifted[torch.float8_e4m3fn]
        # For sums of x times the shift, or sums of x where each group has a zero of its own.
        less = shifted.less if packed.zero is None else ONE[x_TI.dtype]
    elif sums and not whole_zeros:
        narrow, shifted, less = True, packed.format.shifted[x_TI.dtype], ONE[x_TI.dtype]
    elif not sums and not short:
        # One instruction multiplies by the scale and subtracts shift and zero.
        shifted = packed.format.shifted.get(torch.float32) or packed.format.shifted.get(x_TI.dtype)
    elif packed.zero is not None:
        # One instruction subtracts both the shift and the zero.
        shifted = packed.format.shifted.get(torch.float16 if fp8 else x_TI.dtype)
    of_groups = sum(prod(one.block_shape) * one.base.element_size() for one in maps if one is not None)
    inputs_bits = 8 * tile.tokens * x_TI.element_size() + tile.outputs * packed.format.stored_bits
    of_sums = 0 if sum_map is None else prod(sum_map.block_shape) * sums_TS.element_size()
    block = tile.inputs * inputs_bits // 8 + of_groups + of_sums
    operand = 0 if less is None else tile.outputs // warp_groups * strip * x_TI.element_size()
    packed_specialized[(programs,)](
        tensor_map(x_TI, tile.tokens, readable_rows(x_TI, tile.tokens)),
        tensor_map(packed.codes, tile.outputs // warp_groups, outputs),
        *maps,
        sum_map,
        x_scale_T1,
        packed.row_scale,
        bias_O,
        out_TO,
        parts,
        counts,
        tokens,
        outputs,
        0 if x_scale_T1 is None or x_scale_T1.numel() == 1 else x_scale_T1.stride(0),
        t_tiles,
        blocks,
        tiles * blocks,
        GROUPS=warp_groups,
        BOXES=tile.inputs * packed.format.stored_bits // (32 * LANES.value),
        X_BOXES=tile.inputs * x_TI.element_size() // LINE.value,
        PLACES=places_that_fit(tile, block, operand, out_TO.element_size()),
        BITS=packed.format.stored_bits,
        SPAN=span,
        RUN=run,
        SUMS=sums,
        STRIP=strip,
        DECODE=packed.format.decode_words if shifted is None else shifted.decode,
        NARROW=narrow,
        SHIFT=None if shifted is None else shifted.shift,
        UNIT=1.0 if shifted is None else shifted.unit,
        # Of NVFP4, scales of four groups are loaded and decoded together.
        FACTORS=packed.format is E2M1 and packed.scale.dtype is torch.int32 and strip < LANES.value,
        LESS=less,
        RESIDENTS=tile.residents,
        num_warps=4,
        maxnreg=launch_registers(warp_groups, tile.residents),
        **dependent(x_TI),
    )
