"""Results of matmul.py and layer.py as the table core/ops/tuned_tiles.py, for matmul.py --table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from pathlib import Path

from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile
from dovetail.core.ops.tuned_tiles import MEASURED

TABLE = Path(__file__).parents[1] / "core/ops/tuned_tiles.py"

Key = tuple[str, str, int, int]
Rows = dict[int, MatmulTile | None]


def tiles_of(record: dict) -> Iterator[tuple[float, MatmulTile]]:
    for entry in record["tiles"]:
        yield entry["us"], MatmulTile(**{name: value for name, value in entry.items() if name != "us"})


def chosen(record: dict) -> MatmulTile | None:
    """Return the fastest tile that does not need too many counters; None where the library is faster.

    No margin is required: our kernel overlaps with its neighbours, which the library's cannot. The library's variants
    with one scale for the whole tensor do not compute the same.
    """
    library = min(us for name, us in record["library"].items() if not name.startswith("tensor"))
    shape = record["rows"], record["outputs"], record["inputs"]
    for us, tile in tiles_of(record):
        if not tile.splits_tiles(*shape) or tile.launch(*shape)[1] <= MOST_SHARED_TILES:
            return tile if us <= library else None
    return None


def table(files: list[Path]) -> dict[Key, Rows]:
    found: dict[Key, Rows] = dict(MEASURED)
    for file in files:
        content = json.loads(file.read_text())
        for record in content["products"]:
            key = (content["device"], record["dtype"], record["outputs"], record["inputs"])
            found[key] = dict(sorted({**found.get(key, {}), record["rows"]: chosen(record)}.items()))
    return dict(sorted(found.items()))


def shortest(rows: Rows) -> Rows:
    """Keep the last of neighbours with the same tile, and nothing after the last tile."""
    kept = {list(group)[-1]: tile for tile, group in groupby(rows, key=lambda n: rows[n])}
    while kept and list(kept.values())[-1] is None:
        kept.popitem()
    return kept


def source(tile: MatmulTile | None) -> str:
    """Python source of a tile without the defaults."""
    if tile is None:
        return "None"
    default = MatmulTile(0, 0, 0)
    named = [(field.name, getattr(tile, field.name)) for field in fields(tile)]
    sizes = [str(value) for _, value in named[:3]]
    rest = [f"{name}={value}" for name, value in named[3:] if value != getattr(default, name)]
    return f"MatmulTile({', '.join([*sizes, *rest])})"


def write_table(files: list[Path]) -> None:
    """Replace the entries of the table's module; the text around them stays."""
    entries = ""
    for key, rows in table(files).items():
        lines = "".join(f"        {most}: {source(tile)},\n" for most, tile in shortest(rows).items())
        name = ", ".join([json.dumps(key[0]), json.dumps(key[1]), *map(str, key[2:])])
        entries += f"    ({name}): {{\n{lines}    }},\n" if lines else f"    ({name}): {{}},\n"
    old = TABLE.read_text()
    new, count = re.subn(r"(?ms)(^MEASURED\b[^\n]* = \{\n).*?(^\}$)", lambda found: found[1] + entries + found[2], old)
    assert count == 1, f"{TABLE} has no table"
    TABLE.write_text(new)
