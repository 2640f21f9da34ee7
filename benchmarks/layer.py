"""Tiles with which a rank's whole layer is fastest: what one matmul gains, another may lose.

    python benchmarks/layer.py --ranks 8 --rows 1,16,64 --dtypes fp8,bf16 --out FILE
    python benchmarks/layer.py --ranks 1 --model 8b --rows 1,16,64 --dtypes fp8,bf16 --out FILE

matmul.py times a matmul after another matmul. In a step the preceding kernel is an all-reduce, a norm or attention, and
weights that are prefetched while it runs delay the data that it waits for. So this script times a layer: edge, qkv,
attention, o, edge, gate and up, activation, down. One matmul after another gets the tile with which the layer is
fastest; --products names those to tune. The edge of one rank, on one GPU, is the norm; that of several ranks is
two_shot, on two GPUs, which emulate more ranks than two (emulated_ranks.py). Times are us a layer, from CUDA graphs of
several layers, each with its own weights and keys. FILE, for matmul.py --table, has the format of matmul.py's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from itertools import product as cross
from pathlib import Path

import attention
import emulated_ranks
import matmul
import timing
import torch
import torch.nn.functional as F

from dovetail.core.interfaces import PLAIN
from dovetail.core.ops import rms_norm, silu_and_mul
from dovetail.core.ops.choices import Choices, install
from dovetail.core.ops.kernels.launch import keep_shared_memory
from dovetail.core.ops.matmul import MOST_UNSCALED
from dovetail.core.ops.tile_choice import MOST_ROWS, choose
from dovetail.core.ops.tiles import MatmulTile
from dovetail.core.tuning.candidates import prefetching
from dovetail.core.tuning.matmul import tiles_of
from dovetail.core.tuning.packages import builtin_table
from dovetail.plugins.collective.symm_mem.collective import COLUMNS, SymmMemCollective
from dovetail.plugins.quant.fp8.format import FP8_TOKEN

Tiles = dict[str, MatmulTile | None]
"""Tile of each matmul of the layer, by name; None = the library's kernel."""
Scale = tuple[torch.Tensor, torch.Tensor]
"""Scales of rows and of columns, as rms_norm takes them."""

LAYERS = 6
"""Layers of a graph; their weights are several times the L2 cache."""
LENGTH, PAGE = 640, 32
"""Keys of a row, and of a page."""
LEAD = 0.01
"""Share by which a tile, and a layer, must be faster than the table's, since the GPU's clocks drift."""
ROUNDS = 2
"""The first matmul is tuned again, since the tiles of the others have changed."""
ORDER = ("o", "qkv", "gate_up", "down")
EPS = 1e-5
SHIPPED = builtin_table()


class Edges:
    """Boundary between a layer's blocks: sum over the ranks if there are several, add the residual, norm, emit."""

    def __init__(self, collective: SymmMemCollective | None = None) -> None:
        self.collective = collective
        self.scale = collective is None
        """Whether the edge applies a matmul's scales, so that the library's matmul of some rows omits them."""

    def run(self, layer: Layer, scale: Scale | None) -> None:
        if self.collective is None:
            rms_norm(layer.partial, layer.residual, layer.norm, EPS, layer.emit, scale)
        else:
            reducer = self.collective.reducer
            reducer.boundary(layer.partial, layer.residual, layer.norm, EPS, layer.emit, "two_shot")

    def agree(self, times: list[float]) -> list[float]:
        """Return the first rank's times. A collective call."""
        if self.collective is None:
            return times
        return self.collective.broadcast(torch.tensor(times, device="cuda")).tolist()


