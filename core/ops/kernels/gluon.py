"""Helpers for kernels in Gluon, Triton's lower-level language."""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""Barrier of all threads of a program. Triton 3.7 renamed it."""
LINE = gl.constexpr(128)
"""Row size of a matmul's tensor map's box in bytes. Also the number of FP8 products that the tensor core sums in its
own accumulator; longer sums would lose bits."""


PRODUCER_REGISTERS = gl.constexpr(24)
"""Registers per thread of a producer warp, which only starts copies."""


@gluon.constexpr_function
def launch_registers(groups, residents):
    """Return the registers per thread with which `residents` programs of `groups` consumers and a producer fit on an
    SM."""
    return min(255, 65536 // (128 * (groups + 1) * residents)) // 8 * 8


@gluon.constexpr_function
def consumer_registers(groups, residents, producer=24):
    """Registers per thread of a consumer: an equal share of what the launch gives to all warp groups, in steps of 8.
    `producer`: those of a producer."""
    return min(240, (launch_registers(groups, residents) * (groups + 1) - producer) // groups // 8 * 8)


@gluon.jit
def advance(place, phase, PLACES: gl.constexpr):
    """Return the next place of a ring and the phase parity of its barrier."""
    around = place == PLACES - 1
    return gl.where(around, 0, place + 1), gl.where(around, phase ^ 1, phase)


@gluon.jit
def block_scales(scale_ptr, columns, block, blocks, BOXES: gl.constexpr):
    """Return the scales of a weight block's boxes. scale_ptr: row of `columns` scales, each for the inputs of a box.
    Blocks from `blocks` on have none."""
    scales = ()
    for box in gl.static_range(BOXES):
        column = block * BOXES + box
        scales += (gl.load(scale_ptr + column, mask=(block < blocks) & (column < columns), other=0.0),)  # type: ignore[assignment]
    return scales


@gluon.jit
def scaled_sum(acc, sums, scales, box: gl.constexpr):
    """Return acc + sums * scales[box]; `scales`: () = none."""
    if len(scales) == 0:
        return acc + sums
    else:
        return acc + sums * scales[box]


def tensor_map(x: torch.Tensor, box: int, rows: int) -> TensorDescriptor:
    """Tensor map of the first `rows` rows of x's memory, with boxes of `box` rows and LINE bytes."""
    size = x.element_size()
    return TensorDescriptor(x, [rows, x.shape[1]], list(x.stride()), [box, LINE.value // size], line_layout(8 * size))


@cache
def line_layout(bits: int, rank: int = 2) -> gl.NVMMASharedLayout:
    """Layout of boxes whose rows have LINE bytes. Making one takes longer than a tensor map, before each launch."""
    return gl.NVMMASharedLayout(swizzle_byte_width=LINE.value, element_bitwidth=bits, rank=rank)
