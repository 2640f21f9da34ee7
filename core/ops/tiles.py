"""How a product of few rows is cut into programs. Light: tables of these are read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

MOST_SHARED_TILES = 512
"""Tiles whose blocks several programs share, at most: each needs a counter."""
MOST_ROWS = 64
"""More rows than this go to the library where nothing was measured."""


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """A launch of core.ops.kernels.matmul."""

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

    def launch(self, tokens: int, outputs: int, inputs: int) -> tuple[int, int, int, int]:
        """(tiles along tokens, tiles, blocks of a tile, programs)."""
        t_tiles = -(-tokens // self.tokens)
        tiles = t_tiles * -(-outputs // self.outputs)
        blocks = -(-inputs // self.inputs)
        programs = min(self.programs, tiles * blocks) or tiles * min(self.split, blocks)
        return t_tiles, tiles, blocks, programs


@cache
def choose(tokens: int, outputs: int, inputs: int, kind: str, device: str, processors: int) -> MatmulTile | None:
    """The kernel's tile for x [tokens, inputs] @ weight [outputs, inputs]^T, or None: the library is better.

    `kind` is the weight's dtype, `device` and `processors` the GPU's name and multiprocessors.
    """
    return _by_rule(tokens, outputs, processors) if kind == "float8_e4m3fn" else None


def _by_rule(tokens: int, outputs: int, processors: int) -> MatmulTile | None:
    """For scaled 8-bit weights: a tile of 64 outputs, split in two where half the multiprocessors would do; fewer
    blocks on their way where several programs stand on each."""
    if tokens > MOST_ROWS:
        return None
    rows = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    tiles = -(-outputs // 64)
    if tiles > 2 * processors:
        return MatmulTile(rows, 64, 128, stages=4) if rows < 64 else MatmulTile(64, 128, 128, warps=8, stages=4)
    return MatmulTile(rows, 64, 128, stages=8, split=2 if 2 * tiles <= processors else 1)
