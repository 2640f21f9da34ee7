"""Consumer warp groups of specialized_experts.py for weights in E4M3 with scales of blocks.

Products are added to float32 sums after each block of 128 inputs, with the block's scale, before the tensor core's
accumulator loses bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from dovetail.core.ops.kernels.expert_units import BOX, finish, unit_of
from dovetail.core.ops.kernels.gluon import advance


@gluon.jit
def _scales(scale_ptr, row, row_up, block, blocks, BLOCK_I: gl.constexpr, SCALE_I: gl.constexpr):
    """Return the scales of a block for both boxes. `row`, `row_up`: their places in column 0. Past the last block,
    return the last one's."""
    group = gl.minimum(block, blocks - 1) * BLOCK_I // SCALE_I
    return gl.load(scale_ptr + row + group), gl.load(scale_ptr + row_up + group)


@gluon.jit
def consume_blocks(rings, work, scale, epilogue, size, BLOCK_T: gl.constexpr, ACTIVE: gl.constexpr,
                  GATED: gl.constexpr, LIMITED: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
                  PLACES: gl.constexpr, SCALE_O: gl.constexpr, SCALE_I: gl.constexpr,
                  WHICH: gl.constexpr):  # fmt: skip
    """Consumer warp group for outputs [WIDE * WHICH, WIDE * (WHICH + 1)) of each tile."""
    x, weight, full, empty = rings
    tiles_ptr, live, o_tiles = work
    outputs, rows, leap, blocks = size
    scale_ptr, groups = scale
    WIDE: gl.constexpr = BOX if GATED else 2 * BOX
    BLOCK_I: gl.constexpr = x.shape[2]
    # More sums would not fit into registers.
    TOGETHER: gl.constexpr = BLOCK_T <= 64
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_T, 32])
    units = live * o_tiles
    place, phase = 0, 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        expert, first, end, o_tile = unit_of(tiles_ptr, unit, live, o_tiles, GROUP)
        start = (o_tile * GROUPS + WHICH) * WIDE
        of_expert = expert * ((outputs + SCALE_O - 1) // SCALE_O) * (2 if GATED else 1)
        row = (of_expert + gl.minimum(start, outputs - 1) // SCALE_O) * groups
        if GATED:
            row_up = row + (outputs + SCALE_O - 1) // SCALE_O * groups
        else:
            row_up = (of_expert + gl.minimum(start + BOX, outputs - 1) // SCALE_O) * groups
        of_a, of_b = _scales(scale_ptr, row, row_up, 0, blocks, BLOCK_I, SCALE_I)
        acc = gl.zeros([BOX, BLOCK_T], gl.float32, ACC)
        more = acc
        nothing = acc
        for block in range(blocks):
            mbarrier.wait(full.index(place), phase)
            next_a, next_b = _scales(scale_ptr, row, row_up, block + 1, blocks, BLOCK_I, SCALE_I)
            x_IT = x.index(place).permute((1, 0))
            box = weight.index((place * 2) * GROUPS + WHICH)
            box_up = weight.index((place * 2 + 1) * GROUPS + WHICH)
            sums = warpgroup_mma(box, x_IT, nothing, use_acc=False, is_async=True)
            if TOGETHER:
                sums_up = warpgroup_mma(box_up, x_IT, nothing, use_acc=False, is_async=True)
                acc += warpgroup_mma_wait(1, deps=[sums]) * of_a
            else:
                acc += warpgroup_mma_wait(0, deps=[sums]) * of_a
                sums_up = warpgroup_mma(box_up, x_IT, nothing, use_acc=False, is_async=True)
            sums_up = warpgroup_mma_wait(0, deps=[sums_up])
            mbarrier.arrive(empty.index(place))
            more += sums_up * of_b
            place, phase = advance(place, phase, PLACES)
            of_a, of_b = next_a, next_b
        finish(acc, more, (expert, first, end), epilogue, size, start, ACTIVE, GATED, LIMITED, BLOCK_T)
