"""Consumer warp groups of specialized_experts.py for weights in 16 bits.

The tensor cores sum all products of a unit. Those of a block are multiplied while the next block is waited for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from dovetail.core.ops.kernels.expert_units import BOX, finish, unit_of
from dovetail.core.ops.kernels.gluon import advance


@gluon.jit
def _before(place, PLACES: gl.constexpr):
    """Return the place before this one. A variable with it would begin as equal to `place`, and Triton 3.6 does not
    carry such a variable through a loop."""
    return gl.where(place == 0, PLACES - 1, place - 1)


@gluon.jit
def consume_plain(rings, work, epilogue, size, BLOCK_T: gl.constexpr, ACTIVE: gl.constexpr,
                  GATED: gl.constexpr, LIMITED: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
                  PLACES: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Consumer warp group for outputs [WIDE * WHICH, WIDE * (WHICH + 1)) of each tile."""
    x, weight, full, empty = rings
    tiles_ptr, live, o_tiles = work
    outputs, rows, leap, blocks = size
    WIDE: gl.constexpr = BOX if GATED else 2 * BOX
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 16])
    units = live * o_tiles
    place, phase = 0, 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        expert, first, end, o_tile = unit_of(tiles_ptr, unit, live, o_tiles, GROUP)
        start = (o_tile * GROUPS + WHICH) * WIDE
        acc = gl.zeros([BOX, BLOCK_T], gl.float32, ACC)
        more = acc
        for block in range(blocks):
            mbarrier.wait(full.index(place), phase)
            x_IT = x.index(place).permute((1, 0))
            acc = warpgroup_mma(weight.index((place * 2) * GROUPS + WHICH), x_IT, acc, is_async=True)
            more = warpgroup_mma(weight.index((place * 2 + 1) * GROUPS + WHICH), x_IT, more, is_async=True)
            # All but these two are done, so the block before may be overwritten.
            acc, more = warpgroup_mma_wait(2, deps=[acc, more])
            mbarrier.arrive(empty.index(_before(place, PLACES)), pred=block > 0)
            place, phase = advance(place, phase, PLACES)
        acc, more = warpgroup_mma_wait(0, deps=[acc, more])
        mbarrier.arrive(empty.index(_before(place, PLACES)))
        finish(acc, more, (expert, first, end), epilogue, size, start, ACTIVE, GATED, LIMITED, BLOCK_T)
