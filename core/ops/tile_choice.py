"""Which products of few rows go to the kernel, and cut how. Light: imports no torch."""

from __future__ import annotations

from functools import lru_cache

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.tiles import MatmulTile
from dovetail.core.ops.tuned_tiles import MEASURED

MOST_ROWS = 64
"""More rows than this go to the library where nothing was measured."""


@lru_cache(maxsize=1 << 14)
def choose(
    rows: int, outputs: int, inputs: int, kind: str, device: str, processors: int, early: bool = True
) -> MatmulTile | None:
    """The kernel's tile for x [rows, inputs] @ weight [outputs, inputs]^T, or None: the library is quicker.

    `kind` is "fp8" or "bf16", the weight's; `device` and `processors` are the GPU's name and multiprocessors. What was
    measured with more rows, but not many more, holds for fewer. Where nothing was, fp8 follows a rule, since the
    library's row-wise product of few rows is slow everywhere; bf16 is the library's. Without `early`, where the kernel
    of such tiles does not run, the rule stands for them, too.
    """
    measured = MEASURED.get((device, kind, outputs, inputs))
    ruled = _by_rule(rows, outputs, processors) if kind == "fp8" else None
    tile = ruled if measured is None else next((tile for most, tile in measured.items() if rows <= most), None)
    if tile is not None and tile.early and not early:
        tile = ruled
    return tile if tile is not None and tile.counts(rows, outputs, inputs) else None


def _by_rule(rows: int, outputs: int, processors: int) -> MatmulTile | None:
    """Tiles of 64 outputs, split in two where half the multiprocessors would do; fewer blocks on their way where
    several programs stand on each."""
    if rows > MOST_ROWS:
        return None
    tokens = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiles = ceil_div(outputs, 64)
    if tiles > 2 * processors:
        return MatmulTile(tokens, 64, 128) if tokens < 64 else MatmulTile(tokens, 128, 128, warps=8)
    return MatmulTile(tokens, 64, 128, stages=8, split=2 if 2 * tiles <= processors else 1)
