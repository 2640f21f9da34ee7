"""The quickest cuts of a rank's products within its layer: what is won in one place is lost in another.

    python benchmarks/layer.py --ranks 8 --rows 1,16,64 --dtypes fp8,bf16 --out FILE
    python benchmarks/layer.py --ranks 1 --model 8b --rows 1,16,64 --dtypes fp8,bf16 --out FILE

products.py times a product behind a kernel that only waits, or behind nothing. In a step that kernel is an all-reduce,
a norm, or attention, and a weight that is on its way meanwhile delays the words and keys which they wait for. So here
is a layer: the edge, qkv, attention, o, the edge, gate and up, the activation, down. One product after another gets the
cut with which the layer is quickest; --products names those that are tried. The edge of one rank, on one GPU, is the
norm; of more, on two GPUs, two_shot. More ranks than two are played (played.py). Times are us a layer, from CUDA graphs
of several layers, each with weights and keys of its own. FILE, for tiles.py, is as products.py writes it.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from itertools import product as cross
from pathlib import Path
from typing import Protocol

import attention
import played
import products as alone
import torch
import torch.nn.functional as F

from dovetail.core.interfaces import PLAIN
from dovetail.core.ops import rms_norm, silu_and_mul
from dovetail.core.ops.kernels.launch import keep_shared_memory
from dovetail.core.ops.matmul import MOST_UNSCALED
from dovetail.core.ops.tile_choice import MOST_ROWS, choose
from dovetail.core.ops.tiles import MatmulTile
from dovetail.core.ops.tuned_tiles import MEASURED
from dovetail.plugins.collective.config import SymmMemConfig
from dovetail.plugins.collective.symm_mem.collective import COLUMNS, SymmMemCollective
from dovetail.plugins.quant.fp8.format import FP8_TOKEN

Cuts = dict[str, MatmulTile | None]
"""Of the layer's products, by name; None = the library's."""

LAYERS = 6
"""In a graph; their weights are several times the L2 cache."""
LENGTH, PAGE = 640, 32
"""Keys of a row, and of a page."""
LEAD = 0.01
"""By which a cut, and a layer, must be quicker than the table's: the GPU's clocks wander."""
ROUNDS = 2
"""The first product was cut beside cuts of the others that have gone."""
ORDER = ("o", "qkv", "gate_up", "down")
EPS = 1e-5


Scale = tuple[torch.Tensor, torch.Tensor]
"""Of rows and of columns, as rms_norm takes it."""


class Edges(Protocol):
    """Between a layer's blocks."""

    scale: bool
    """Whether they take a product's scales, so that the library's product of some rows does without (fp8's partial)."""

    def run(self, layer: Layer, scale: Scale | None) -> None:
        """Queue one: sum, add the residual, norm, emit."""

    def agree(self, times: list[float]) -> list[float]:
        """The first rank's. A collective call."""


class OwnEdges:
    """Of a rank that is alone."""

    scale = True

    def run(self, layer: Layer, scale: Scale | None) -> None:
        rms_norm(layer.partial, layer.residual, layer.norm, EPS, layer.emit, scale)

    def agree(self, times: list[float]) -> list[float]:
        return times


class SharedEdges:
    scale = False

    def __init__(self, collective: SymmMemCollective) -> None:
        self.collective = collective

    def run(self, layer: Layer, scale: Scale | None) -> None:
        self.collective.reducer.boundary(layer.partial, layer.residual, layer.norm, EPS, layer.emit, "two_shot")

    def agree(self, times: list[float]) -> list[float]:
        return self.collective.broadcast(torch.tensor(times, device="cuda")).tolist()


