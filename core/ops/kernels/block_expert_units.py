"""Products of a unit of specialized_experts.py for weights in E4M3 with scales of blocks, or of outputs.

Products are added to float32 sums after each block of 128 inputs, with the block's scale if it has one, before the
tensor core's accumulator loses bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dovetail.core.ops.kernels.expert_units import BOX
from dovetail.core.ops.kernels.gluon import advance


@gluon.jit
def _scales(scale_ptr, row, row_up, block, blocks, BLOCK_I: gl.constexpr, SCALE_I: gl.constexpr):
    """Return the scales of a block for both boxes. `row`, `row_up`: their places in column 0. Past the last block,
    return the last one's."""
    group = gl.minimum(block, blocks - 1) * BLOCK_I // SCALE_I
    return gl.load(scale_ptr + row + group), gl.load(scale_ptr + row_up + group)


@gluon.jit
def multiply_blocks(rings, at, scale, expert, start, size, ROWS: gl.constexpr, GATED: gl.constexpr,
                    GROUPS: gl.constexpr, PLACES: gl.constexpr, SCALE_O: gl.constexpr, SCALE_I: gl.constexpr,
                    WHICH: gl.constexpr):  # fmt: skip
    """Return the sums of both boxes for the first ROWS rows of a unit, and the next place and phase. `at`: the
    first ones. The first output is `start`. SCALE_I 0: blocks have no scales."""
    x, weight, full, empty = rings
    place, phase = at
    outputs, rows, leap, blocks = size
    scale_ptr, groups = scale
    BLOCK_I: gl.constexpr = x.shape[2]
    # More sums would not fit into registers.
    TOGETHER: gl.constexpr = ROWS <= 64
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    of_a, of_b = 1.0, 1.0
    if SCALE_I > 0:
        of_expert = expert * ((outputs + SCALE_O - 1) // SCALE_O) * (2 if GATED else 1)
        row = (of_expert + gl.minimum(start, outputs - 1) // SCALE_O) * groups
        if GATED:
            row_up = row + (outputs + SCALE_O - 1) // SCALE_O * groups
        else:
            row_up = (of_expert + gl.minimum(start + BOX, outputs - 1) // SCALE_O) * groups
        of_a, of_b = _scales(scale_ptr, row, row_up, 0, blocks, BLOCK_I, SCALE_I)
    acc = gl.zeros([BOX, ROWS], gl.float32, ACC)
    more = acc
    nothing = acc
    for block in range(blocks):
        mbarrier.wait(full.index(place), phase)
        fence_async_shared()
        next_a, next_b = of_a, of_b
        if SCALE_I > 0:
            next_a, next_b = _scales(scale_ptr, row, row_up, block + 1, blocks, BLOCK_I, SCALE_I)
        x_IT = x.index(place).slice(0, ROWS).permute((1, 0))
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
    return acc, more, place, phase
