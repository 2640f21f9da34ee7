"""Tiles of the matmul kernels that are worth measuring for a product. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product as cross

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile

RESERVED = 1 << 10
"""Bytes of shared memory that the driver takes for each program."""
MOST_STAGES = 8
MOST_PREFETCHED = 16
"""Maximum number of weight blocks that a prefetching program holds."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Facts about a GPU that the choice of tiles depends on."""

    name: str
    processors: int
    """Number of SMs."""
    shared: int
    """Bytes of shared memory of an SM that programs may use."""
    program_shared: int
    """Maximum bytes of shared memory of one program."""
    tma: bool
    """Whether the tensor memory accelerator exists (Hopper and later)."""
    prefetch: bool
    """Whether prefetch_matmul runs (Hopper)."""


def shared_bytes(tile: MatmulTile, itemsize: int) -> int:
    """Estimate of the shared memory of a program in bytes."""
    if tile.prefetch:
        return (tile.outputs * tile.prefetch + tile.tokens * tile.stages) * tile.inputs * itemsize + RESERVED
    return (tile.outputs + tile.tokens) * tile.inputs * itemsize * tile.stages + RESERVED


def resident(tile: MatmulTile, itemsize: int, gpu: Gpu) -> int:
    """Number of programs that an SM runs at once, limited by shared memory, registers and threads."""
    registers = tile.tokens * tile.outputs // (32 * tile.warps) + 40
    by_registers = 65536 // (registers * 32 * tile.warps)
    return max(1, min(gpu.shared // shared_bytes(tile, itemsize), by_registers, 2048 // (32 * tile.warps)))


def tokens_of_tiles(rows: int) -> list[int]:
    """Tokens per tile that fit a number of rows: the next power of two, half of it, and from 65 rows on 64."""
    least = max(16, min(256, 1 << (rows - 1).bit_length()))
    few = [least] if least <= 32 else [least // 2, least]
    return sorted({*few, *([64] if rows > 64 else ())})


def geometries(rows: int, itemsize: int, gpu: Gpu) -> Iterator[MatmulTile]:
    """Tiles that are not split yet: each is one kernel to compile."""
    for tokens in tokens_of_tiles(rows):
        wide = (256, 512) if tokens <= 64 else (128, 256)
        if gpu.prefetch:
            for outputs, width in cross((64, 128), wide):
                base = MatmulTile(tokens, outputs, width // itemsize, outputs // 16, stages=3)
                for programs in (1, 2):
                    room = gpu.shared // programs - 2 * RESERVED
                    places = min(MOST_PREFETCHED, (room - tokens * width * base.stages) // (outputs * width))
                    if places >= 2 and (programs == 1 or tokens <= 64):
                        yield replace(base, prefetch=places)
        narrow = (128, 256, 512) if tokens <= 16 else (128, 256)
        outputs_of_tiles = (64, 128) if tokens < 64 else (64, 128, 256)
        for outputs, width, tma in cross(outputs_of_tiles, narrow, (True, False) if gpu.tma else (False,)):
            if tokens * outputs > 128 * 256 or (outputs == 256 and width > 128):
                continue
            warps = 8 if tokens * outputs > 64 * 128 else 4
            base = MatmulTile(tokens, outputs, width // itemsize, warps, tma=tma)
            stages: dict[int, None] = {}
            for programs in (1, 2):
                room = min(gpu.program_shared, gpu.shared // programs) - RESERVED
                fits = [n for n in range(3, MOST_STAGES + 1) if shared_bytes(replace(base, stages=n), itemsize) <= room]
                stages |= dict.fromkeys(fits[-1:])
            for count in stages:
                yield replace(base, stages=count)
                if tma and tokens >= 64:
                    yield replace(base, stages=count, swap=False)


def candidates(rows: int, outputs: int, inputs: int, itemsize: int, gpu: Gpu) -> Iterator[MatmulTile]:
    """Geometries, each with the splits that fill the SMs once or twice."""
    for tile in geometries(rows, itemsize, gpu):
        if tile.inputs > inputs or tile.outputs > max(64, outputs):
            continue
        if (tile.tma or tile.prefetch) and inputs * itemsize % 16:
            continue
        each = min(4, resident(tile, itemsize, gpu))
        _, tiles, blocks, _ = tile.launch(rows, outputs, inputs)
        fill = [places // tiles for places in (gpu.processors, each * gpu.processors)]
        splits = {1, 2, *fill, *(count + 1 for count in fill)}
        for split in sorted(splits):
            if split < 1 or (split > 1 and (split > blocks // 2 or tiles * split > 2 * each * gpu.processors)):
                continue
            if split > 1 and tiles > MOST_SHARED_TILES:
                continue
            found = replace(tile, split=split)
            if found.fits_32_bits(rows, outputs, inputs):
                yield found
                if tile.prefetch and rows <= 64 and tile.prefetch < ceil_div(blocks, split):
                    yield replace(found, prefetch_l2=4, prefetch_cycles=500)
        if tiles % gpu.processors and tiles <= MOST_SHARED_TILES and not tile.prefetch:
            found = replace(tile, programs=each * gpu.processors)
            if found.programs <= tiles * blocks // 2 and found.fits_32_bits(rows, outputs, inputs):
                yield found
