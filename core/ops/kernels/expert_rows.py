"""Producer of specialized_experts.py that gathers rows of x, and the consumer warp groups that multiply them.

A tensor map reads rows that lie one after another, and all rows of its box. Here four warps copy 16 bytes a thread from
the rows of the unit's pairs, so x needs no copy in sorted order, and rows of a tile past its last pair are not read:
with few pairs of an expert, x takes as much of the L2 cache's throughput as weights do. Weights come by tensor maps.
Copies arrive at a block's barrier by themselves. They are no bulk copies, so warp groups that have waited for a block
fence before tensor cores read it.

Shapes: T rows of a tile, I inputs of a block.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from dovetail.core.ops.kernels.block_expert_units import multiply_blocks
from dovetail.core.ops.kernels.expert_units import (
    BOX,
    expect_weight,
    factors_of,
    fetch_weight,
    finish,
    keep,
    output_scales,
    pairs_of,
    unit_of,
)
from dovetail.core.ops.kernels.gluon import advance
from dovetail.core.ops.kernels.plain_expert_units import multiply_plain

ROW_WARPS = gl.constexpr(4)
"""Warps of the producer."""
ROW_REGISTERS = gl.constexpr(56)
"""Registers of a thread of it."""
ARRIVALS = gl.constexpr(32 * ROW_WARPS.value + 1)
"""Arrivals that complete a block: each thread's, when its copies are done, and that of the weight's bytes."""


@gluon.jit
def produce_rows(source, x_ptr, order_ptr, rings, work, size, inputs, begin, BLOCK_T: gl.constexpr,
                 ACTIVE: gl.constexpr, GATED: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
                 PLACES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Fetch the blocks of all units as consumers release places. Weights of the first `begin` blocks are on their
    way."""
    x, weight, full, empty = rings
    tiles_ptr, live, o_tiles = work
    blocks = size[3]
    units = live * o_tiles
    WIDE: gl.constexpr = x.shape[2]
    EACH: gl.constexpr = 128 // x.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, EACH], [4, 8], [ROW_WARPS, 1], [1, 0])
    t = gl.arange(0, BLOCK_T, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT))
    place, phase = 0, 1
    unit = gl.program_id(0)
    expert, first, end, o_tile = unit_of(tiles_ptr, unit, live, o_tiles, GROUP)
    while unit < units:
        unit += gl.num_programs(0)
        next_expert, next_first, next_end, next_o = unit_of(tiles_ptr, unit, live, o_tiles, GROUP)
        row = first + t
        inside = row < end
        if GATED:
            row = gl.load(order_ptr + row, mask=inside, other=0) // ACTIVE
        at = x_ptr + row.to(gl.int64)[:, None] * inputs + column[None, :]
        for block in range(blocks):
            mbarrier.wait(empty.index(place), phase)
            wanted = block >= begin
            expect_weight(source, full, place, GROUPS, wanted)
            fetch_weight(source, weight, full, place, block, expert, o_tile, size, GATED, GROUPS, wanted)
            ok = inside[:, None] & (column < inputs - block * WIDE)[None, :]
            async_copy.async_copy_global_to_shared(x.index(place), at + block * WIDE, mask=ok)
            async_copy.mbarrier_arrive(full.index(place), increment_count=False)
            place, phase = advance(place, phase, PLACES)
        begin *= 0
        expert, first, end, o_tile = next_expert, next_first, next_end, next_o
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _unit(rings, at, tile, next_tile, notes, order_ptr, of_rows, scale, epilogue, size, start, ROWS: gl.constexpr,
          BLOCK_T: gl.constexpr, GATED: gl.constexpr, LIMITED: gl.constexpr, GROUPS: gl.constexpr,
          PLACES: gl.constexpr, SCALE_O: gl.constexpr, SCALE_I: gl.constexpr, PRECISE: gl.constexpr,
          WHICH: gl.constexpr):  # fmt: skip
    """Multiply and finish a unit of up to ROWS rows. `at`: place and phase. Return the next ones, and the next unit's
    pairs."""
    expert, first, end = tile
    OUTER: gl.constexpr = SCALE_I == 0 and scale[0] is not None
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 256 // rings[1].dtype.primitive_bitwidth])
    if OUTER:
        of_a, of_b = output_scales(scale[0], expert, start, size, GATED, ACC)
    if SCALE_I > 0 or PRECISE:
        acc, more, place, phase = multiply_blocks(rings, at, scale, expert, start, size, ROWS, GATED, GROUPS, PLACES,
                                                  SCALE_O, SCALE_I, WHICH)  # fmt: skip
    else:
        acc, more, place, phase = multiply_plain(rings, at, size[3], ROWS, GROUPS, PLACES, WHICH)
    next_pair_T = pairs_of(order_ptr, next_tile[1], next_tile[2], BLOCK_T)
    if OUTER:
        acc, more = acc * of_a[:, None], more * of_b[:, None]
    keep(notes, epilogue, of_rows, GATED, WHICH)
    finish(acc, more, tile, notes, epilogue, size, start, GATED, LIMITED, WHICH)
    return place, phase, next_pair_T


