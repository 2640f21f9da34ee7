"""Choice of the matmul kernel's tile for few rows, or of the library. This module does not import torch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.tiles import HOPPER_SHARED, MatmulTile
from dovetail.core.ops.tuned_tiles import MEASURED

MOST_ROWS = 64
"""Maximum number of rows for which the rule picks a tile; untuned shapes with more rows go to the library."""


@lru_cache(maxsize=1 << 14)
def choose(
    rows: int,
    outputs: int,
    inputs: int,
    kind: str,
    device: str,
    processors: int,
    prefetch: bool = True,
    shared: int = HOPPER_SHARED,
) -> MatmulTile | None:
    """Return the kernel's tile for x [rows, inputs] @ weight [outputs, inputs]^T, or None if the library is faster.

    `kind` is the weight's: "fp8" or "bf16". `device` and `processors` are the GPU's name and number of SMs. The tuned
    entry with the next higher number of rows applies. For untuned shapes, fp8 follows a rule, since the library is slow
    for few rows with per-row scales, and bf16 uses the library. With `prefetch` false, the GPU cannot run Hopper's
    kernels, and the rule replaces their tiles. `shared`: bytes of shared memory that a program may use.
    """
    measured = MEASURED.get((device, kind, outputs, inputs))
    ruled = _by_rule(rows, outputs, processors, shared) if kind == "fp8" else None
    tile = ruled if measured is None else next((tile for most, tile in measured.items() if rows <= most), None)
    if tile is not None and tile.needs_hopper and not prefetch:
        tile = ruled
    return tile if tile is not None and tile.fits_32_bits(rows, outputs, inputs) else None


def _by_rule(rows: int, outputs: int, processors: int, shared: int) -> MatmulTile | None:
    """Tiles of 64 outputs, split in two if they fill at most half of the SMs. Where each SM runs several programs, and
    where shared memory is small, fewer blocks are in flight."""
    if rows > MOST_ROWS:
        return None
    tokens = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiles = ceil_div(outputs, 64)
    if tiles > 2 * processors:
        tile = MatmulTile(tokens, 64, 128) if tokens < 64 else MatmulTile(tokens, 128, 128, warps=8)
    else:
        tile = MatmulTile(tokens, 64, 128, stages=8, split=2 if 2 * tiles <= processors else 1)
    while tile.shared_bytes(itemsize=1) > shared and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    return tile
