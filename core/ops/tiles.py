"""Partition of a matmul with few rows into programs. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.arithmetic import ceil_div

MOST_SHARED_TILES = 512
"""Maximum number of tiles that are split over several programs; each of them needs a counter."""

HOPPER_SHARED = 227 << 10
"""Maximum shared memory of a program on an H100 or H200."""
RESERVED = 1 << 10
"""Shared memory for barriers and the like."""


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

    def launch(self, tokens: int, outputs: int, inputs: int) -> tuple[int, int, int, int]:
        """Return (tiles along tokens, tiles, blocks of a tile, programs)."""
        t_tiles = ceil_div(tokens, self.tokens)
        tiles = t_tiles * ceil_div(outputs, self.outputs)
        blocks = ceil_div(inputs, self.inputs)
        programs = min(self.programs, tiles * blocks) or tiles * min(self.split, blocks)
        return t_tiles, tiles, blocks, programs

    def shared_bytes(self, itemsize: int) -> int:
        """Upper estimate of a program's shared memory. `itemsize`: bytes of an element of x and of the weight."""
        x_blocks, weight_blocks = self.stages, self.prefetch or self.stages
        return (self.tokens * x_blocks + self.outputs * weight_blocks) * self.inputs * itemsize + RESERVED

    def splits_tiles(self, tokens: int, outputs: int, inputs: int) -> bool:
        """Whether some tile is summed by several programs, which needs counters."""
        _, tiles, _, programs = self.launch(tokens, outputs, inputs)
        return tiles % programs != 0

    def fits_32_bits(self, tokens: int, outputs: int, inputs: int) -> bool:
        """Whether the kernel's index arithmetic, programs x units, fits into 32 bits."""
        _, tiles, blocks, programs = self.launch(tokens, outputs, inputs)
        return programs * tiles * blocks < 2**31
