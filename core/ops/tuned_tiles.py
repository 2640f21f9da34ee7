"""Fastest matmul tiles, measured by benchmarks/matmul.py and layer.py, and written by `matmul.py --table`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from dovetail.core.ops.tiles import MatmulTile

Key = tuple[str, str, int, int]
"""(GPU, kind of weight, outputs, inputs)"""
Rows = dict[int, MatmulTile | None]
"""Maximum rows -> tile; None = the library is faster. More rows than the largest key go to the library."""

TABLE = Path(__file__).with_suffix(".json")


def read_tiles(path: Path = TABLE) -> dict[Key, Rows]:
    """Read a table of tiles: a JSON list with one object per shape."""
    found: dict[Key, Rows] = {}
    for shape in json.loads(path.read_text()):
        tiles = {int(rows): None if tile is None else MatmulTile(**tile) for rows, tile in shape["tiles"].items()}
        found[shape["gpu"], shape["weight"], shape["outputs"], shape["inputs"]] = tiles
    return found


def write_tiles(found: dict[Key, Rows], path: Path = TABLE) -> None:
    """Write a table that `read_tiles` reads, one line per shape, without fields that have their defaults."""
    shapes = []
    for (gpu, weight, outputs, inputs), rows in found.items():
        tiles = {str(most): None if tile is None else _set_fields(tile) for most, tile in rows.items()}
        shapes.append(dict(gpu=gpu, weight=weight, outputs=outputs, inputs=inputs, tiles=tiles))
    path.write_text("[\n" + ",\n".join(map(json.dumps, shapes)) + "\n]\n")


def _set_fields(tile: MatmulTile) -> dict[str, int | bool]:
    default = asdict(MatmulTile(0, 0, 0))
    return {name: value for name, value in asdict(tile).items() if value != default[name]}


MEASURED = read_tiles()


def tuned_rows(least: int) -> list[int]:
    """Return the maximum rows of all entries, from `least` on: matmuls up to each may need another kernel."""
    return sorted({least, *(most for rows in MEASURED.values() for most in rows if most >= least)})
