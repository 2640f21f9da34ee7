"""Ring of blocks in shared memory from which core.ops.kernels.specialized_packed multiplies: one warp fills it, across
tiles. A block has boxes of codes for each consumer warp group, boxes of x, and the scales and zeros of its groups.
These are in the ring since a consumer that loads them itself waits for memory once in each block."""

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.core.ops import packing
from dovetail.core.ops.kernels.gluon import advance
from dovetail.core.ops.padding import readable_rows
from dovetail.core.ops.tiles import MatmulTile

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
def fetch_weight(sources, rings, place, unit, INPUTS: gl.constexpr, SPAN: gl.constexpr, BOXES: gl.constexpr,
                 GROUPS: gl.constexpr, wanted):  # fmt: skip
    """Start the copy of a block of the weight: one box of LANES words for each warp group and box of inputs, and the
    scales and zeros of all warp groups. INPUTS: those of a block. SPAN: those of a scale, or of a word of scales."""
    source, scale_source, zero_source = sources
    x, codes, scales, zeros, sums, full, empty = rings
    o_tile, t_tile, block = unit
    for box in gl.static_range(BOXES):
        for group in gl.static_range(GROUPS):
            at = [(o_tile * GROUPS + group) * source.block_type.shape[0], (block * BOXES + box) * LANES]
            to = codes.index((place * BOXES + box) * GROUPS + group)
            tma.async_copy_global_to_shared(source, at, full.index(place), to, pred=wanted)
    at = [block * INPUTS // SPAN, o_tile * scale_source.block_type.shape[1]]
    tma.async_copy_global_to_shared(scale_source, at, full.index(place), scales.index(place), pred=wanted)
    if zero_source is not None:
        tma.async_copy_global_to_shared(zero_source, at, full.index(place), zeros.index(place), pred=wanted)


@gluon.jit
def fetch_x(x_sources, rings, place, unit, X_BOXES: gl.constexpr, wanted):
    """Start the copy of an input block, and of its sums if they are in memory."""
    source, sum_source = x_sources
    ring, codes, scales, zeros, sums, full, empty = rings
    o_tile, t_tile, block = unit
    WIDE: gl.constexpr = source.block_type.shape[1]
    for box in gl.static_range(X_BOXES):
        at = [t_tile * source.block_type.shape[0], (block * X_BOXES + box) * WIDE]
        tma.async_copy_global_to_shared(source, at, full.index(place), ring.index(place * X_BOXES + box), pred=wanted)
    if sum_source is not None:
        at = [t_tile * sum_source.block_type.shape[0], block * sum_source.block_type.shape[1]]
        tma.async_copy_global_to_shared(sum_source, at, full.index(place), sums.index(place), pred=wanted)


@gluon.jit
def fill(x_sources, sources, rings, work, begin, INPUTS: gl.constexpr, SPAN: gl.constexpr, BYTES: gl.constexpr,
         BOXES: gl.constexpr, X_BOXES: gl.constexpr, GROUPS: gl.constexpr, PLACES: gl.constexpr,
         PDL: gl.constexpr):  # fmt: skip
    """Start the copies of the ring's first round, from the unit `begin`: those of the weight before the preceding
    kernel has ended. Return the unit after them. BYTES: those of a block in shared memory."""
    x, codes, scales, zeros, sums, full, empty = rings
    lo, hi, blocks, t_tiles = work
    unit = begin
    for i in gl.static_range(PLACES):
        mbarrier.expect(full.index(i), BYTES, pred=lo + i < hi)
        fetch_weight(sources, rings, i, unit, INPUTS, SPAN, BOXES, GROUPS, lo + i < hi)
        unit = following(unit, blocks, t_tiles)
    if PDL:
        gdc_wait()
    unit = begin
    for i in gl.static_range(PLACES):
        fetch_x(x_sources, rings, i, unit, X_BOXES, lo + i < hi)
        unit = following(unit, blocks, t_tiles)
    return unit


@gluon.jit
def produce(x_sources, sources, rings, work, unit, INPUTS: gl.constexpr, SPAN: gl.constexpr, BYTES: gl.constexpr,
            BOXES: gl.constexpr, X_BOXES: gl.constexpr, GROUPS: gl.constexpr, PLACES: gl.constexpr,
            PDL: gl.constexpr):  # fmt: skip
    """Fetch the blocks from `unit` on, which follow the first round, as consumers release places."""
    x, codes, scales, zeros, sums, full, empty = rings
    lo, hi, blocks, t_tiles = work
    place, phase = 0, 0
    for _ in range(lo + PLACES, hi):
        mbarrier.wait(empty.index(place), phase)
        mbarrier.expect(full.index(place), BYTES)
        fetch_weight(sources, rings, place, unit, INPUTS, SPAN, BOXES, GROUPS, True)
        fetch_x(x_sources, rings, place, unit, X_BOXES, True)
        place, phase = advance(place, phase, PLACES)
        unit = following(unit, blocks, t_tiles)
    # The codes have been requested, so the next kernel may launch while the sums are reduced and written.
    if PDL:
        gdc_launch_dependents()


@gluon.constexpr_function
def group_rows(inputs, span, width, bits):
    """Return the rows of a block's box of scales, or of words of scales: enough for any block, a power of two, and at
    least 128 bytes, since tensor maps copy to multiples of these. `inputs`: those of a block. `span`: those of a row.
    `width`: outputs of a row. `bits`: those of a scale or word."""
    if inputs % span == 0:
        rows = inputs // span
    elif span % inputs == 0:
        rows = 1
    else:
        rows = -(-inputs // span) + 1
    rows = max(rows, 1024 // (width * bits))
    return 1 << (rows - 1).bit_length()


@lru_cache(maxsize=1 << 10)
def group_box(inputs: int, span: int, outputs: int, bits: int) -> tuple[list[int], gl.NVMMASharedLayout]:
    """Return box and layout of a block's scales. Making them takes longer than a tensor map, before each launch."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=2)
    return [group_rows(inputs, span, outputs, bits), outputs], layout


def group_map(x_OG: torch.Tensor, step: int, tile: MatmulTile, span: int) -> TensorDescriptor:
    """Tensor map of scales, words of them or zeros, with boxes of all that a block needs. `step`: between groups."""
    outputs, groups = x_OG.shape
    # A dimension of one has any stride.
    strides = [step if groups > 1 else 128, 1]
    return TensorDescriptor(
        x_OG, [groups, outputs], strides, *group_box(tile.inputs, span, tile.outputs, 8 * x_OG.element_size())
    )


def map_of_sums(sums_TS: torch.Tensor, tokens: int, columns: int) -> TensorDescriptor:
    """Tensor map of the sums of x, with boxes of all that a block needs."""
    shape = [readable_rows(sums_TS, tokens), sums_TS.shape[1]]
    return TensorDescriptor(sums_TS, shape, list(sums_TS.stride()), [tokens, columns], _layout_of_sums(columns))


@lru_cache
def _layout_of_sums(columns: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=2 * columns, element_bitwidth=16, rank=2)
