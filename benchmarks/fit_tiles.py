"""Fit of the constants with which core/tuning/model.py predicts the times of matmuls, to the timings of searches.

    python benchmarks/fit_tiles.py FILE.timings.jsonl [...] [--fit]

app=tune keeps its timings in the cache folder, in files whose names end so. For each matmul that was timed, the script
prints the time of the tile with the shortest predicted time, among those that were timed, over that of the fastest one.
--fit first searches constants that make the predictions agree with the times, and prints them. A pick counts as wrong
if it takes more than a tenth longer; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from dovetail.core.ops.tile_choice import OP, tile_of
from dovetail.core.ops.tiles import MatmulTile
from dovetail.core.tuning.gpu import Gpu
from dovetail.core.tuning.model import FIT, Fit, library_seconds, tile_seconds
from dovetail.core.tuning.search import read_found

WRONG = 1.1
NEAR = 1.5
"""Times within this factor of the fastest count fully, others a tenth."""
PICK = 2.0
"""Weight of a pick's time over the fastest, against the mean error of a prediction."""
ROUNDS = 60


class Point(NamedTuple):
    """The timed choices of one matmul."""

    shape: tuple[int, int, int, str]
    """rows, outputs, inputs, kind of weight"""
    times: list[tuple[MatmulTile | None, float]]
    """Microseconds; None = the library."""


def read(files: Iterable[Path]) -> list[Point]:
    points = []
    for found in (one for file in files for one in read_found(file.open()).values()):
        if found.op == OP:
            facts: dict[str, Any] = dict(found.key)
            shape = found.rows, facts["outputs"], facts["inputs"], facts["weight"]
            tiles = [(None if choice is None else tile_of(choice), us) for choice, us in (*found.times, *found.others)]
            points.append(Point(shape, [(tile, us) for tile, us in tiles if us > 0]))
    return points


def predicted(point: Point, tile: MatmulTile | None, gpu: Gpu, fit: Fit) -> float:
    """Microseconds."""
    if tile is None:
        return 1e6 * library_seconds(*point.shape, gpu, fit)
    return 1e6 * tile_seconds(tile, *point.shape, gpu, fit)


def pick(point: Point, gpu: Gpu, fit: Fit) -> tuple[float, MatmulTile | None]:
    """Return the time of the choice with the shortest predicted time over the fastest choice's."""
    tile, us = min(point.times, key=lambda pair: predicted(point, pair[0], gpu, fit))
    return us / min(us for _, us in point.times), tile


def loss(points: Sequence[Point], gpu: Gpu, fit: Fit) -> float:
    total = 0.0
    for point in points:
        least = min(us for _, us in point.times)
        guesses = [(predicted(point, tile, gpu, fit), us) for tile, us in point.times]
        weights = [1.0 if us <= NEAR * least else 0.1 for _, us in guesses]
        errors = [w * abs(math.log(guess / us)) for w, (guess, us) in zip(weights, guesses, strict=True)]
        total += sum(errors) / sum(weights) + PICK * math.log(min(guesses)[1] / least)
    return total / len(points)


def fitted(points: Sequence[Point], gpu: Gpu, start: Fit) -> Fit:
    """Change one constant after another, by ever smaller factors, as long as that lowers the loss."""
    best, least, step = start, loss(points, gpu, start), 0.4
    for _ in range(ROUNDS):
        before = least
        for name, value in asdict(best).items():
            for factor in (1 + step, 1 / (1 + step)):
                changed = replace(best, **{name: value * factor})
                if (found := loss(points, gpu, changed)) < least:
                    best, least = changed, found
        if least > before * 0.999:
            step /= 2
            if step < 0.01:
                break
        print(f"loss {least:.4f}, step {step:.3f}", flush=True)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    points, gpu, fit = read(args.files), Gpu(), FIT
    if args.fit:
        fit = fitted(points, gpu, fit)
        print("\n".join(f"    {name}: float = {value:.3g}" for name, value in asdict(fit).items()))
    ratios = []
    for point in sorted(points, key=lambda point: point.shape[1:] + point.shape[:1]):
        ratio, tile = pick(point, gpu, fit)
        ratios.append(ratio)
        best, us = min(point.times, key=lambda pair: pair[1])
        rows, outputs, inputs, kind = point.shape
        print(
            f"{kind:5s}{outputs:7d} x{inputs:6d} {rows:4d} rows  {ratio:5.3f}  best {us:7.2f} us  "
            f"predicted {predicted(point, best, gpu, fit):7.2f}, picked {predicted(point, tile, gpu, fit):7.2f}  {tile}"
        )
    wrong = sum(ratio > WRONG for ratio in ratios)
    print(f"{len(ratios)} matmuls: mean {geometric_mean(ratios):.3f}, largest {max(ratios):.3f}, {wrong} above {WRONG}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