class Layer:
    """A rank's layer and its inputs."""

    def __init__(self, edges: Edges, model: str, dtype: str, rows: int) -> None:
        shapes = [shape for shape in matmul.products(model) if shape.name in ORDER]
        device, kind = torch.device("cuda", torch.cuda.current_device()), matmul.DTYPES[dtype]
        self.edges, self.dtype, self.rows = edges, dtype, rows
        self.shapes = {shape.name: shape for shape in shapes}
        self.emit = (FP8_TOKEN,) if dtype == "fp8" else (PLAIN,)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        self.weights = {
            name: [random(shape.outputs, shape.inputs).to(kind) for _ in range(LAYERS)]
            for name, shape in self.shapes.items()
        }
        self.inputs = {name: random(rows, shape.inputs).to(kind) for name, shape in self.shapes.items()}
        self.scales = {name: torch.rand(shape.outputs, device=device) for name, shape in self.shapes.items()}
        self.x_scale, self.one = torch.rand(rows, 1, device=device), torch.ones(1, device=device)
        few = MOST_ROWS < rows <= MOST_UNSCALED
        self.unscaled = ("o", "down") if edges.scale and dtype == "fp8" and few else ()
        counters = (len(self.shapes), LAYERS, 1 << 10)
        self.counts = dict(zip(self.shapes, torch.zeros(counters, dtype=torch.int32, device=device), strict=True))
        hidden = self.shapes["qkv"].inputs
        self.partial, self.residual, self.norm = random(rows, hidden), random(rows, hidden), random(hidden)
        self.gate_up = random(rows, self.shapes["gate_up"].outputs)
        work = attention.Work("", rows, 1, LENGTH, "e4m3" if dtype == "fp8" else "bf16", PAGE)
        self.attention = attention.Bench(work, attention.Heads(*matmul.heads(model)), LAYERS)
        self.backend = self.attention.triton()
        self.planned = self.attention.plan(self.backend)

    def edge(self, after: str, tiles: Tiles) -> None:
        """Run the edge that follows this matmul."""
        scale = (self.x_scale, self.scales[after]) if tiles[after] is None and after in self.unscaled else None
        self.edges.run(self, scale)

    def multiply(self, name: str, i: int, tile: MatmulTile | None) -> torch.Tensor:
        x, weight = self.inputs[name], self.weights[name][i]
        if tile is not None:
            return matmul.multiply(x, weight, tile, self.counts[name][i], self.x_scale, self.scales[name])
        if self.dtype == "bf16":
            return F.linear(x, weight)
        scales = (self.one, self.one) if name in self.unscaled else (self.x_scale, self.scales[name][None, :])
        return torch._scaled_mm(x, weight.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    def is_right(self, name: str, tile: MatmulTile) -> bool:
        exact_TO = self.inputs[name].float() @ self.weights[name][0].float().t()
        if self.dtype == "fp8":
            exact_TO *= self.x_scale * self.scales[name]
        return matmul.fault(lambda: self.multiply(name, 0, tile), exact_TO, self.counts[name][0]) is None

    def run(self, tiles: Tiles, i: int) -> None:
        self.edge("down", tiles)
        self.multiply("qkv", i, tiles["qkv"])
        bench = self.attention
        self.backend.write_and_attend(bench.layers[i], self.planned, bench.qkv, bench.rope, emit=self.emit)
        self.multiply("o", i, tiles["o"])
        self.edge("o", tiles)
        self.multiply("gate_up", i, tiles["gate_up"])
        silu_and_mul(self.gate_up, self.emit)
        self.multiply("down", i, tiles["down"])

    def us(self, several: Sequence[Tiles], repeats: int = 5) -> list[float]:
        """Median microseconds of a layer with each set of tiles, as the first rank measured them. A collective call."""
        graphs = []
        for tiles in several:
            self.run(tiles, 0)
            graphs.append(timing.capture(lambda: [self.run(tiles, i) for i in range(LAYERS)]))  # noqa: B023
        return self.edges.agree([us / LAYERS for us in timing.medians(graphs, repeats)])


def geometries(rows: int, dtype: str) -> tuple[list[MatmulTile], list[MatmulTile]]:
    """Tiles that are fastest anywhere in the table, and prefetching tiles."""
    most = next((n for n in (16, 32, 64) if rows <= n), rows)
    shipped = [by_rows for (_, kind, _, _), by_rows in tiles_of(SHIPPED).items() if kind == dtype]
    won = {tile for by_rows in shipped for tile in by_rows.values() if tile}
    fitting = [tile for tile in won if min(most // 2, 64) <= tile.tokens <= most]
    late = {replace(tile, split=1, programs=0) for tile in fitting if not tile.prefetch}
    wide = rows > 16
    early = {tile for tile in prefetching(rows, dtype) if tile.stages == 3 and (tile.outputs == 64 or wide)}
    return sorted(late, key=str), sorted(early, key=str)


def candidates(shape: matmul.Product, rows: int, dtype: str, processors: int) -> Iterator[MatmulTile]:
    """Geometries with each split, and prefetching ones with each distance in cycles."""
    late, early = geometries(rows, dtype)
    for tile, split in cross(late, (1, 2, 4)):
        tiles = tile.launch(rows, shape.outputs, shape.inputs)[1]
        if split == 1 or tiles * split <= 2 * processors:
            yield replace(tile, split=split)
    for tile in early:
        _, tiles, blocks, _ = tile.launch(rows, shape.outputs, shape.inputs)
        each = max(1, processors // tiles)
        for split in sorted({1, max(1, each // 2), each}):
            rest = -(-blocks // split) - tile.prefetch
            for ahead, pace in cross((0, 4) if rest > 0 else (0,), (0, 500, 1000, 2000)):
                yield replace(tile, split=split, prefetch_l2=ahead, prefetch_cycles=pace)


def search(layer: Layer, model: str, names: list[str], report: Callable[[str], None]) -> list[dict]:
    """Return a record of each matmul, the fastest layers first; none where the layer is no faster than the table's."""
    device = torch.cuda.get_device_properties(layer.norm.device)
    rows, dtype, processors = layer.rows, layer.dtype, device.multi_processor_count
    install(Choices(SHIPPED.entries))
    tiles: Tiles = {
        name: choose(rows, shape.outputs, shape.inputs, dtype, device.name, processors)
        for name, shape in layer.shapes.items()
    }
    began, first, records = time.monotonic(), dict(tiles), {}
    for name in names * ROUNDS:
        shape, own = layer.shapes[name], tiles[name]
        known = [own] if own is not None else []
        tried = dict.fromkeys([*known, *candidates(shape, rows, dtype, processors)])
        found = sorted(((layer.us([{**tiles, name: tile}])[0], tile) for tile in tried), key=lambda pair: pair[0])
        right = (tile for _, tile in found if layer.is_right(name, tile))
        finals = dict.fromkeys([*known, *islice(right, matmul.KEPT)])
        library, *again = layer.us([{**tiles, name: tile} for tile in (None, *finals)], 15)
        best = sorted(zip(again, finals, strict=True), key=lambda pair: pair[0] * (1 - LEAD * (pair[1] == own)))
        tiles[name] = best[0][1] if best[0][0] <= library else None
        report(
            f"{model} {dtype} {rows} rows, {name}: {best[0][0]:.1f} us a layer, library {library:.1f}  "
            f"{matmul.describe(best[0][1])}  {len(tried)} tried, {time.monotonic() - began:.0f} s"
        )
        libraries = {"row-wise" if dtype == "fp8" else "cublas": library}
        records[name] = matmul.record(shape, rows, dtype, len(tried), libraries, best)
    before, after = layer.us([first, tiles], 31)
    won = after < before * (1 - LEAD)
    report(f"{model} {dtype} {rows} rows: {before:.1f} to {after:.1f} us a layer" + ": the table stays" * (not won))
    return list(records.values()) if won else []


def tune(index: int, edges: Edges, args: argparse.Namespace) -> None:
    """Search for every dtype and number of rows. The first rank prints and writes the results."""
    records: list[dict] = []

    def report(line: str) -> None:
        if index == 0:
            print(line, flush=True)

    model = args.model if args.ranks == 1 else f"{args.model}/{args.ranks}"
    keep_shared_memory(torch.device("cuda", index))
    for dtype, rows in cross(args.dtypes.split(","), map(int, args.rows.split(","))):
        layer = Layer(edges, model, dtype, rows)
        records += search(layer, model, args.products.split(","), report)
        del layer
        torch.cuda.empty_cache()
        if index == 0 and args.out:
            args.out.write_text(matmul.written(torch.cuda.get_device_name(), records))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="70b", choices=list(matmul.MODELS))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", default="1,16,64,128,256")
    parser.add_argument("--dtypes", default="fp8,bf16")
    parser.add_argument("--products", default=",".join(ORDER), help="matmuls to tune")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=2, metavar=("INDEX", "ADDRESS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        index, address = int(args.rank[0]), args.rank[1]
        collective = emulated_ranks.connect(index, args.ranks, address, emulated=args.ranks > emulated_ranks.GPUS)
        tune(index, Edges(collective), args)
        sys.stdout.flush()
        # Emulated ranks are fewer than the collective expects, and would not end together.
        os._exit(0)
    if unknown := sorted(set(args.products.split(",")) - set(ORDER)):
        parser.error(f"--products {','.join(unknown)}: a layer has {', '.join(ORDER)}")
    if args.ranks not in (1, 2, 4, 8, 16):
        parser.error(f"--ranks {args.ranks}: one GPU is 1 rank; two are 2, or emulate 4, 8 or 16")
    gpus = min(args.ranks, emulated_ranks.GPUS)
    if torch.cuda.device_count() < gpus:
        raise SystemExit(f"--ranks {args.ranks} needs {gpus} GPUs: there are {torch.cuda.device_count()}")
    if args.ranks > emulated_ranks.GPUS and matmul.MODELS[args.model][3] != COLUMNS:
        parser.error(f"--model {args.model} --ranks {args.ranks}: emulated ranks have {COLUMNS} channels")
    began, kinds, rows = time.monotonic(), args.dtypes.split(","), [int(n) for n in args.rows.split(",")]
    matmul.compile_all({kind: [tile for n in rows for some in geometries(n, kind) for tile in some] for kind in kinds})
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    if gpus > 1:
        emulated_ranks.launch_ranks(gpus)
    tune(0, Edges(), args)


if __name__ == "__main__":
    main()
