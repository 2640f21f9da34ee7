"""Timings of matmuls from earlier searches, which correct predictions for shapes and rows near theirs.

The model of core.tuning.model errs alike for one tile on shapes that are alike. So a tile's predicted time is
multiplied by a mean of (measured / predicted) of the same tile, weighted by how near shape and rows are (kernel
regression: Nadaraya 1964, Watson 1964), and drawn towards 1 where little was measured nearby.

    {"schema": "dovetail.timings/1", "gpu": {"name": "NVIDIA H100 80GB HBM3", ...},
     "choices": [null, {"tokens": 16, ...}], "matmuls": [["fp8", 6144, 4096, 16, [[0, 14.1], [1, 8.2]]], ...]}

A matmul is: kind of weight, outputs, inputs, rows, pairs of a choice's index and microseconds, and the way of the
library (core.tuning.model), if it has one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from dovetail.core.ops.tile_choice import LIKE, choice_of, tile_of
from dovetail.core.ops.tiles import MatmulTile
from dovetail.core.tuning.gpu import Gpu
from dovetail.core.tuning.model import FIT, Fit, library_seconds, tile_seconds

SCHEMA = "dovetail.timings/1"
HOPPER = ("tables/h100_timings.json", "tables/h200_timings.json")
"""Files of timings from GPUs of this architecture."""
SHAPE_SCALE = 0.7
"""Distance of shapes, |ln(outputs ratio)| + |ln(inputs ratio)|, at which a timing counts 1/e."""
ROWS_SCALE = 0.4
"""The same for |ln(rows ratio)|."""
PRIOR = 0.3
"""Weight of "the model is right"."""
LEAST = 0.1
"""Sum of a tile's weights below which it counts as not measured nearby."""

Shape = tuple[int, int, int, str]
"""rows, outputs, inputs, kind of weight"""


class Measured(NamedTuple):
    """The timed choices of one matmul."""

    shape: Shape
    times: Sequence[tuple[MatmulTile | None, float]]
    """Microseconds; None = the library."""
    way: str = ""
    """The library's: DEFERRED, CONVERTED, or neither."""


def predicted_seconds(tile: MatmulTile | None, shape: Shape, gpu: Gpu, fit: Fit = FIT, way: str = "") -> float:
    """Return the model's time of a tile, or of the library's `way`."""
    return library_seconds(*shape, gpu, fit, way) if tile is None else tile_seconds(tile, *shape, gpu, fit)


class Corrections:
    """Corrections from the timings of GPU models that have equally many multiprocessors."""

    def __init__(self, *measured: tuple[Gpu, Iterable[Measured]]) -> None:
        counts = sorted({gpu.processors for gpu, _ in measured})
        if len(counts) != 1:
            known = " and ".join(map(str, counts)) or "no"
            raise ValueError(f"timings of GPUs with {known} multiprocessors; all must have equally many")
        self._processors = counts[0]
        self.tiles: list[MatmulTile | None] = []
        """Every choice that was timed."""
        numbers: dict[MatmulTile | None, int] = {}
        found: dict[str, list[tuple[float, ...]]] = {}
        for gpu, (shape, times, way) in ((gpu, one) for gpu, many in measured for one in many):
            rows, outputs, inputs, kind = shape
            for tile, us in times:
                if tile not in numbers:
                    numbers[tile] = len(self.tiles)
                    self.tiles.append(tile)
                error = np.log(1e-6 * us / predicted_seconds(tile, shape, gpu, way=way))
                line = numbers[tile], np.log(rows), np.log(outputs), np.log(inputs), error
                found.setdefault(kind, []).append(line)
        self._by_kind = {kind: np.array(lines).T for kind, lines in found.items()}

    def near(
        self, shape: Shape, but: tuple[int, int] | None = None, processors: int | None = None
    ) -> dict[MatmulTile | None, float]:
        """Return the factor for each tile that was timed near this shape. `but`: outputs and inputs of timings to leave
        out, to judge the rest by them. `processors`: SMs of the GPU on which the tiles are to run, over which those
        with a program for each SM are spread; None = as many as were timed."""
        rows, outputs, inputs, kind = shape
        kind = kind if kind in self._by_kind else LIKE.get(kind, kind)
        if kind not in self._by_kind:
            return {}
        numbers, log_rows, log_outputs, log_inputs, errors = self._by_kind[kind]
        by_shape = np.abs(log_outputs - np.log(outputs)) + np.abs(log_inputs - np.log(inputs))
        weights = np.exp(-by_shape / SHAPE_SCALE - np.abs(log_rows - np.log(rows)) / ROWS_SCALE)
        if but is not None:
            weights *= (log_outputs != np.log(but[0])) | (log_inputs != np.log(but[1]))
        tiles, count = numbers.astype(int), len(self.tiles)
        sums = np.bincount(tiles, weights, count)
        factors = np.exp(np.bincount(tiles, weights * errors, count) / (sums + PRIOR))
        return {self._spread(self.tiles[i], processors): float(factors[i]) for i in np.flatnonzero(sums >= LEAST)}

    def _spread(self, tile: MatmulTile | None, processors: int | None) -> MatmulTile | None:
        each, rest = (0, 0) if tile is None else divmod(tile.programs, self._processors)
        return tile if tile is None or processors is None or rest else replace(tile, programs=each * processors)


def text_of(gpu: Gpu, measured: Iterable[Measured]) -> str:
    """Return the content of a file with these timings, one matmul per line."""
    choices: dict[str, int] = {}
    lines = []
    for (rows, outputs, inputs, kind), times, way in sorted(measured, key=lambda one: (*one.shape[3:], *one.shape[:3])):
        pairs = []
        for tile, us in sorted(times, key=lambda pair: pair[1]):
            text = json.dumps(None if tile is None else dict(choice_of(tile)), sort_keys=True)
            pairs.append([choices.setdefault(text, len(choices)), round(us, 2)])
        named = [way] if way else []
        lines.append(json.dumps([kind, outputs, inputs, rows, pairs, *named], separators=(",", ":")))
    known, matmuls = ",\n".join(choices), ",\n".join(lines)
    head = f'"schema": {json.dumps(SCHEMA)}, "gpu": {json.dumps(asdict(gpu))}'
    return f'{{{head}, "choices": [\n{known}\n], "matmuls": [\n{matmuls}\n]}}\n'


def read_measured(text: str) -> tuple[Gpu, list[Measured]]:
    """Return the content of a file of this package."""
    content: Mapping[str, Any] = json.loads(text)
    if content["schema"] != SCHEMA:
        raise ValueError(f"the schema is {content['schema']}, not {SCHEMA}")
    tiles = [None if choice is None else tile_of(choice) for choice in content["choices"]]
    found = [
        Measured((rows, outputs, inputs, kind), [(tiles[number], us) for number, us in pairs], *way)
        for kind, outputs, inputs, rows, pairs, *way in content["matmuls"]
    ]
    return Gpu(**content["gpu"]), found


@cache
def hopper_corrections() -> Corrections:
    """Return the corrections from the timings that Dovetail ships for Hopper."""
    package = files("dovetail.core.tuning")
    return Corrections(*(read_measured(package.joinpath(*name.split("/")).read_text("utf-8")) for name in HOPPER))
