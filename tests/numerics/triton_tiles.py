"""Tiles of attention=triton for tests: small ones, and one for all rows."""

from __future__ import annotations

from dataclasses import replace

from triton import next_power_of_2

from dovetail.plugins.attention.config import TritonConfig
from dovetail.plugins.attention.triton.backend import Triton
from dovetail.plugins.attention.triton.tiles import (
    Shape,
    Tile,
    Tiles,
    fit,
)


class SmallTiles(Tiles):
    """Tiles with short blocks and ranges, so that short rows have many of both."""

    def __init__(self, programs: int = 64, tma: bool = False) -> None:
        self.programs, self.tma = programs, tma

    def decode(self, shape, tokens, programs):
        tile = super().decode(shape, tokens, programs)
        return replace(tile, block_n=16, programs=self.programs, least=16)

    def prefill(self, shape, tokens, rows):
        return fit(Tile(64, 16, 4, 2, self.programs, least=16, tma=self.tma), shape)


class WholeRows(SmallTiles):
    """Tiles that never split a row."""

    def decode(self, shape, tokens, programs):
        return replace(super().decode(shape, tokens, programs), least=4096)

    def prefill(self, shape, tokens, rows):
        return replace(super().prefill(shape, tokens, rows), least=4096)


class WarpTiles(SmallTiles):
    """Tiles whose warps each process different keys. Some warps have no keys, or only masked ones."""

    def decode(self, shape, tokens, programs):
        tile = super().decode(shape, tokens, programs)
        rows = next_power_of_2(max(8, shape.group * tokens))
        return fit(replace(tile, block_m=rows, key_warps=4, warps=4, pairs=rows <= 32), shape)


class FixedTile(Tiles):
    """The same tile for every decode row."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    def decode(self, shape: Shape, tokens: int, programs: float) -> Tile:
        return self.tile


class GatheringTiles(SmallTiles):
    """Tiles for which prompts read copies of their pages."""

    def gather(self, shape, tokens, bounds, kv_heads):
        return True


def make(tiles: Tiles | None = None) -> Triton:
    backend = Triton(TritonConfig())
    if tiles is not None:
        backend.tiles = tiles
    return backend