@gluon.jit
def consume_rows(rings, work, notes, scale, epilogue, size, BLOCK_T: gl.constexpr, ACTIVE: gl.constexpr,
                 GATED: gl.constexpr, LIMITED: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
                 PLACES: gl.constexpr, SCALE_O: gl.constexpr, SCALE_I: gl.constexpr, PRECISE: gl.constexpr,
                 WHICH: gl.constexpr):  # fmt: skip
    """Consumer warp group for outputs [WIDE * WHICH, WIDE * (WHICH + 1)) of each tile."""
    tiles_ptr, live, o_tiles, order_ptr = work
    WIDE: gl.constexpr = BOX if GATED else 2 * BOX
    units = live * o_tiles
    place, phase = 0, 0
    unit = gl.program_id(0)
    expert, first, end, o_tile = unit_of(tiles_ptr, unit, live, o_tiles, GROUP)
    pair_T = pairs_of(order_ptr, first, end, BLOCK_T)
    while unit < units:
        unit += gl.num_programs(0)
        next_expert, next_first, next_end, next_o = unit_of(tiles_ptr, unit, live, o_tiles, GROUP)
        of_rows = factors_of(epilogue, pair_T, first, end, ACTIVE, GATED)
        tile, next_tile = (expert, first, end), (next_expert, next_first, next_end)
        start = (o_tile * GROUPS + WHICH) * WIDE
        # `end` is that of the expert's rows, of which further tiles may have some. The last tile of an expert needs
        # instructions for half of its rows, if it has no more.
        if BLOCK_T < 128:
            place, phase, pair_T = _unit(rings, (place, phase), tile, next_tile, notes, order_ptr, of_rows, scale,
                                         epilogue, size, start, BLOCK_T, BLOCK_T, GATED, LIMITED, GROUPS, PLACES,
                                         SCALE_O, SCALE_I, PRECISE, WHICH)  # fmt: skip
        elif end - first > BLOCK_T // 2:
            place, phase, pair_T = _unit(rings, (place, phase), tile, next_tile, notes, order_ptr, of_rows, scale,
                                         epilogue, size, start, BLOCK_T, BLOCK_T, GATED, LIMITED, GROUPS, PLACES,
                                         SCALE_O, SCALE_I, PRECISE, WHICH)  # fmt: skip
        else:
            place, phase, pair_T = _unit(rings, (place, phase), tile, next_tile, notes, order_ptr, of_rows, scale,
                                         epilogue, size, start, BLOCK_T // 2, BLOCK_T, GATED, LIMITED, GROUPS, PLACES,
                                         SCALE_O, SCALE_I, PRECISE, WHICH)  # fmt: skip
        expert, first, end, o_tile = next_expert, next_first, next_end, next_o
