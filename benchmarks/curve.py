"""Time of a decode step over the number of rows, beside its limit: shows row counts that are slower than larger ones.

    python benchmarks/curve.py --out curves/8b_bf16 -- +preset=h200_bf16_tp1 engine.max_len=1024
    python benchmarks/curve.py 60 64 65 80 --out curves/few -- +preset=h200_fp8_tp1 model=qwen25_7b cost=h100
    python benchmarks/curve.py --draw curves/*.json --out curves/all

Writes OUT.json and OUT.png, and prints a line for each CUDA graph size. Exits with status 1 if a step takes more than
1.03 times the step at the next greater graph size; such a point is measured again first. Without rows, each graph size
up to --most is measured, one row more, and the middle to the next size. OUT.json is written after each point
("complete": false until all is measured), so that an interrupted run keeps its points.

The limit is that of the cost model of the composition (cost=h200, h100, ...) without overheads: the weights at the
device's bandwidth or the matmuls at its rate, whichever takes longer, then keys and values at the bandwidth. The notes
of the engine's start are printed last; one of them says if the cost model is for another GPU than the measured one.

Columns with a name, such as qkv, are the efficiency of that matmul alone: its limit (the longer of both, as above) over
its time in a CUDA graph that contains the matmul of every layer, so that no weight is found in the L2 cache. They are
measured at graph sizes, to which steps are padded, and only with executor=inproc.

--draw measures nothing and needs no GPU: it draws the given OUT.json together in OUT.png, a panel for each model with
a line for each of its number formats, and prints a table in Markdown. Its status is 0 even if a curve breaks the rule.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from curve_figure import SCHEMA, broken, draw_all, draw_one, markdown, read_curves
from profile_step import GREEDY, STEPS, WARM, Sampling, decode_seconds, sampling_argument

from dovetail import Composition, ConfigError, DovetailError, compose
from dovetail.core.engine.cost import bind_cost, formats
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.interfaces import PLAIN, CostModel
from dovetail.core.layers.linear import Linear
from dovetail.core.ops.formats import encode
from dovetail.core.ops.padding import empty_rows
from dovetail.core.worker.graph_sizes import batch_sizes
from dovetail.plugins.app.bench.record import describe
from dovetail.plugins.cost.config import RooflineConfig

RULE = 1.03
"""Greatest time of a step relative to the step at the next greater graph size."""
GOOD = 0.85
"""Efficiency that a matmul alone should reach."""
NO_OVERHEAD = {"kernels": 0.0, "step_us": 0.0, "link_us": 0.0} | dict.fromkeys(
    ("kv_share", "attention_share", "decode_share"), 1.0
)
"""Options of cost=roofline for the limit."""

Measure = Callable[[int], float]
"""Milliseconds of a decode step of so many rows."""
Products = dict[int, dict[str, dict[str, float]]]
"""Rows -> name of a matmul -> its time, limit and efficiency."""


def graph_sizes(most: int) -> list[int]:
    """Return the graph sizes up to the first that holds `most` rows."""
    sizes = batch_sizes(2 * most)
    return sizes[: bisect_left(sizes, most) + 1]


def default_rows(sizes: Sequence[int]) -> list[int]:
    """Return each size, one row more, and the middle to the next size."""
    between = (n for size, after in pairwise(sizes) for n in (size + 1, (size + after) // 2))
    return sorted({*sizes, *between})


def next_size(rows: int, sizes: Sequence[int]) -> int | None:
    """Return the next graph size greater than `rows`; None = there is none."""
    place = bisect_right(sizes, rows)
    return sizes[place] if place < len(sizes) else None


def step_times(rows: Sequence[int], sizes: Sequence[int], measure: Measure) -> dict[int, float]:
    """Measure `rows` and the next graph size of each. Points that break the rule are measured again, in turn with the
    size that they are compared with, and the smaller time counts."""
    wanted = {*rows, *(size for n in rows if (size := next_size(n, sizes)) is not None)}
    found = {n: measure(n) for n in sorted(wanted)}
    for n, size in [pair for pair in pairs(found, sizes) if found[pair[0]] > RULE * found[pair[1]]]:
        for again in (n, size):
            found[again] = min(found[again], measure(again))
    return found


def pairs(found: dict[int, float], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (rows, next greater graph size) of the points whose next size was measured."""
    for n in sorted(found):
        if (size := next_size(n, sizes)) is not None and size in found:
            yield n, size


def ratios(found: dict[int, float], sizes: Sequence[int]) -> dict[int, float]:
    """Return rows -> time relative to the next greater graph size."""
    return {n: found[n] / found[size] for n, size in pairs(found, sizes)}


# Limits.


def device_rates(composition: Composition) -> RooflineConfig:
    """Return the rates of the composition's device. Raises ConfigError if its cost model has none."""
    part = composition.part("cost")
    if not isinstance(part.config, RooflineConfig):
        raise ConfigError(
            f"cost={part.name} has no rates for the limit: choose cost=h200, h100, a100, l40s or cpu, or cost=roofline "
            "with cost.bandwidth and cost.tflops"
        )
    return part.config


