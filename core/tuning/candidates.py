"""Candidates of a search for matmul tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product as cross

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile, specialized_tiles
from dovetail.core.tuning.gpu import Gpu

ITEMSIZE = {"bf16": 2, "fp8": 1, "fp8_block": 1, "int8": 1}
"""Bytes of a number, by kind of weight."""
AHEAD = ((0, 0), (0, 1000), (4, 0))
"""Blocks prefetched into the L2 cache, and cycles between prefetches."""
FEW_ROWS = 32
"""Rows up to which a specialized tile, of 64 rows at least, multiplies mostly padding."""
RESERVED = 2 << 10
"""Shared memory that a program may not use for its blocks."""


def prefetching(rows: int, kind: str) -> Iterator[MatmulTile]:
    """Yield tiles whose weight fills the shared memory, or part of it, while the preceding kernel runs."""
    itemsize = ITEMSIZE[kind]
    tokens = 16 if rows <= 16 else 32 if rows <= 32 else 64
    cuts = list(cross((tokens,), (64, 128), (128, 256, 512)))
    if rows > 64:
        cuts = list(cross((64, 128, 256), (64, 128), (128, 256)))
    for (count, outputs, width), room, stages in cross(cuts, (200 << 10, 150 << 10, 100 << 10), (2, 3, 4)):
        tile = MatmulTile(count, outputs, width // itemsize, outputs // 16, stages)
        places = min(16, (room - count * width * stages) // (outputs * width))
        if places >= 2:
            yield replace(tile, prefetch=places)


def used_shared(tile: MatmulTile, itemsize: int) -> int:
    """Return the bytes of shared memory of a program, with those of its epilogue."""
    if tile.needs_hopper:
        return tile.shared_bytes(itemsize)
    return (tile.outputs + tile.tokens) * tile.inputs * itemsize * tile.stages + (tile.outputs * tile.tokens * 4 + 256)


@lru_cache
def geometries(rows: int, kind: str, gpu: Gpu) -> list[MatmulTile]:
    """Return tiles before they are fitted to a shape: one compilation each."""
    itemsize = ITEMSIZE[kind]
    most = 32 if rows <= 32 else 64
    if rows <= 16:
        cuts = [(16, outputs, width, 4) for outputs, width in cross((16, 32, 64, 128), (256, 512))]
        cuts += [(16, 64, 128, 4), (16, 128, 128, 4), (16, 128, 256, 8), (16, 256, 128, 8)]
        cuts += [(16, 32, 1024, 4), (16, 16, 1024, 4)]
    elif rows <= 64:
        cuts = [(most, outputs, width, 4) for outputs, width in cross((32, 64, 128), (128, 256))]
        cuts += [(most, outputs, width, 8) for outputs, width in cross((128, 256), (128, 256))]
        cuts += [(32, 128, 128, 4), (32, 64, 256, 4), (most, 64, 512, 4)]
    else:
        cuts = [(tokens, outputs, 128, 8) for tokens, outputs in cross((64, 128, 256), (128, 256))]
        cuts += [(tokens, 64, width, 4) for tokens, width in cross((64, 128, 256), (128, 256))]
        cuts += [(64, 128, 256, 8), (128, 128, 256, 8)]
    orders = [(tokens, outputs, width, warps, True) for tokens, outputs, width, warps in cuts]
    # The tokens as left operand, which tensor cores want in tiles of 64.
    orders += [(tokens, outputs, width, warps, False) for tokens, outputs, width, warps in cuts if tokens >= 64]
    orders += [(16 if rows <= 16 else most, 64, 256, 4, False)]
    found: dict[MatmulTile, None] = {}
    for (tokens, outputs, width, warps, swap), tma in cross(orders, (False, True) if gpu.tma else (False,)):
        base = MatmulTile(tokens, outputs, width // itemsize, warps, tma=tma, swap=swap)
        for programs in (1, 2):  # that a multiprocessor's shared memory has room for
            room = (gpu.shared - RESERVED) // programs
            fits = [n for n in (2, 3, 4, 5, 6, 8) if used_shared(replace(base, stages=n), itemsize) <= room]
            found |= {replace(base, stages=n): None for n in fits[-1:]}
        if used_shared(replace(base, stages=4), itemsize) <= gpu.shared - RESERVED:
            found[replace(base, stages=4)] = None
    if gpu.hopper:
        found |= dict.fromkeys(prefetching(rows, kind))
        if rows > FEW_ROWS:
            found |= dict.fromkeys(specialized_tiles(rows, itemsize, gpu.shared))
    return list(found)


def resident(tile: MatmulTile, itemsize: int, gpu: Gpu) -> int:
    """Return how many programs run on an SM at a time, as far as shared memory and threads limit them."""
    return max(1, min(4, gpu.shared // used_shared(tile, itemsize), 2048 // (32 * tile.warps)))


def candidates(outputs: int, inputs: int, rows: int, kind: str, gpu: Gpu) -> Iterator[MatmulTile]:
    """Yield tiles for x [rows, inputs] @ weight [outputs, inputs]^T that can be launched and leave no SM idle."""
    itemsize = ITEMSIZE[kind]
    for tile in geometries(rows, kind, gpu):
        if tile.inputs > inputs or tile.outputs > outputs:
            continue
        if (tile.tma or tile.needs_hopper) and inputs * itemsize % 16:
            continue
        for found in fitted(tile, outputs, inputs, rows, itemsize, gpu):
            shape = rows, outputs, inputs
            if found.counters(*shape) <= MOST_SHARED_TILES and found.fits_32_bits(*shape):
                yield found


def fitted(tile: MatmulTile, outputs: int, inputs: int, rows: int, itemsize: int, gpu: Gpu) -> Iterator[MatmulTile]:
    """Yield the ways to distribute a tile's work over programs."""
    each = resident(tile, itemsize, gpu)
    _, tiles, blocks, _ = tile.launch(rows, outputs, inputs)
    if tile.prefetch:
        for split in sorted({1, 2, 3, 4, *(max(1, n * gpu.processors // tiles) for n in (1, 2))}):
            if split == 1 or (split <= blocks // 2 and tiles * split <= 2 * each * gpu.processors):
                rest = ceil_div(blocks, split) - tile.prefetch
                for ahead, pace in AHEAD:
                    if rest > 0 or not ahead:
                        yield replace(tile, split=split, prefetch_l2=ahead, prefetch_cycles=pace)
        return
    if tile.specialized:
        yield tile
        for split in (2, 3, 4):
            if split <= blocks // 2 and tiles * split <= gpu.processors:
                yield replace(tile, split=split)
        if tiles > gpu.processors:
            yield replace(tile, programs=gpu.processors)
        return
    for split in (1, 2, 4, 8, 16):
        if split == 1 or (split <= blocks // 2 and tiles * split <= 2 * each * gpu.processors):
            yield replace(tile, split=split)
    if tiles % gpu.processors:
        for programs in sorted({gpu.processors, each * gpu.processors}):
            if programs <= tiles * blocks // 2:
                yield replace(tile, programs=programs)
