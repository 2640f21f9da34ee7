"""How a product of few rows is cut into programs. Light: tables of these are read without torch."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.arithmetic import ceil_div

MOST_SHARED_TILES = 512
"""Tiles whose blocks several programs share, at most: each needs a counter."""


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """A launch of core.ops.kernels.matmul, or of early."""

    tokens: int
    """Rows of x in a tile."""
    outputs: int
    """Rows of the weight in a tile."""
    inputs: int
    """Columns of a block: what one turn of the loop reads."""
    warps: int = 4
    stages: int = 4
    """Blocks on their way at once."""
    split: int = 1
    """Programs for each tile."""
    programs: int = 0
    """Programs for all tiles together, whose units they share equally (Stream-K); 0 = tiles x split."""
    tma: bool = False
    """Whether the tensor memory accelerator fetches blocks; needs rows of a multiple of 16 bytes."""
    swap: bool = True
    """Whether the weight is the left operand."""
    early: int = 0
    """Blocks of the weight that are on their way before the kernel in front has ended (core.ops.kernels.early, for
    Hopper; `stages` are then the input's); 0 = the kernel for all GPUs."""
    ahead: int = 0
    """Blocks behind those that are asked for into the L2 cache."""
    pace: int = 0
    """Cycles from one early block to the next: asked for at once, they are in the way of the words from other GPUs that
    the kernel in front waits for."""

    def launch(self, tokens: int, outputs: int, inputs: int) -> tuple[int, int, int, int]:
        """(tiles along tokens, tiles, blocks of a tile, programs)."""
        t_tiles = ceil_div(tokens, self.tokens)
        tiles = t_tiles * ceil_div(outputs, self.outputs)
        blocks = ceil_div(inputs, self.inputs)
        programs = min(self.programs, tiles * blocks) or tiles * min(self.split, blocks)
        return t_tiles, tiles, blocks, programs

    def shares(self, tokens: int, outputs: int, inputs: int) -> bool:
        """Whether several programs sum a tile, which takes counters."""
        _, tiles, _, programs = self.launch(tokens, outputs, inputs)
        return tiles % programs != 0

    def counts(self, tokens: int, outputs: int, inputs: int) -> bool:
        """Whether the kernel can: it finds a program's share of the work by products that must fit into 32 bits."""
        _, tiles, blocks, programs = self.launch(tokens, outputs, inputs)
        return programs * tiles * blocks < 2**31