def without_overhead(composition: Composition, engine: Engine) -> CostModel:
    """Return the composition's cost model without overheads."""
    words = [*composition.overrides, *(f"cost.{name}={value}" for name, value in NO_OVERHEAD.items())]
    cost = bind_cost(compose(words), engine.info.spec, str(engine.info.device))
    assert cost is not None, "a roofline predicts"
    return cost


# Matmuls alone.


def linears(engine: Engine) -> dict[str, list[Linear]]:
    """Return the linear layers of the model by name, such as attn.qkv, each in the order of the model's layers. Empty
    if the model is in other processes."""
    runner = getattr(engine.executor, "_runner", None)
    found: dict[str, list[Linear]] = {}
    queue: list[Any] = [] if runner is None else [runner.parts.model]
    seen: set[int] = set()
    while queue:
        one = queue.pop(0)
        if id(one) in seen or isinstance(one, torch.Tensor | type):
            continue
        seen.add(id(one))
        if isinstance(one, Linear) and one.params:
            # Compressed attention takes the tensors of its up-projection.
            found.setdefault(re.sub(r"^layers\.\d+\.", "", one.path), []).append(one)
        elif isinstance(one, list | tuple):
            queue += one
        elif isinstance(one, dict):
            queue += one.values()
        else:
            queue += getattr(one, "__dict__", {}).values()
    return found


@torch.inference_mode()
def product_us(layers: Sequence[Linear], rows: int) -> float:
    """Return the microseconds of the matmul of one layer, with each layer's own weight."""
    shape = layers[0].shape
    x_TI = empty_rows(rows, shape.inp, shape.dtype, next(iter(layers[0].params.values())).device).normal_()
    inputs = {one.inputs: encode(x_TI, one.inputs) for one in layers}

    def call() -> None:
        for one in layers:
            one(inputs[one.inputs])

    if not x_TI.is_cuda:
        call()
        times = []
        for _ in range(3):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e6 / len(layers)
    # It needs Triton.
    from timing import microseconds

    return microseconds(call) / len(layers)


def product_bound_us(layer: Linear, rows: int, rates: RooflineConfig, product: str, plain: str) -> float:
    """Return the longer of reading the weight and multiplying. `product` and `plain` are the number formats of encoded
    and of plain inputs."""
    nbytes = sum(tensor.nbytes for tensor in layer.params.values())
    flops = 2 * rows * layer.shape.inp * layer.shape.out
    rate = rates.tflops[plain if layer.input is PLAIN else product]
    return max(nbytes / rates.bandwidth, flops / rate) * 1e-6


def efficiencies(engine: Engine, sizes: Sequence[int], rates: RooflineConfig) -> Products:
    """Measure the matmuls of a layer."""
    stated = formats(engine.composition, engine.info.spec, str(engine.info.device))
    found: Products = {size: {} for size in sizes}
    for name, layers in linears(engine).items():
        for size in sizes:
            us = product_us(layers, size)
            bound = product_bound_us(layers[0], size, rates, stated.product, stated.dtype)
            found[size][name] = {"us": us, "limit_us": bound, "efficiency": bound / us}
    return found


# Output.


def points(
    times: dict[int, float],
    sizes: Sequence[int],
    bounds: dict[int, float],
    products: Products,
) -> list[dict[str, Any]]:
    """Return the record of each number of rows, for the JSON file."""
    relative = ratios(times, sizes)
    return [
        {
            "rows": n,
            "graph_size": sizes[bisect_left(sizes, n)],
            "ms": ms,
            "limit_ms": bounds[n],
            "next_size": next_size(n, sizes),
            "ratio_to_next_size": relative.get(n),
            "products": products.get(n, {}),
        }
        for n, ms in sorted(times.items())
    ]


