"""Results of matmul.py and layer.py in the shipped tuning table, for matmul.py --table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from dovetail.core import tuning
from dovetail.core.ops.tile_choice import OP, choice_of, matmul_key
from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile
from dovetail.core.tuning.matmul import Tiles
from dovetail.core.tuning.matmul import tiles_of as tiles_of_table
from dovetail.core.tuning.table import Subject, TuningTable, read_table, write_file

TABLE = Path(tuning.__file__).parent / "tables/nvidia_h200.json"


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


def shortest(rows: Tiles) -> Tiles:
    """Keep the last of neighbours with the same tile, and nothing after the last tile."""
    kept = {list(group)[-1]: tile for tile, group in groupby(rows, key=lambda n: rows[n])}
    while kept and list(kept.values())[-1] is None:
        kept.popitem()
    return kept


def write_table(files: list[Path]) -> None:
    table = read_table(TABLE, "dovetail")
    found = tiles_of_table(table)
    for file in files:
        content = json.loads(file.read_text())
        for record in content["products"]:
            key = (content["device"], record["dtype"], record["outputs"], record["inputs"])
            found[key] = dict(sorted({**found.get(key, {}), record["rows"]: chosen(record)}.items()))
    choices = {at: choice for at, choice in table.flat().items() if at[0].op != OP}
    for (gpu, kind, outputs, inputs), rows in found.items():
        subject = Subject(OP, gpu, matmul_key(kind, outputs, inputs))
        for most, tile in shortest(rows).items():
            choices[subject, most] = None if tile is None else choice_of(tile)
    write_file(TABLE, TuningTable.of(choices, "dovetail").text())
