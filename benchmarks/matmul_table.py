"""Results of matmul.py and layer.py in the shipped tuning table, for matmul.py --table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from dovetail.core import tuning
from dovetail.core.files import write_file
from dovetail.core.ops.tile_choice import OP, choice_of, matmul_key
from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile
from dovetail.core.tuning.table import Subject, TuningTable, merged, read_table

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
        if tile.counters(*shape) <= MOST_SHARED_TILES:
            return tile if us <= library else None
    return None


def write_table(files: list[Path]) -> None:
    """Add the results to the table. Its other entries stay."""
    choices = {}
    for file in files:
        content = json.loads(file.read_text())
        for record in content["products"]:
            subject = Subject(OP, content["device"], matmul_key(record["dtype"], record["outputs"], record["inputs"]))
            tile = chosen(record)
            choices[subject, record["rows"]] = None if tile is None else choice_of(tile)
    write_file(TABLE, merged([TuningTable.of(choices, "benchmark"), read_table(TABLE, "dovetail")]).text())
