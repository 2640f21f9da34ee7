"""Matmuls of few rows with a large weight on a GPU: the library's against core.ops.matmul's kernel with many tiles.

    python benchmarks/matmul.py [--shapes 8b,70b,70b/2,70b/4,70b/8] [--rows 1,16,64,256] [--dtypes fp8,bf16]
        [--out FILE]
    python benchmarks/matmul.py --table FILE [FILE ...]

Each candidate is first compared with the same matmul in float32, and with itself. Times are per matmul, from CUDA
graphs of consecutive matmuls, each with its own weight, more of them than the L2 cache holds. "70b/8" are the shapes of
one rank of eight. What a tile that prefetches its weight gains depends on the preceding kernel: for that, layer.py
times whole layers. The limit is the weight's bytes at --bandwidth. FILE gets the best candidates as JSON.

--table adds such files, and those of layer.py, to core/tuning/tables/nvidia_h200.json. A shape in several files counts
as measured in the last one; shapes of the table that no file has stay as they are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from itertools import product as cross
from pathlib import Path

import timing
import torch
import torch.nn.functional as F
from matmul_table import tiles_of, write_table

from dovetail.core.ops.kernels.launch import keep_shared_memory
from dovetail.core.ops.kernels.matmul import matmul_triton
from dovetail.core.ops.padding import empty_rows
from dovetail.core.ops.tiles import MatmulTile
from dovetail.core.tuning.candidates import candidates, geometries
from dovetail.core.tuning.gpu import Gpu, this_gpu

GPU = torch.device("cuda")
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
IMPRECISE = 128
"""Terms that the FP8 matrix unit sums in its own accumulator before they are added to the float32 sum."""
FINALS = 12
"""Fastest candidates that are timed again, in more replays."""
KEPT = 4
"""Candidates of a shape that are written."""

# heads, kv heads, head dim, hidden, intermediate, vocabulary
MODELS = {"8b": (32, 8, 128, 4096, 14336, 128256), "70b": (64, 8, 128, 8192, 28672, 128256)}


@dataclass(frozen=True)
class Product:
    """Shape of one matmul."""

    model: str
    """With the number of ranks that share it, for instance "70b/8"."""
    name: str
    outputs: int
    inputs: int

    def bytes(self, dtype: str) -> int:
        return self.outputs * self.inputs * DTYPES[dtype].itemsize


def heads(model: str) -> tuple[int, int, int]:
    """Query heads, kv heads and head dim of a rank. With fewer kv heads than ranks, each rank has one."""
    name, _, ranks = model.partition("/")
    query_heads, kv_heads, dim, *_ = MODELS[name]
    return query_heads // int(ranks or 1), max(1, kv_heads // int(ranks or 1)), dim


def products(model: str) -> list[Product]:
    name, _, ranks = model.partition("/")
    *_, hidden, wide, vocab = MODELS[name]
    query_heads, kv_heads, dim = heads(model)
    share = int(ranks or 1)
    return [
        Product(model, "qkv", (query_heads + 2 * kv_heads) * dim, hidden),
        Product(model, "o", hidden, query_heads * dim),
        Product(model, "gate_up", 2 * wide // share, hidden),
        Product(model, "down", hidden, wide // share),
        Product(model, "head", vocab // share, hidden),
    ]


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: MatmulTile,
    counts: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
) -> torch.Tensor:
    """Call the kernel as core.ops does for this tile. Scales apply to 8-bit weights only."""
    if x.dtype.itemsize > 1:
        return matmul_triton(x, weight, tile, counts)
    imprecise = min(IMPRECISE, tile.inputs)
    return matmul_triton(x, weight, tile, counts, x_scale, weight_scale, None, torch.bfloat16, imprecise)


def fault(run: Callable[[], torch.Tensor], exact: torch.Tensor, counts: torch.Tensor) -> str | None:
    """Return the fault in a candidate's results, None if there is none. Resets the counters to zero."""
    first, second = run(), run()
    error = float((first.float() - exact).norm() / exact.norm())
    left = bool(counts.any())
    counts.zero_()
    if not error < 1e-2:
        return f"off by {error:.1e}"
    if not torch.equal(first, second):
        return "not the same bits twice"
    return "counters not left at zero" if left else None


# Candidates.


Geometries = dict[str, list[MatmulTile]]
"""Tiles before they are fitted to a shape, by dtype of the weight."""


def compile_all(several: Geometries) -> None:
    timing.in_processes(compile_share, several)