class Layer:
    """A rank's, and what it works on."""

    def __init__(self, edges: Edges, model: str, dtype: str, rows: int) -> None:
        shapes = [shape for shape in alone.products(model) if shape.name in ORDER]
        device, kind = torch.device("cuda", torch.cuda.current_device()), alone.DTYPES[dtype]
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
        heads, kv_heads, dim = alone.heads(model)
        work = attention.Work("", rows, 1, LENGTH, "e4m3" if dtype == "fp8" else "bf16", PAGE)
        self.attention = attention.Bench(work, attention.Heads(heads, kv_heads, dim), LAYERS)
        self.backend = self.attention.triton(None, True)
        self.planned = self.attention.plan(self.backend)

    def edge(self, behind: str, cuts: Cuts) -> None:
        """Behind this product."""
        scale = (self.x_scale, self.scales[behind]) if cuts[behind] is None and behind in self.unscaled else None
        self.edges.run(self, scale)

    def multiply(self, name: str, i: int, tile: MatmulTile | None) -> torch.Tensor:
        x, weight = self.inputs[name], self.weights[name][i]
        if tile is not None:
            return alone.multiply(x, weight, tile, self.counts[name][i], self.x_scale, self.scales[name])
        if self.dtype == "bf16":
            return F.linear(x, weight)
        scales = (self.one, self.one) if name in self.unscaled else (self.x_scale, self.scales[name][None, :])
        return torch._scaled_mm(x, weight.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

    def is_right(self, name: str, tile: MatmulTile) -> bool:
        exact_TO = self.inputs[name].float() @ self.weights[name][0].float().t()
        if self.dtype == "fp8":
            exact_TO *= self.x_scale * self.scales[name]
        return alone.wrong(lambda: self.multiply(name, 0, tile), exact_TO, self.counts[name][0]) is None

    def run(self, cuts: Cuts, i: int) -> None:
        self.edge("down", cuts)
        self.multiply("qkv", i, cuts["qkv"])
        bench = self.attention
        self.backend.write_and_attend(bench.layers[i], self.planned, bench.qkv, bench.rope, emit=self.emit)
        self.multiply("o", i, cuts["o"])
        self.edge("o", cuts)
        self.multiply("gate_up", i, cuts["gate_up"])
        silu_and_mul(self.gate_up, self.emit)
        self.multiply("down", i, cuts["down"])

    def us(self, several: Sequence[Cuts], repeats: int = 5) -> list[float]:
        """Median microseconds of a layer with each of these, taken in turns, since the GPU's clocks wander; the first
        rank's for all. A collective call."""
        graphs = [self.captured(cuts) for cuts in several]
        times: list[list[float]] = [[] for _ in graphs]
        for _ in range(repeats):
            for graph, found in zip(graphs, times, strict=True):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                found.append(start.elapsed_time(end) * 1e3 / LAYERS)
        return self.edges.agree([statistics.median(found) for found in times])

    def captured(self, cuts: Cuts) -> torch.cuda.CUDAGraph:
        """Of LAYERS layers; has run once."""
        self.run(cuts, 0)
        torch.cuda.synchronize()
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            graph.capture_begin()
            for i in range(LAYERS):
                self.run(cuts, i)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        graph.replay()
        return graph


def geometries(rows: int, dtype: str) -> tuple[list[MatmulTile], list[MatmulTile]]:
    """What won anywhere in the table, and tiles that begin early."""
    most = next((n for n in (16, 32, 64) if rows <= n), rows)
    won = {tile for (_, kind, _, _), by_rows in MEASURED.items() if kind == dtype for tile in by_rows.values() if tile}
    fitting = [tile for tile in won if min(most // 2, 64) <= tile.tokens <= most]
    late = {replace(tile, split=1, programs=0) for tile in fitting if not tile.prefetch}
    wide = rows > 16
    early = {tile for tile in alone.early(rows, dtype) if tile.stages == 3 and (tile.outputs == 64 or wide)}
    return sorted(late, key=str), sorted(early, key=str)


def candidates(shape: alone.Product, rows: int, dtype: str, processors: int) -> Iterator[MatmulTile]:
    """Geometries, cut anew; those that begin early, at each pace."""
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


def search(layer: Layer, model: str, names: list[str], say: Callable[[str], None]) -> list[dict]:
    """A record of each product, the quickest layers first; none where the layer is no quicker than by the table."""
    device = torch.cuda.get_device_properties(layer.norm.device)
    rows, dtype, processors = layer.rows, layer.dtype, device.multi_processor_count
    cuts: Cuts = {
        name: choose(rows, shape.outputs, shape.inputs, dtype, device.name, processors)
        for name, shape in layer.shapes.items()
    }
    began, first, records = time.monotonic(), dict(cuts), {}
    for name in names * ROUNDS:
        shape, own = layer.shapes[name], cuts[name]
        known = [own] if own is not None else []
        tried = dict.fromkeys([*known, *candidates(shape, rows, dtype, processors)])
        found = sorted(((layer.us([{**cuts, name: tile}])[0], tile) for tile in tried), key=lambda pair: pair[0])
        right = (tile for _, tile in found if layer.is_right(name, tile))
        finals = dict.fromkeys([*known, *islice(right, alone.KEPT)])
        library, *again = layer.us([{**cuts, name: tile} for tile in (None, *finals)], 15)
        best = sorted(zip(again, finals, strict=True), key=lambda pair: pair[0] * (1 - LEAD * (pair[1] == own)))
        cuts[name] = best[0][1] if best[0][0] <= library else None
        say(
            f"{model} {dtype} {rows} rows, {name}: {best[0][0]:.1f} us a layer, library {library:.1f}  "
            f"{alone.describe(best[0][1])}  {len(tried)} tried, {time.monotonic() - began:.0f} s"
        )
        libraries = {"row-wise" if dtype == "fp8" else "cublas": library}
        records[name] = alone.record(shape, rows, dtype, len(tried), libraries, best)
    before, after = layer.us([first, cuts], 31)
    won = after < before * (1 - LEAD)
    say(f"{model} {dtype} {rows} rows: {before:.1f} to {after:.1f} us a layer" + ": the table stays" * (not won))
    return list(records.values()) if won else []


def rank(index: int, address: str, args: argparse.Namespace) -> None:
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    with torch.inference_mode():
        edges: Edges
        if args.ranks == 1:
            edges = OwnEdges()
        else:
            collective: SymmMemCollective
            if args.ranks == played.PLAYERS:
                collective = SymmMemCollective(SymmMemConfig())
            else:
                played.shorten_boxes()
                collective = played.Collective(SymmMemConfig())
            collective.connect(index, args.ranks, address, device)
            edges = SharedEdges(collective)
        keep_shared_memory(device)
        cut(edges, index == 0, args)


def cut(edges: Edges, first: bool, args: argparse.Namespace) -> None:
    """Every dtype and number of rows; `first` says and writes what was found."""
    records: list[dict] = []

    def say(line: str) -> None:
        if first:
            print(line, flush=True)

    model = args.model if args.ranks == 1 else f"{args.model}/{args.ranks}"
    for dtype, rows in cross(args.dtypes.split(","), map(int, args.rows.split(","))):
        layer = Layer(edges, model, dtype, rows)
        records += search(layer, model, args.products.split(","), say)
        del layer
        torch.cuda.empty_cache()
        if first and args.out:
            args.out.write_text(alone.written(torch.cuda.get_device_name(), records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="70b", choices=list(alone.MODELS))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", default="1,16,64,128,256")
    parser.add_argument("--dtypes", default="fp8,bf16")
    parser.add_argument("--products", default=",".join(ORDER))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=2, metavar=("INDEX", "ADDRESS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank(int(args.rank[0]), args.rank[1], args)
        sys.stdout.flush()
        # The players are not as many as the collective thinks, and would not end together.
        os._exit(0)
    if unknown := sorted(set(args.products.split(",")) - set(ORDER)):
        parser.error(f"--products {','.join(unknown)}: a layer has {', '.join(ORDER)}")
    if args.ranks not in (1, 2, 4, 8, 16):
        parser.error(f"--ranks {args.ranks}: one GPU is 1 rank, two are 2, or play 4, 8 or 16")
    gpus = min(args.ranks, played.PLAYERS)
    if torch.cuda.device_count() < gpus:
        raise SystemExit(f"--ranks {args.ranks} needs {gpus} GPUs: there are {torch.cuda.device_count()}")
    if args.ranks > played.PLAYERS and alone.MODELS[args.model][3] != COLUMNS:
        parser.error(f"--model {args.model} --ranks {args.ranks}: what is played has {COLUMNS} channels")
    began, kinds, rows = time.monotonic(), args.dtypes.split(","), [int(n) for n in args.rows.split(",")]
    alone.compile_all({kind: [tile for n in rows for some in geometries(n, kind) for tile in some] for kind in kinds})
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    if gpus == 1:
        rank(0, "", args)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--rank", str(index), address])
        for index in range(gpus)
    ]
    # Who is left behind would wait for ever.
    while all(process.poll() is None for process in ranks):
        time.sleep(0.2)
    if any(process.poll() for process in ranks):
        for process in ranks:
            process.kill()
    codes = [process.wait() for process in ranks]
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main()
