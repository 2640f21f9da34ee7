"""Fit of the constants with which core/tuning/model.py predicts the times of matmuls, to the timings of searches.

    python benchmarks/fit_tiles.py FILE.timings.jsonl [...] [--fit]
    python benchmarks/fit_tiles.py FILE.timings.jsonl [...] --gpu h100 --export core/tuning/tables/h100_timings.json
    python benchmarks/fit_tiles.py core/tuning/tables/h200_timings.json --also core/tuning/tables/h100_timings.json

app=tune keeps its timings in the cache folder, in files whose names end so. For each matmul that was timed, the script
prints the time of the tile with the shortest predicted time, among those that were timed, over that of the fastest one:
as the model alone predicts it, and corrected by the timings of the other shapes in the files (core/tuning/measured.py).
--fit first searches constants that make the predictions agree with the times, and prints them. --export writes the
timings as the file from which predictions are corrected. A corrected pick counts as wrong if it takes more than a
tenth longer; the exit code is 1 if there are any. Matmuls that were timed as faster than the GPU's memory can read the
weight are left out: another program used the GPU meanwhile.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from dovetail.core.ops.tile_choice import LIBRARY_ROWS, OP, tile_of
from dovetail.core.ops.tiles import MatmulTile
from dovetail.core.tuning.candidates import ITEMSIZE
from dovetail.core.tuning.gpu import Gpu
from dovetail.core.tuning.measured import Corrections, Measured, predicted_seconds, read_measured, text_of
from dovetail.core.tuning.model import FIT, Fit
from dovetail.core.tuning.search import read_found

WRONG = 1.1
NEAR = 1.5
"""Times within this factor of the fastest count fully, others a tenth."""
PICK = 2.0
"""Weight of a pick's time over the fastest, against the mean error of a prediction."""
ROUNDS = 60
HIDDEN = 3.0
"""Microseconds of a tile's reads that may overlap the preceding kernel, so that its time does not include them."""
SHARES = ("memory", "products", "library_memory", "library_products")
"""Constants that are at most 1."""


GPUS = {"h200": Gpu(), "h100": Gpu("NVIDIA H100 80GB HBM3", bandwidth=3.35e12)}


def read(files: Sequence[Path]) -> list[Measured]:
    """Read files of timings, and files that --export wrote."""
    exported = [file for file in files if file.suffix == ".json"]
    points = [one for file in exported for one in read_measured(file.read_text(encoding="utf-8"))[1]]
    for found in (one for file in files if file not in exported for one in read_found(file.open()).values()):
        if found.op == OP:
            facts: dict[str, Any] = dict(found.key)
            shape = found.rows, facts["outputs"], facts["inputs"], facts["weight"]
            # The model is of tiles, and of the library with as many rows as there are.
            timed = [pair for pair in (*found.times, *found.others) if pair[0] is None or LIBRARY_ROWS not in pair[0]]
            tiles = [(None if choice is None else tile_of(choice), us) for choice, us in timed]
            points.append(Measured(shape, [(tile, us) for tile, us in tiles if us > 0], found.way))
    return points


def disturbed(point: Measured, gpu: Gpu) -> bool:
    """Whether a time is shorter than reading the weight takes."""
    _, outputs, inputs, kind = point.shape
    return min(us for _, us in point.times) < 1e6 * outputs * inputs * ITEMSIZE[kind] / gpu.bandwidth - HIDDEN


def predicted(point: Measured, tile: MatmulTile | None, gpu: Gpu, fit: Fit) -> float:
    """Microseconds, by the model alone."""
    return 1e6 * predicted_seconds(tile, point.shape, gpu, fit, point.way)


def pick(point: Measured, gpu: Gpu, fit: Fit) -> tuple[float, MatmulTile | None]:
    """Return the time of the choice with the shortest predicted time over the fastest choice's."""
    tile, us = min(point.times, key=lambda pair: predicted(point, pair[0], gpu, fit))
    return us / min(us for _, us in point.times), tile


def corrected_pick(point: Measured, gpu: Gpu, corrections: Corrections) -> float:
    """The same, corrected by the timings of other shapes, and among the library and tiles that were timed near this
    one, if any."""
    factors = corrections.near(point.shape, but=point.shape[1:3])
    near = [pair for pair in point.times if pair[0] is None or pair[0] in factors] or point.times
    _, us = min(near, key=lambda pair: predicted(point, pair[0], gpu, FIT) * factors.get(pair[0], 1.0))
    return us / min(us for _, us in point.times)


def loss(points: Sequence[Measured], gpu: Gpu, fit: Fit) -> float:
    total = 0.0
    for point in points:
        least = min(us for _, us in point.times)
        guesses = [(predicted(point, tile, gpu, fit), us) for tile, us in point.times]
        weights = [1.0 if us <= NEAR * least else 0.1 for _, us in guesses]
        errors = [w * abs(math.log(guess / us)) for w, (guess, us) in zip(weights, guesses, strict=True)]
        total += sum(errors) / sum(weights) + PICK * math.log(min(guesses)[1] / least)
    return total / len(points)


def fitted(points: Sequence[Measured], gpu: Gpu, start: Fit) -> Fit:
    """Change one constant after another, by ever smaller factors, as long as that lowers the loss."""
    best, least, step = start, loss(points, gpu, start), 0.4
    for _ in range(ROUNDS):
        before = least
        for name, value in asdict(best).items():
            for factor in (1 + step, 1 / (1 + step)):
                if name in SHARES and value * factor > 1:
                    continue
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
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="GPU on which the files were made")
    parser.add_argument(
        "--also", type=Path, nargs="+", default=[], help="exported timings that correct predictions, too"
    )
    parser.add_argument("--export", type=Path)
    args = parser.parse_args()
    everything, gpu, fit = read(args.files), GPUS[args.gpu], FIT
    points = [point for point in everything if not disturbed(point, gpu)]
    if missing := len(everything) - len(points):
        print(f"{missing} matmuls are left out: faster than the memory")
    if args.export is not None:
        args.export.write_text(text_of(gpu, points), encoding="utf-8")
    if args.fit:
        fit = fitted(points, gpu, fit)
        print("\n".join(f"    {name}: float = {value:.3g}" for name, value in asdict(fit).items()))
    corrections = Corrections((gpu, points), *(read_measured(file.read_text()) for file in args.also))
    alone, corrected = [], []
    for point in sorted(points, key=lambda point: point.shape[1:] + point.shape[:1]):
        ratio, tile = pick(point, gpu, fit)
        alone.append(ratio)
        corrected.append(corrected_pick(point, gpu, corrections))
        best, us = min(point.times, key=lambda pair: pair[1])
        rows, outputs, inputs, kind = point.shape
        print(
            f"{kind:5s}{outputs:7d} x{inputs:6d} {rows:4d} rows  {ratio:5.3f}, corrected {corrected[-1]:5.3f}  "
            f"best {us:7.2f} us  predicted {predicted(point, best, gpu, fit):7.2f}, "
            f"picked {predicted(point, tile, gpu, fit):7.2f}  {tile}"
        )
    for name, ratios in (("model alone", alone), ("corrected", corrected)):
        wrong = sum(ratio > WRONG for ratio in ratios)
        mean, most = geometric_mean(ratios), max(ratios)
        print(f"{name}, {len(ratios)} matmuls: mean {mean:.3f}, largest {most:.3f}, {wrong} above {WRONG}")
    return 1 if max(corrected) > WRONG else 0


if __name__ == "__main__":
    sys.exit(main())
