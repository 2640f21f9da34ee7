"""Rows of activations that exist in memory after the last one, so that no matmul tile reads past the tensor's end.

The tensor memory accelerator fills what lies outside a tensor with zeros, and for some shapes it does so slowly: on an
H200, 80 rows took longer than 128, and 24 rows longer than 48 (benchmarks/NOTES.md). So activations get room for whole
tiles, and matmuls read what happens to be there; the outputs of these rows are not stored. The library's matmul is
slower for some numbers of rows than for more, and then takes some of this memory as further rows
(core.ops.tile_choice.library_rows).
"""

from __future__ import annotations

import torch

from dovetail.core.arithmetic import ceil_div

MOST_PADDED = 512
"""Maximum number of rows that are padded: with more, few tiles are incomplete."""
LEAST_PADDED, MOST_TILE = 128, 256
"""Minimum of the rows that there is memory for: a tile that was tuned for more rows serves fewer, too. Maximum number
of rows in a tile."""


def padded(rows: int) -> int:
    """Return the number of rows of whole tiles: LEAST_PADDED or MOST_TILE, then multiples of it."""
    if not 0 < rows <= MOST_PADDED:
        return rows
    tile = LEAST_PADDED if rows <= LEAST_PADDED else MOST_TILE
    return ceil_div(rows, tile) * tile


def empty_rows(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor [rows, columns], contiguous, with memory for `padded` rows."""
    return torch.empty(padded(rows), columns, dtype=dtype, device=device)[:rows]


def readable_rows(x_TC: torch.Tensor, tile: int) -> int:
    """Return how many rows a kernel with tiles of `tile` rows should read: whole tiles if x's memory holds them, else
    x's own rows."""
    rows = len(x_TC)
    wanted = ceil_div(rows, tile) * tile
    held = x_TC.untyped_storage().nbytes() // x_TC.element_size() - x_TC.storage_offset()
    return wanted if wanted * x_TC.stride(0) <= held else rows


def more_rows(x_TC: torch.Tensor, rows: int) -> torch.Tensor:
    """Return x with `rows` rows, at least its own. Those behind its own have any values, NaN among them. They are what
    x's memory holds there, without a copy, if it holds so many."""
    own, columns = x_TC.shape
    if rows == own:
        return x_TC
    if x_TC.is_contiguous() and readable_rows(x_TC, rows) == rows:
        return x_TC.as_strided((rows, columns), x_TC.stride())
    copied = x_TC.new_empty(rows, columns)
    copied[:own].copy_(x_TC)
    return copied