def compile_share(several: Geometries, share: int, of: int) -> None:
    """Run one share of the geometries on a small matmul."""
    small = Product("", "", 2048, 4096)
    for dtype, tiles in several.items():
        found = tiles[share::of]
        bench = Bench(small, 256, dtype) if found else None
        for tile in found:
            for how in ({"split": 1}, {"split": 2}, {"programs": 3})[: 2 if tile.prefetch else 3]:
                try:
                    bench.ours(replace(tile, **how))(bench.weights[0])
                except Exception:  # the process that times it reports it
                    torch.cuda.synchronize()


# Timing.


class Bench:
    """Weights and inputs of one shape."""

    def __init__(self, product: Product, rows: int, dtype: str) -> None:
        self.product, self.dtype = product, dtype
        keep_shared_memory(GPU)  # as an engine does
        kind, shape = DTYPES[dtype], (product.outputs, product.inputs)
        self.graph = timing.capture(lambda: torch.zeros(1, device=GPU))
        count = timing.copies(product.bytes(dtype))
        self.weights = [torch.randn(shape, device=GPU, dtype=torch.bfloat16).to(kind) for _ in range(count)]
        self.use(rows)

    def use(self, rows: int) -> None:
        """Set the number of rows to multiply."""
        self.rows = rows
        kind = DTYPES[self.dtype]
        # As the engine allocates activations.
        self.x = empty_rows(rows, self.product.inputs, kind, GPU)
        self.x.copy_(torch.randn(self.x.shape, device=GPU, dtype=torch.bfloat16))
        self.x_scale = torch.rand(rows, 1, device=GPU) + 0.5
        self.weight_scale = torch.rand(self.product.outputs, device=GPU) + 0.5
        self.counts = torch.zeros(1 << 14, dtype=torch.int32, device=GPU)
        scales = self.x_scale * self.weight_scale if self.dtype == "fp8" else 1.0
        self.exact = (self.x.float() @ self.weights[-1].float().t()) * scales

    def ours(self, tile: MatmulTile) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda weight: multiply(self.x, weight, tile, self.counts, self.x_scale, self.weight_scale)

    def library(self) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        if self.dtype == "bf16":
            return {"cublas": lambda weight: F.linear(self.x, weight)}
        one = torch.ones((), device=GPU)
        by_column = self.weight_scale[None, :].contiguous()

        def scaled(fast: bool, rowwise: bool) -> Callable[[torch.Tensor], torch.Tensor]:
            scales = (self.x_scale, by_column) if rowwise else (one, one)
            return lambda weight: torch._scaled_mm(
                self.x, weight.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        return {
            "row-wise": scaled(False, True),
            "row-wise, fast": scaled(True, True),
            "tensor, fast": scaled(True, False),
        }

    def is_right(self, tile: MatmulTile) -> bool:
        found = fault(lambda: self.ours(tile)(self.weights[-1]), self.exact, self.counts)
        if found is not None:
            print(f"  {describe(tile)}: {found}", flush=True)
        return found is None

    def us(self, run: Callable[[torch.Tensor], torch.Tensor], repeats: int) -> float:
        """Median microseconds of one of a chain of matmuls, one for each weight."""
        run(self.weights[0])
        # The previous graph lives until the next one exists: it holds the memory pool of both.
        self.graph = timing.capture(lambda: [run(weight) for weight in self.weights], self.graph.pool())
        return timing.medians([self.graph], repeats)[0] / len(self.weights)


def measure(bench: Bench, gpu: Gpu) -> dict:
    """Time all candidates in a few replays, then the fastest again in many."""
    product, rows, dtype = bench.product, bench.rows, bench.dtype
    library = {}
    for name, run in bench.library().items():
        try:
            library[name] = bench.us(run, 15)
        except Exception as error:
            torch.cuda.synchronize()
            print(f"  {name}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    found: list[tuple[float, MatmulTile]] = []
    for tile in candidates(product.outputs, product.inputs, rows, dtype, gpu):
        try:
            found.append((bench.us(bench.ours(tile), 2), tile))
        except Exception as error:  # a tile that does not fit is no candidate
            torch.cuda.synchronize()
            print(f"  {describe(tile)}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    found.sort(key=lambda pair: pair[0])
    finals = islice((tile for _, tile in found if bench.is_right(tile)), FINALS)
    best = sorted(((bench.us(bench.ours(tile), 15), tile) for tile in finals), key=lambda pair: pair[0])
    return record(product, rows, dtype, len(found), library, best)


# Results.


def record(
    product: Product,
    rows: int,
    dtype: str,
    tried: int,
    library: dict[str, float],
    best: list[tuple[float, MatmulTile]],
) -> dict:
    """Result of one shape, as `written` takes it. `best`: fastest first."""
    return {
        "model": product.model,
        "product": product.name,
        "outputs": product.outputs,
        "inputs": product.inputs,
        "rows": rows,
        "dtype": dtype,
        "candidates": tried,
        "library": library,
        "tiles": [{"us": us, **asdict(tile)} for us, tile in best[:KEPT]],
    }


def written(device: str, records: list[dict]) -> str:
    """JSON with one shape a line."""
    lines = ",\n".join(json.dumps(record) for record in records)
    return f'{{"device": {json.dumps(device)}, "products": [\n{lines}\n]}}\n'


def describe(tile: MatmulTile) -> str:
    how = f"{tile.programs} programs" if tile.programs else f"split {tile.split}"
    flags = (
        " tma" * tile.tma
        + " unswapped" * (not tile.swap)
        + f" prefetch {tile.prefetch}+{tile.prefetch_l2} every {tile.prefetch_cycles}" * (tile.prefetch > 0)
    )
    return f"{tile.tokens}x{tile.outputs}x{tile.inputs} w{tile.warps} s{tile.stages} {how}{flags}"


def limit(record: dict, bandwidth: float) -> float:
    """Microseconds to read the weight at `bandwidth` TB/s."""
    return record["outputs"] * record["inputs"] * DTYPES[record["dtype"]].itemsize / bandwidth / 1e6


def line(record: dict, bandwidth: float) -> str:
    us, tile = next(tiles_of(record))
    library = min(record["library"].items(), key=lambda pair: pair[1], default=("-", float("nan")))
    return (
        f"{record['model']:6s}{record['product']:8s}{record['dtype']:5s}{record['rows']:4d} rows"
        f"  limit {limit(record, bandwidth):7.1f}  ours {us:7.1f}  library {library[1]:7.1f} ({library[0]})"
        f"  {describe(tile)}"
    )


def totals(records: list[dict], bandwidth: float) -> Iterator[str]:
    layers = [r for r in records if r["product"] != "head"]
    for model, dtype, rows in dict.fromkeys((r["model"], r["dtype"], r["rows"]) for r in layers):
        those = [r for r in layers if (r["model"], r["dtype"], r["rows"]) == (model, dtype, rows)]
        least, ours = sum(limit(r, bandwidth) for r in those), sum(r["tiles"][0]["us"] for r in those)
        names = dict.fromkeys(name for r in those for name in r["library"])
        sums = {name: sum(r["library"].get(name, float("nan")) for r in those) for name in names}
        library = "  ".join(f"{name} {us:6.1f}" for name, us in sums.items())
        start = f"{model:6s}{dtype:5s}{rows:4d} rows: limit {least:6.1f}"
        yield f"{start}  ours {ours:6.1f} ({least / ours:4.0%})  {library}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8b,70b")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--dtypes", default="fp8,bf16")
    parser.add_argument("--bandwidth", type=float, default=4.44, help="read bandwidth of the memory, TB/s")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no shape after this time")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="*", metavar="FILE", help="add to the shipped tuning table")
    args = parser.parse_args()
    if args.table is not None:
        write_table(args.table)
        return
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU: there is none")
    began = time.monotonic()
    rows, dtypes = [int(n) for n in args.rows.split(",")], args.dtypes.split(",")
    torch.manual_seed(torch.seed() % 2**31)
    gpu = this_gpu()
    compile_all({dtype: list(dict.fromkeys(t for n in rows for t in geometries(n, dtype, gpu))) for dtype in dtypes})
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    records: list[dict] = []
    shapes = [product for model in args.shapes.split(",") for product in products(model)]
    for product, dtype in cross(shapes, dtypes):
        if time.monotonic() - began > args.seconds:
            print(f"out of time before {product} {dtype}")
            break
        bench = Bench(product, rows[0], dtype)
        for count in rows:
            bench.use(count)
            records.append(measure(bench, gpu))
            print(line(records[-1], args.bandwidth), f"  {time.monotonic() - began:.0f} s", flush=True)
        del bench
        torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(written(torch.cuda.get_device_name(), records))
    print(f"\n{torch.cuda.get_device_name()}, us a matmul; the four of a layer added up:")
    print("\n".join(totals(records, args.bandwidth)))


if __name__ == "__main__":
    main()
