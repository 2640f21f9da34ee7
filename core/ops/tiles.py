"""Partition of a matmul with few rows into programs. This module does not import torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from dovetail.core.arithmetic import ceil_div

MOST_SHARED_TILES = 1024
"""Number of counters that a matmul may need, one for each tile that several programs sum."""

HOPPER_SHARED = 227 << 10
"""Maximum shared memory of a program on an H100 or H200."""
SM_SHARED = 228 << 10
"""Shared memory of an SM of an H100 or H200, of which each program reserves 1 KB."""
RESERVED = 1 << 10
"""Shared memory for barriers and the like."""
GROUP_ROWS = 64
"""Rows of x that a warp group of specialized_matmul multiplies."""
GROUP_SCRATCH = 4 << 10
"""Shared memory in which a warp group of specialized_matmul rearranges outputs."""


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """Launch parameters of core.ops.kernels.matmul or prefetch_matmul."""

    tokens: int
    """Rows of x in a tile."""
    outputs: int
    """Rows of the weight in a tile."""
    inputs: int
    """Columns of a block, which one loop iteration reads."""
    warps: int = 4
    stages: int = 4
    """Blocks in flight."""
    split: int = 1
    """Programs per tile (split-K)."""
    programs: int = 0
    """Programs over which the units of all tiles are distributed equally (Stream-K); 0 = tiles x split."""
    tma: bool = False
    """Whether the tensor memory accelerator fetches blocks; row sizes must then be multiples of 16 bytes."""
    swap: bool = True
    """Whether the weight is the left operand."""
    prefetch: int = 0
    """Weight blocks fetched into shared memory before the preceding kernel has ended; 0 = the kernel for all GPUs.
    Otherwise prefetch_matmul runs, which needs Hopper, and `stages` applies to the input."""
    prefetch_l2: int = 0
    """Following weight blocks that are prefetched into the L2 cache."""
    prefetch_cycles: int = 0
    """Cycles between the prefetches of two blocks. Prefetches without a pause delay the data from other GPUs for which
    the preceding kernel waits."""

    specialized: bool = False
    """Whether specialized_matmul runs, which needs Hopper. Each warp group multiplies 64 of `tokens` rows, at most 192.
    `programs` compute whole tiles, and `warps` and `swap` do not apply."""

    residents: int = 1
    """Programs of an SM that specialized_packed leaves registers for."""

    def launch(self, tokens: int, outputs: int, inputs: int) -> tuple[int, int, int, int]:
        """Return (tiles along tokens, tiles, blocks of a tile, programs)."""
        t_tiles = ceil_div(tokens, self.tokens)
        tiles = t_tiles * ceil_div(outputs, self.outputs)
        blocks = ceil_div(inputs, self.inputs)
        most = tiles if self.specialized else tiles * blocks
        programs = min(self.programs, most) or tiles * min(self.split, blocks)
        return t_tiles, tiles, blocks, programs

    @property
    def needs_hopper(self) -> bool:
        return self.specialized or self.prefetch > 0

    @property
    def warp_groups(self) -> int:
        """Warp groups of specialized_matmul that multiply."""
        return self.tokens // GROUP_ROWS

    def shared_bytes(self, itemsize: int) -> int:
        """Upper estimate of a program's shared memory. `itemsize`: bytes of an element of x and of the weight."""
        x_blocks, weight_blocks = self.stages, self.prefetch or self.stages
        reserved = RESERVED + (GROUP_SCRATCH * self.warp_groups if self.specialized else 0)
        return (self.tokens * x_blocks + self.outputs * weight_blocks) * self.inputs * itemsize + reserved

    def counters(self, tokens: int, outputs: int, inputs: int) -> int:
        """Number of counters that the kernel needs."""
        if not self.splits_tiles(tokens, outputs, inputs):
            return 0
        _, tiles, _, _ = self.launch(tokens, outputs, inputs)
        return tiles * (self.warp_groups if self.specialized else 1)

    def splits_tiles(self, tokens: int, outputs: int, inputs: int) -> bool:
        """Whether some tile is summed by several programs, which needs counters."""
        _, tiles, _, programs = self.launch(tokens, outputs, inputs)
        return programs > tiles if self.specialized else tiles % programs != 0

    def fits_32_bits(self, tokens: int, outputs: int, inputs: int) -> bool:
        """Whether the kernel's index arithmetic, programs x units, fits into 32 bits."""
        _, tiles, blocks, programs = self.launch(tokens, outputs, inputs)
        return programs * tiles * blocks < 2**31


def kernel_of(tile: MatmulTile | None, tokens: int, outputs: int, inputs: int) -> Hashable:
    """Return what identifies the compiled kernel that a tile launches; None = the library's. Numbers of programs are no
    constants of a kernel, but whether programs split a tile, or have parts of two, is."""
    if tile is None:
        return None
    _, tiles, _, programs = tile.launch(tokens, outputs, inputs)
    apart = tile.needs_hopper or programs % tiles == 0
    return replace(tile, split=1, programs=0), tile.splits_tiles(tokens, outputs, inputs), apart


def specialized_tiles(rows: int, itemsize: int, shared: int = HOPPER_SHARED) -> Iterator[MatmulTile]:
    """Yield specialized_matmul's tiles for `rows` rows, with as many blocks in flight as fit into `shared` bytes."""
    groups = min(3, ceil_div(rows, GROUP_ROWS))
    for count, outputs, boxes in product(range(1, groups + 1), (64, 128, 256), (1, 2)):
        # Accumulators of 64 x 256 leave a program registers for two warp groups.
        if outputs == 256 and count > 2:
            continue
        tile = MatmulTile(GROUP_ROWS * count, outputs, 128 * boxes // itemsize, stages=8, specialized=True)
        while tile.shared_bytes(itemsize) > shared:
            tile = replace(tile, stages=tile.stages - 1)
        if tile.stages > 1:
            yield tile
