"""Makes core/ops/tuned_tiles.py of what products.py and layer.py measured.

python benchmarks/tiles.py products.json [more.json ...]

Products in several files count as measured last; products that the table has and the files have not stay as they are.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from itertools import groupby
from pathlib import Path

from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile
from dovetail.core.ops.tuned_tiles import MEASURED

Key = tuple[str, str, int, int]

TABLE = Path(__file__).parents[1] / "core/ops/tuned_tiles.py"
HEAD = '''"""The quickest cuts of products, from benchmarks/products.py and layer.py; tiles.py wrote this file."""

from __future__ import annotations

from dovetail.core.ops.tiles import MatmulTile

MEASURED: dict[tuple[str, str, int, int], dict[int, MatmulTile | None]] = {
'''
END = '''}
"""(GPU, kind of weight, outputs, inputs) -> {up to so many rows: tile}; None: the library is quicker. More rows than
any of these are the library's."""
'''


def library(record: dict) -> float:
    """Of the library's products that could take the kernel's place: with scales by row, if there are scales."""
    return min(us for name, us in record["library"].items() if not name.startswith("tensor"))


def best(record: dict) -> MatmulTile | None:
    """The quickest of the tiles that do not need too many counters."""
    for entry in record["tiles"]:
        us = entry["us"]
        tile = MatmulTile(**{name: value for name, value in entry.items() if name != "us"})
        _, tiles, _, programs = tile.launch(record["rows"], record["outputs"], record["inputs"])
        shared = tiles % programs != 0
        if shared and tiles > MOST_SHARED_TILES:
            continue
        # No lead is asked for: ours overlaps with its neighbours, which the library's cannot.
        return tile if us <= library(record) else None
    return None


def table(files: list[Path]) -> dict[Key, dict[int, MatmulTile | None]]:
    found: dict[Key, dict[int, MatmulTile | None]] = dict(MEASURED)
    for file in files:
        content = json.loads(file.read_text())
        for record in content["products"]:
            key = (content["device"], record["dtype"], record["outputs"], record["inputs"])
            found[key] = dict(sorted({**found.get(key, {}), record["rows"]: best(record)}.items()))
    return dict(sorted(found.items()))


def shortest(rows: dict[int, MatmulTile | None]) -> dict[int, MatmulTile | None]:
    """Of neighbours with one tile only the last, and nothing after the last tile."""
    kept = {list(group)[-1]: tile for tile, group in groupby(rows, key=lambda n: rows[n])}
    while kept and list(kept.values())[-1] is None:
        kept.popitem()
    return kept


def written(tile: MatmulTile | None) -> str:
    """As one would write it: what stands by default is left out."""
    if tile is None:
        return "None"
    default = MatmulTile(0, 0, 0)
    named = [(field.name, getattr(tile, field.name)) for field in fields(tile)]
    sizes = [str(value) for _, value in named[:3]]
    rest = [f"{name}={value}" for name, value in named[3:] if value != getattr(default, name)]
    return f"MatmulTile({', '.join([*sizes, *rest])})"


def source(found: dict[Key, dict[int, MatmulTile | None]]) -> str:
    text = HEAD
    for key, rows in found.items():
        entries = "".join(f"        {most}: {written(tile)},\n" for most, tile in shortest(rows).items())
        name = ", ".join([json.dumps(key[0]), json.dumps(key[1]), *map(str, key[2:])])
        text += f"    ({name}): {{\n{entries}    }},\n" if entries else f"    ({name}): {{}},\n"
    return text + END


def main() -> None:
    TABLE.write_text(source(table([Path(name) for name in sys.argv[1:]])))


if __name__ == "__main__":
    main()