def table(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of a table with one line for each graph size: the step, its limit, the greatest ratio to the next greater
    size among the rows that this graph serves, and the efficiency of each matmul."""
    names = list(dict.fromkeys(name for point in found for name in point["products"]))
    heads = ("rows", "ms", "limit", "share", "worst to next", *(name.rpartition(".")[2] for name in names))
    yield "  ".join(f"{head:>7}" for head in heads)
    for point in found:
        size = point["rows"]
        if size != point["graph_size"]:
            continue
        served = [one for one in found if one["graph_size"] == size and one["ratio_to_next_size"] is not None]
        worst = max(served, key=lambda one: one["ratio_to_next_size"], default=None)
        ratio = "-" if worst is None else f"{worst['ratio_to_next_size']:.3f} at {worst['rows']}"
        shares = (point["products"].get(name) for name in names)
        cells = [f"{size}", f"{point['ms']:.3f}", f"{point['limit_ms']:.3f}", f"{point['limit_ms'] / point['ms']:.0%}"]
        cells += [f"{ratio:>13}", *("-" if share is None else f"{share['efficiency']:.0%}" for share in shares)]
        yield "  ".join(f"{cell:>7}" for cell in cells)


def verdict(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines on the points that break the rule, and on the matmuls below GOOD."""
    for point in broken(found, RULE):
        yield (
            f"{point['rows']} rows take {point['ms']:.3f} ms, {point['ratio_to_next_size']:.3f} times the step of "
            f"{point['next_size']} rows; at most {RULE} is allowed"
        )
    slow: dict[str, dict[int, float]] = {}
    for point in found:
        for name, one in point["products"].items():
            if one["efficiency"] < GOOD:
                slow.setdefault(name, {})[point["rows"]] = one["efficiency"]
    for name, least in slow.items():
        rows = ", ".join(map(str, least))
        yield f"{name} alone is below {GOOD:.0%} of its limit at {rows} rows; the least is {min(least.values()):.0%}"


def check_files(files: Sequence[Path]) -> None:
    """Raise ConfigError before the measurement if a file cannot be written."""
    for file in files:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            there = file.exists()
            with file.open("ab"):
                pass
            if not there:
                file.unlink()
        except OSError as error:
            raise ConfigError(f"--out: {file} cannot be written ({error})") from None


def arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, nargs="*", help="numbers of rows; their next graph sizes are added")
    parser.add_argument("--most", type=int, default=512, help="without rows: the most rows to measure")
    parser.add_argument("--context", type=int, default=100, help="prompt tokens of each row")
    parser.add_argument(
        "--sampling", type=sampling_argument, default=GREEDY, metavar="JSON", help="SamplingParams of all rows"
    )
    parser.add_argument(
        "--draw", type=Path, nargs="+", metavar="FILE", help="draw these OUT.json together; measure nothing"
    )
    parser.add_argument("--out", type=Path, required=True, help="path of the files, without .json and .png")
    args = parser.parse_args(argv[:cut])
    if args.draw and (args.rows or argv[cut + 1 :]):
        parser.error("--draw measures nothing: leave out rows and overrides")
    if min([args.most, args.context, *args.rows]) < 1:
        parser.error("rows, --most and --context must be at least 1")
    return args, list(argv[cut + 1 :])


def draw_files(files: Sequence[Path], path: Path) -> int:
    """Draw existing curves together, and print their table."""
    curves = read_curves(files)
    check_files([path])
    draw_all(path, curves)
    print("\n".join(markdown(curves)))
    for one in curves:
        if one.limits_of:
            print(f"{one.file}: the limits are those of {one.limits_of}, and {one.gpu} was measured", file=sys.stderr)
    return 0


def main(argv: Sequence[str]) -> int:
    args, overrides = arguments(argv)
    if args.draw:
        return draw_files(args.draw, args.out.with_name(f"{args.out.name}.png"))
    sizes = graph_sizes(max(args.rows, default=args.most))
    if unwanted := [word for word in overrides if word.startswith("engine.max_seqs=")]:
        raise ConfigError(f"{unwanted[0]}: the rows determine engine.max_seqs; leave it out")
    files = [args.out.with_name(f"{args.out.name}.{suffix}") for suffix in ("json", "png")]
    check_files(files)
    composition = compose([*overrides, f"engine.max_seqs={sizes[-1]}"])
    rates = device_rates(composition)
    sampling: Sampling = args.sampling
    engine = start_engine(composition)
    try:
        cost = without_overhead(composition, engine)
        dtype = formats(composition, engine.info.spec, str(engine.info.device)).dtype

        about = describe(composition) | {"schema": SCHEMA, "choices": dict(composition.choices), "dtype": dtype}
        about |= {"notes": list(engine.info.notes), "context": args.context, "sampling": sampling, "rule": RULE}
        about |= {"graph_sizes": sizes}
        middle = args.context + WARM + STEPS // 2
        times: dict[int, float] = {}

        def save(products: Products | None) -> list[dict[str, Any]]:
            """Write what was measured so far. `products`: None = they are still to come."""
            found = points(times, sizes, {n: 1e3 * cost.decode_seconds(n, middle) for n in times}, products or {})
            result = about | {"complete": products is not None, "points": found}
            files[0].write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            return found

        def measure(rows: int) -> float:
            ms = 1e3 * decode_seconds(engine, rows, args.context, sampling)
            print(f"{rows} rows: {ms:.3f} ms", file=sys.stderr, flush=True)
            times[rows] = min(ms, times.get(rows, ms))
            # A run that is interrupted keeps its points.
            save(None)
            return ms

        times = step_times(args.rows or default_rows(sizes), sizes, measure)
        found = save(efficiencies(engine, [size for size in sizes if size in times], rates))
    finally:
        engine.shutdown()
    draw_one(files[1], found, RULE, " ".join(overrides) or "default composition")
    print("\n".join([*table(found), *verdict(found)]))
    for line in engine.info.notes:
        print(f"note: {line}")
    return 1 if broken(found, RULE) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DovetailError as error:
        print(f"curve.py: {error}", file=sys.stderr)
        sys.exit(2)
