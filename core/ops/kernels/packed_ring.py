"""Ring of blocks in shared memory from which core.ops.kernels.specialized_packed multiplies: one warp fills it, across
tiles. A block has boxes of codes for each consumer warp group, and boxes of x."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.core.ops import packing
from dovetail.core.ops.kernels.gluon import advance

LANES = gl.constexpr(packing.LANES)
"""Inputs of a strip."""


@gluon.jit
def following(unit, blocks, t_tiles):
    """Return the unit after (output tile, token tile, block), without divisions."""
    o_tile, t_tile, block = unit
    block += 1
    wraps = block == blocks
    block = gl.where(wraps, 0, block)
    t_tile = gl.where(wraps, t_tile + 1, t_tile)
    ends = t_tile == t_tiles
    return gl.where(ends, o_tile + 1, o_tile), gl.where(ends, 0, t_tile), block


@gluon.jit
def fetch_codes(source, ring, full, place, unit, BOXES: gl.constexpr, GROUPS: gl.constexpr, wanted):
    """Start the copy of a block of codes, one box of LANES words for each warp group and box of inputs."""
    o_tile, t_tile, block = unit
    for box in gl.static_range(BOXES):
        for group in gl.static_range(GROUPS):
            at = [(o_tile * GROUPS + group) * source.block_type.shape[0], (block * BOXES + box) * LANES]
            to = ring.index((place * BOXES + box) * GROUPS + group)
            tma.async_copy_global_to_shared(source, at, full.index(place), to, pred=wanted)


@gluon.jit
def fetch_x(source, ring, full, place, unit, X_BOXES: gl.constexpr, wanted):
    """Start the copy of an input block."""
    o_tile, t_tile, block = unit
    WIDE: gl.constexpr = source.block_type.shape[1]
    for box in gl.static_range(X_BOXES):
        at = [t_tile * source.block_type.shape[0], (block * X_BOXES + box) * WIDE]
        tma.async_copy_global_to_shared(source, at, full.index(place), ring.index(place * X_BOXES + box), pred=wanted)


@gluon.jit
def fill(x_source, source, rings, work, begin, BOXES: gl.constexpr, X_BOXES: gl.constexpr, GROUPS: gl.constexpr,
          PLACES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Start the copies of the ring's first round, from the unit `begin`: those of codes before the preceding kernel has
    ended. Return the unit after them."""
    x, codes, full, empty = rings
    lo, hi, blocks, t_tiles = work
    BYTES: gl.constexpr = BOXES * GROUPS * source.block_type.nbytes + X_BOXES * x_source.block_type.nbytes
    unit = begin
    for i in gl.static_range(PLACES):
        mbarrier.expect(full.index(i), BYTES, pred=lo + i < hi)
        fetch_codes(source, codes, full, i, unit, BOXES, GROUPS, lo + i < hi)
        unit = following(unit, blocks, t_tiles)
    if PDL:
        gdc_wait()
    unit = begin
    for i in gl.static_range(PLACES):
        fetch_x(x_source, x, full, i, unit, X_BOXES, lo + i < hi)
        unit = following(unit, blocks, t_tiles)
    return unit


@gluon.jit
def produce(x_source, source, rings, work, unit, BOXES: gl.constexpr, X_BOXES: gl.constexpr, GROUPS: gl.constexpr,
             PLACES: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Fetch the blocks from `unit` on, which follow the first round, as consumers release places."""
    x, codes, full, empty = rings
    lo, hi, blocks, t_tiles = work
    BYTES: gl.constexpr = BOXES * GROUPS * source.block_type.nbytes + X_BOXES * x_source.block_type.nbytes
    place, phase = 0, 0
    for _ in range(lo + PLACES, hi):
        mbarrier.wait(empty.index(place), phase)
        mbarrier.expect(full.index(place), BYTES)
        fetch_codes(source, codes, full, place, unit, BOXES, GROUPS, True)
        fetch_x(x_source, x, full, place, unit, X_BOXES, True)
        place, phase = advance(place, phase, PLACES)
        unit = following(unit, blocks, t_tiles)
    # The codes have been requested, so the next kernel may launch while the sums are reduced and written.
    if PDL:
        gdc_launch_dependents()
