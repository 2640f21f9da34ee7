"""Products of a unit of specialized_experts.py for weights in 16 bits, and in 8 bits with a scale for each output.

The tensor cores sum all products of a unit. Those of a block are multiplied while the next block is waited for.
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
def _before(place, PLACES: gl.constexpr):
    """Return the place before this one. A variable with it would begin as equal to `place`, and Triton 3.6 does not
    carry such a variable through a loop."""
    return gl.where(place == 0, PLACES - 1, place - 1)


@gluon.jit
def multiply_plain(rings, at, blocks, ROWS: gl.constexpr, GROUPS: gl.constexpr, PLACES: gl.constexpr,
              WHICH: gl.constexpr):  # fmt: skip
    """Return the sums of both boxes for the first ROWS rows of a unit, and the next place and phase. `at`: the
    first ones."""
    x, weight, full, empty = rings
    place, phase = at
    K: gl.constexpr = 256 // weight.dtype.primitive_bitwidth
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, K])
    acc = gl.zeros([BOX, ROWS], gl.int32 if weight.dtype == gl.int8 else gl.float32, ACC)
    more = acc
    for block in range(blocks):
        mbarrier.wait(full.index(place), phase)
        fence_async_shared()
        x_IT = x.index(place).slice(0, ROWS).permute((1, 0))
        acc = warpgroup_mma(weight.index((place * 2) * GROUPS + WHICH), x_IT, acc, is_async=True)
        more = warpgroup_mma(weight.index((place * 2 + 1) * GROUPS + WHICH), x_IT, more, is_async=True)
        # All but these two are done, so the block before may be overwritten.
        acc, more = warpgroup_mma_wait(2, deps=[acc, more])
        mbarrier.arrive(empty.index(_before(place, PLACES)), pred=block > 0)
        place, phase = advance(place, phase, PLACES)
    acc, more = warpgroup_mma_wait(0, deps=[acc, more])
    mbarrier.arrive(empty.index(_before(place, PLACES)))
    return acc.to(gl.float32), more.to(gl.float32), place, phase
