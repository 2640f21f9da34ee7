"""x @ weight^T in E4M3 on Hopper, for more rows than specialized_packed keeps sums of groups for.

The tensor core adds up all products of a tile of 256 tokens in its own accumulators, half of a thread's registers, so
none are left for sums of groups. Each weight is therefore scaled and rounded to E4M3 as it is decoded, with one scale
for each output (`PackedWeight.rounded_scale`), as the library's matmul gets it; but nothing is written to memory, and a
weight is decoded once for 256 tokens. CUTLASS's W4A8 matmul likewise multiplies by scales of groups before it rounds.

A producer warp keeps two rings in shared memory filled, one of codes with their scales and one of pieces of x, of which
a block has four times as many bytes. Two warp groups have 64 outputs each: one decodes while the other multiplies. The
work is divided as in matmul.py (Stream-K, Osama et al. 2023); sums of several programs are joined by packed_end.

Shapes: T tokens, I inputs of a strip, O outputs of a warp group.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops import packed_tiles
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
from dovetail.core.ops.kernels.packed_end import join_parts, write
from dovetail.core.ops.kernels.packed_operands import decode, of_block, scales_of_block
from dovetail.core.ops.kernels.packed_ring import LANES, following, group_map
from dovetail.core.ops.kernels.specialized_packed import VECTOR, WHOLE
from dovetail.core.ops.packing import SCALES
from dovetail.core.ops.padding import readable_rows
from dovetail.core.ops.tiles import MatmulTile

GROUPS = gl.constexpr(2)
"""Consumer warp groups. Three, which would read less from the L2 cache, leave threads too few registers."""
BITS = gl.constexpr(4)
"""Stored bits of a code. Codes of 8 bits are not rounded."""
MORE_BLOCKS = gl.constexpr(packed_tiles.MORE_BLOCKS)
GROUP_OUTPUTS = 64
"""Outputs of a warp group."""
PIECES = gl.constexpr(packed_tiles.ROUNDED_PIECES)
"""Pieces of x in a block, with LINE inputs each."""


@gluon.jit
def _ratios(scales, row_O, inverse_O):
    """Return the scales of a block's runs, times those of rows and divided by those of the rounded weight, in float16.
    `row_O`: None = 1."""
    ratios = ()
    for run in gl.static_range(len(scales)):
        scale_O = scales[run].to(gl.float32)
        # Not times the ratio of both: it may be infinite where no number is.
        scale_O = scale_O if row_O is None else scale_O * row_O
        ratios += ((scale_O * inverse_O).to(gl.float16),)
    return ratios


@gluon.jit
def _write(acc, x_scale_T, row_o, row_t, epilogue, tokens, outputs, GROUP_O: gl.constexpr, BLOCK_T: gl.constexpr):
    """Multiply by the scales of x and write a tile. A thread loads two of these scales, where packed_end.write would
    load those of all its tokens, for which registers are lacking."""
    x_scale_T = gl.convert_layout(x_scale_T, gl.SliceLayout(0, acc.type.layout))
    write(acc * x_scale_T[None, :], row_o, row_t, epilogue, tokens, outputs, GROUP_O, BLOCK_T)


@gluon.jit
def _consume(rings, work, begin, split, packed_scales, ends, size, GROUP_O: gl.constexpr, BLOCK_T: gl.constexpr,
             PLACES: gl.constexpr, X_PLACES: gl.constexpr, SPAN: gl.constexpr, STEP: gl.constexpr,
             DECODE: gl.constexpr, SHIFT: gl.constexpr, SCALE_ROWS: gl.constexpr, ZERO_ROWS: gl.constexpr,
             WHICH: gl.constexpr):  # fmt: skip
    """Consumer warp group for outputs [GROUP_O * WHICH, GROUP_O * (WHICH + 1)) of each tile."""
    x, codes, scale_ring, zero_ring, full, empty, x_full, x_empty = rings
    lo, hi, blocks, t_tiles = work
    part_ptr, count_ptr, units, parts = split
    row_scale_ptr, rounded_scale_ptr = packed_scales
    x_scale_ptr, x_scale_st, epilogue = ends
    tokens, outputs = size
    DTYPE: gl.constexpr = gl.float8e4nv
    STRIP: gl.constexpr = LANES
    STRIPS: gl.constexpr = LINE // STRIP
    INPUTS: gl.constexpr = PIECES * LINE
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 32])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    BY_CODE: gl.constexpr = gl.SliceLayout(1, LEFT)
    ONCE: gl.constexpr = gl.BlockedLayout([BLOCK_T // 128], [32], [4], [0])
    place, phase, x_place, x_phase = 0, 0, 0, 0
    o_tile, t_tile, first = begin
    unit = lo
    while unit < hi:
        last = gl.minimum(first + hi - unit, blocks)
        row_o = (o_tile * GROUPS + WHICH) * GROUP_O
        acc = gl.zeros([GROUP_O, BLOCK_T], gl.float32, ACC)
        o = row_o + gl.arange(0, GROUP_O, BY_CODE)
        inverse_O = 1.0 / gl.load(rounded_scale_ptr + o, mask=o < outputs, other=1.0)
        row_O = None
        if row_scale_ptr is not None:
            row_O = gl.load(row_scale_ptr + o, mask=o < outputs, other=0.0)
        row_t = t_tile * BLOCK_T
        t = row_t + gl.arange(0, BLOCK_T, ONCE)
        x_scale_T = gl.load(x_scale_ptr + t * x_scale_st, mask=t < tokens, other=0.0)
        for block in range(first, last):
            mbarrier.wait(full.index(place), phase)
            mine = place * GROUPS + WHICH
            words = codes.index(mine).load(LEFT)
            scales = scales_of_block(scale_ring, mine, block, BY_CODE, INPUTS, SPAN, STEP, SCALE_ROWS, 1, 0, False)
            zeros = ()
            if zero_ring is not None:
                zeros = of_block(zero_ring, mine, block, BY_CODE, INPUTS, SPAN, STEP, ZERO_ROWS, 1, 0)
            ratios = _ratios(scales, row_O, inverse_O)
            before = x_place
            for strip in gl.static_range(PIECES * STRIPS):
                if strip % STRIPS == 0:
                    mbarrier.wait(x_full.index(x_place), x_phase)
                zero = None if zero_ring is None else zeros[strip * STRIP // STEP]
                w_OI = decode(words, strip, zero, ratios[strip * STRIP // STEP], DECODE, DTYPE, BITS, False, SHIFT)
                x_IT = x.index(x_place).slice(strip % STRIPS * STRIP, STRIP, 1).permute((1, 0))
                acc = warpgroup_mma(w_OI, x_IT, acc, is_async=True)
                if strip % STRIPS == STRIPS - 1:
                    if strip >= STRIPS:
                        # This piece's instructions stay in flight.
                        acc = warpgroup_mma_wait(STRIPS, deps=[acc])
                        mbarrier.arrive(x_empty.index(before))
                    before = x_place
                    x_place, x_phase = advance(x_place, x_phase, X_PLACES)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(x_empty.index(before))
            mbarrier.arrive(empty.index(place))
            place, phase = advance(place, phase, PLACES)
        if part_ptr is None:
            _write(acc, x_scale_T, row_o, row_t, epilogue, tokens, outputs, GROUP_O, BLOCK_T)
        elif last - first == blocks:
            _write(acc, x_scale_T, row_o, row_t, epilogue, tokens, outputs, GROUP_O, BLOCK_T)
        else:
            tile = o_tile * t_tiles + t_tile
            total, is_last = join_parts(acc, tile, last - first, first == 0, (units, blocks, parts), part_ptr,
                                        count_ptr, GROUP_O, BLOCK_T, GROUPS, WHICH)  # fmt: skip
            if is_last:
                _write(total, x_scale_T, row_o, row_t, epilogue, tokens, outputs, GROUP_O, BLOCK_T)
        unit += last - first
        o_tile, t_tile, first = following((o_tile, t_tile, blocks - 1), blocks, t_tiles)


@gluon.jit
def _fetch(sources, rings, place, unit, BYTES: gl.constexpr, INPUTS: gl.constexpr, SPAN: gl.constexpr,
           wanted):  # fmt: skip
    """Start the copies of a block of the weight: codes, scales and zeros of each warp group. INPUTS: those of a block.
    SPAN: those of a scale, or of a word of scales."""
    source, scale_source, zero_source = sources
    codes, scales, zeros, full, empty = rings
    o_tile, t_tile, block = unit
    mbarrier.expect(full.index(place), BYTES, pred=wanted)
    for group in gl.static_range(GROUPS):
        row = (o_tile * GROUPS + group) * source.block_type.shape[0]
        to = place * GROUPS + group
        tma.async_copy_global_to_shared(source, [row, block * LANES], full.index(place), codes.index(to), pred=wanted)
        at = [block * INPUTS // SPAN, row]
        tma.async_copy_global_to_shared(scale_source, at, full.index(place), scales.index(to), pred=wanted)
        if zero_source is not None:
            tma.async_copy_global_to_shared(zero_source, at, full.index(place), zeros.index(to), pred=wanted)


@gluon.jit
def _fetch_x(source, rings, place, unit, PIECE: gl.constexpr, BYTES: gl.constexpr, wanted):
    """Start the copy of piece PIECE of a block of x."""
    x, full, empty = rings
    o_tile, t_tile, block = unit
    mbarrier.expect(full.index(place), BYTES, pred=wanted)
    at = [t_tile * source.block_type.shape[0], (block * PIECES + PIECE) * LINE]
    tma.async_copy_global_to_shared(source, at, full.index(place), x.index(place), pred=wanted)


@gluon.jit
def _produce(x_source, sources, rings, x_rings, work, begin, INPUTS: gl.constexpr, SPAN: gl.constexpr,
             BYTES: gl.constexpr, X_BYTES: gl.constexpr, PLACES: gl.constexpr, X_PLACES: gl.constexpr,
             PDL: gl.constexpr):  # fmt: skip
    """Fetch the blocks that follow the first round as consumers release places."""
    empty, x_empty = rings[4], x_rings[2]
    lo, hi, blocks, t_tiles = work
    place, phase, x_place, x_phase = 0, 0, 0, 0
    at = begin
    for unit in range(lo, hi):
        if unit >= lo + PLACES:
            mbarrier.wait(empty.index(place), phase)
            _fetch(sources, rings, place, at, BYTES, INPUTS, SPAN, True)
            place, phase = advance(place, phase, PLACES)
        for piece in gl.static_range(PIECES):
            if (unit - lo) * PIECES + piece >= X_PLACES:
                mbarrier.wait(x_empty.index(x_place), x_phase)
                _fetch_x(x_source, x_rings, x_place, at, piece, X_BYTES, True)
                x_place, x_phase = advance(x_place, x_phase, X_PLACES)
        at = following(at, blocks, t_tiles)
    # The codes have been requested, so the next kernel may launch while the sums are reduced and written.
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _begin_of_part(part, parts, blocks):
    """Return the first unit of a part. The first part of a tile has more blocks than others, so that these have written
    their sums before it ends and reads them."""
    more = gl.minimum(MORE_BLOCKS, blocks - parts)
    which = part % parts
    return part // parts * blocks + gl.where(which == 0, 0, more + (blocks - more) * which // parts)


@gluon.jit(do_not_specialize=["tokens", "x_scale_st", "t_tiles", "blocks", "units", "parts"])
def packed_rounded(
    x_source,
    source,
    scale_source,
    zero_source,
    x_scale_ptr,
    row_scale_ptr,
    rounded_scale_ptr,
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
    parts,
    PLACES: gl.constexpr,
    X_PLACES: gl.constexpr,
    SPAN: gl.constexpr,
    STEP: gl.constexpr,
    DECODE: gl.constexpr,
    SHIFT: gl.constexpr,
    PDL: gl.constexpr,
):
    """`parts`: programs of a tile; 0 = equal ranges of all units. PLACES: blocks of codes in their ring. X_PLACES:
    pieces of x in theirs. SPAN: inputs of a scale, or of a word of scales. STEP: those of a block with one scale."""
    GROUP_O: gl.constexpr = source.block_type.shape[0]
    BLOCK_T: gl.constexpr = x_source.block_type.shape[0]
    INPUTS: gl.constexpr = PIECES * LINE
    codes = gl.allocate_shared_memory(gl.int32, [PLACES * GROUPS, GROUP_O, LANES], source.layout)
    x = gl.allocate_shared_memory(x_source.dtype, [X_PLACES, BLOCK_T, LINE], x_source.layout)
    SCALE_ROWS: gl.constexpr = scale_source.block_type.shape[0]
    scales = gl.allocate_shared_memory(scale_source.dtype, [PLACES * GROUPS, SCALE_ROWS, GROUP_O], scale_source.layout)
    scale_ring = scales._reinterpret(scales.dtype, [PLACES * GROUPS * SCALE_ROWS, GROUP_O], VECTOR)
    zeros, zero_ring = None, None
    ZERO_ROWS: gl.constexpr = 0 if zero_source is None else zero_source.block_type.shape[0]
    OF_ZEROS: gl.constexpr = 0 if zero_source is None else zero_source.block_type.nbytes
    BYTES: gl.constexpr = GROUPS * (source.block_type.nbytes + scale_source.block_type.nbytes + OF_ZEROS)
    X_BYTES: gl.constexpr = x_source.block_type.nbytes
    if zero_source is not None:
        zeros = gl.allocate_shared_memory(zero_source.dtype, [PLACES * GROUPS, ZERO_ROWS, GROUP_O], zero_source.layout)
        zero_ring = zeros._reinterpret(zeros.dtype, [PLACES * GROUPS * ZERO_ROWS, GROUP_O], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X_PLACES, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [X_PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    for i in gl.static_range(X_PLACES):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=GROUPS)
    fence_async_shared()
    barrier()
    mine, programs = gl.program_id(0), gl.num_programs(0)
    if part_ptr is None:
        tiles = units // blocks
        lo, hi = mine * tiles // programs * blocks, (mine + 1) * tiles // programs * blocks
    elif parts > 0:
        lo = _begin_of_part(mine, parts, blocks)
        hi = _begin_of_part(mine + 1, parts, blocks)
    else:
        lo, hi = mine * units // programs, (mine + 1) * units // programs
    work = (lo, hi, blocks, t_tiles)
    tile = lo // blocks
    begin = (tile // t_tiles, tile % t_tiles, lo - tile * blocks)
    copied, x_copied = (codes, scales, zeros, full, empty), (x, x_full, x_empty)
    rings = (x, codes, scale_ring, zero_ring, full, empty, x_full, x_empty)
    sources = (source, scale_source, zero_source)
    packed_scales = (row_scale_ptr, rounded_scale_ptr)
    ends = (x_scale_ptr, x_scale_st, (None, 0, rounded_scale_ptr, bias_ptr, out_ptr))
    size = (tokens, outputs)
    split = (part_ptr, count_ptr, units, parts)
    # The first round, that of the weight before the preceding kernel has ended.
    at = begin
    for i in gl.static_range(PLACES):
        _fetch(sources, copied, i, at, BYTES, INPUTS, SPAN, lo + i < hi)
        at = following(at, blocks, t_tiles)
    if PDL:
        gdc_wait()
    at = begin
    for i in gl.static_range(X_PLACES):
        _fetch_x(x_source, x_copied, i, at, i % PIECES, X_BYTES, lo + i // PIECES < hi)
        if i % PIECES == PIECES - 1:
            at = following(at, blocks, t_tiles)
    # The partitions start after the wait, so all of them see what earlier kernels wrote.
    REGISTERS: gl.constexpr = consumer_registers(GROUPS, 1)
    gl.warp_specialize(
        [
            (_consume, (rings, work, begin, split, packed_scales, ends, size, GROUP_O, BLOCK_T, PLACES, X_PLACES,
                        SPAN, STEP, DECODE, SHIFT, SCALE_ROWS, ZERO_ROWS, 0)),
            (_consume, (rings, work, begin, split, packed_scales, ends, size, GROUP_O, BLOCK_T, PLACES, X_PLACES,
                        SPAN, STEP, DECODE, SHIFT, SCALE_ROWS, ZERO_ROWS, 1)),
            (_produce, (x_source, sources, copied, x_copied, work, begin, INPUTS, SPAN, BYTES, X_BYTES, PLACES,
                        X_PLACES, PDL)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def launch_rounded(
    x_TI: torch.Tensor,
    packed: PackedWeight,
    out_TO: torch.Tensor,
    tile: MatmulTile,
    parts: torch.Tensor | None,
    counts: torch.Tensor | None,
    x_scale_T1: torch.Tensor | None,
    bias_O: torch.Tensor | None,
) -> None:
    """Launch the kernel. Arguments as in core.ops.kernels.packed_matmul; raise ValueError without scales."""
    if packed.rounded_scale is None or x_scale_T1 is None:
        raise ValueError("a weight that is rounded as it is decoded has a rounded_scale, and x in E4M3 an x_scale")
    tokens, inputs = x_TI.shape
    outputs = len(packed.codes)
    t_tiles, tiles, blocks, programs = tile.launch(tokens, outputs, inputs)
    span = min(WHOLE, (packed.group or WHOLE) * (SCALES if packed.scale.dtype is torch.int32 else 1))
    _, step = packed.steps
    each = replace(tile, outputs=GROUP_OUTPUTS)
    maps = [None if one is None else group_map(one, step, each, span) for one in (packed.scale, packed.zero)]
    # One instruction subtracts both the shift and the zero.
    shifted = None if packed.zero is None else packed.format.shifted.get(torch.float16)
    of_groups = sum(prod(one.block_shape) * one.base.element_size() for one in maps if one is not None)
    places, pieces = packed_tiles.pieces_that_fit(tile, GROUPS.value * of_groups, out_TO.element_size())
    packed_rounded[(programs,)](
        tensor_map(x_TI, tile.tokens, readable_rows(x_TI, tile.tokens)),
        tensor_map(packed.codes, GROUP_OUTPUTS, outputs),
        *maps,
        x_scale_T1,
        packed.row_scale,
        packed.rounded_scale,
        bias_O,
        out_TO,
        parts,
        counts,
        tokens,
        outputs,
        0 if x_scale_T1.numel() == 1 else x_scale_T1.stride(0),
        t_tiles,
        blocks,
        tiles * blocks,
        programs // tiles if programs % tiles == 0 else 0,
        PLACES=places,
        X_PLACES=pieces,
        SPAN=span,
        STEP=gcd(packed.group, tile.inputs),
        DECODE=packed.format.decode_words if shifted is None else shifted.decode,
        SHIFT=None if shifted is None else shifted.shift,
        num_warps=4,
        maxnreg=launch_registers(GROUPS.value, 1),
        **dependent(x_TI),
    )
