"""Products of few rows with a large weight on a GPU: the library's against core.ops.matmul's kernel, cut in many ways.

python benchmarks/products.py [--shapes 8b,70b,70b/2,70b/4,70b/8] [--rows 1,16,64,256] [--dtypes fp8,bf16] [--out FILE]

Every candidate is first compared with the product of the same numbers in float32, and with itself. Times are per
product, from CUDA graphs of products one after another, each with a weight of its own, more of them than the L2 cache
holds. A rank's share of a model ("70b/8") stands behind kernels that wait, as in its step: the sum over ranks, or
attention (Product.behind); they are not in the time. Limit: the weight's bytes at the bandwidth given. FILE gets the
best candidates of each product as JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from itertools import product as cross
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dovetail.core.ops.kernels.launch import announce, dependent, keep_shared_memory, wait
from dovetail.core.ops.kernels.matmul import matmul_triton
from dovetail.core.ops.tiles import MatmulTile

GPU = torch.device("cuda")
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
ROTATED_BYTES = 200 << 20
"""Weights are added until they are more than this, several times the L2 cache."""
SHARED_BYTES = 227 << 10
"""Shared memory of a multiprocessor that programs may take."""
IMPRECISE = 128
"""Products that are summed in the FP8 matrix unit's own accumulator before they join the float32 sum."""

# heads, kv heads, head dim, hidden, intermediate, vocabulary
MODELS = {"8b": (32, 8, 128, 4096, 14336, 128256), "70b": (64, 8, 128, 8192, 28672, 128256)}


@dataclass(frozen=True)
class Product:
    model: str
    """With the number of ranks that share it, for instance "70b/8"."""
    name: str
    outputs: int
    inputs: int
    behind: float = 0.0
    """Microseconds that the kernel in front takes, in which little is read from memory; 0 = the product before."""

    def bytes(self, dtype: str) -> int:
        return self.outputs * self.inputs * DTYPES[dtype].itemsize


def heads(model: str) -> tuple[int, int, int]:
    """A rank's, its kv heads, and their dim. Of fewer kv heads than ranks each has one."""
    name, _, ranks = model.partition("/")
    query_heads, kv_heads, dim, *_ = MODELS[name]
    return query_heads // int(ranks or 1), max(1, kv_heads // int(ranks or 1)), dim


def products(model: str) -> list[Product]:
    name, _, ranks = model.partition("/")
    *_, hidden, wide, vocab = MODELS[name]
    query_heads, kv_heads, dim = heads(model)
    share = int(ranks or 1)
    long, short = (8.0, 2.0) if share > 1 else (0.0, 0.0)
    return [
        Product(model, "qkv", (query_heads + 2 * kv_heads) * dim, hidden, long),
        Product(model, "o", hidden, query_heads * dim, long),
        Product(model, "gate_up", 2 * wide // share, hidden, long),
        Product(model, "down", hidden, wide // share, short),
        Product(model, "head", vocab // share, hidden, long),
    ]


KEPT = 4
"""Candidates of a product that are written."""
WAITING = 64
"""Programs of the kernel in front."""
CYCLES = 1800
"""Of a multiprocessor, in a microsecond."""


@triton.jit
def _cycles(after):
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [after], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _wait_long(out_ptr, cycles, SMALL: tl.constexpr, PDL: tl.constexpr):
    announce(PDL and SMALL)
    wait(PDL)
    announce(PDL and not SMALL)
    program = tl.program_id(0)
    began = _cycles(program)
    while _cycles(program) - began < cycles:
        pass
    tl.store(out_ptr + program, program)


def wait_long(waited: torch.Tensor, us: float, small: bool = True) -> None:
    """On the device, by a program for each element of `waited`: in the place of a small kernel that waits for other
    ranks, or of a product, behind which the next one is let in only once the kernel in front has ended."""
    _wait_long[(len(waited),)](waited, int(us * CYCLES), SMALL=small, num_warps=8, **dependent(waited))


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    tile: MatmulTile,
    counts: torch.Tensor,
    x_scale: torch.Tensor,
    weight_scale: torch.Tensor,
) -> torch.Tensor:
    """As core.ops does by this tile: scales are for 8 bits."""
    if x.dtype.itemsize > 1:
        return matmul_triton(x, weight, tile, counts)
    imprecise = min(IMPRECISE, tile.inputs)
    return matmul_triton(x, weight, tile, counts, x_scale, weight_scale, None, torch.bfloat16, imprecise)


def wrong(run: Callable[[], torch.Tensor], exact: torch.Tensor, counts: torch.Tensor) -> str | None:
    """What is wrong with a candidate. The counters are zero afterwards."""
    first, second = run(), run()
    error = float((first.float() - exact).norm() / exact.norm())
    left = bool(counts.any())
    counts.zero_()
    if not error < 1e-2:
        return f"off by {error:.1e}"
    if not torch.equal(first, second):
        return "not the same bits twice"
    return "counters not left at zero" if left else None


def early(rows: int, dtype: str) -> Iterator[MatmulTile]:
    """Tiles whose weight fills a multiprocessor's shared memory, or part of it, while the kernel in front runs."""
    itemsize = DTYPES[dtype].itemsize
    tokens = 16 if rows <= 16 else 32 if rows <= 32 else 64
    cuts = list(cross((tokens,), (64, 128), (128, 256, 512)))
    if rows > 64:
        cuts = list(cross((64, 128, 256), (64, 128), (128, 256)))
    for (count, outputs, width), room, stages in cross(cuts, (200 << 10, 150 << 10, 100 << 10), (2, 3, 4)):
        tile = MatmulTile(count, outputs, width // itemsize, outputs // 16, stages)
        places = min(16, (room - count * width * stages) // (outputs * width))
        if places >= 2:
            yield replace(tile, prefetch=places)


def shared_bytes(tile: MatmulTile, itemsize: int) -> int:
    if tile.prefetch:
        return (tile.outputs * tile.prefetch + tile.tokens * tile.stages) * tile.inputs * itemsize + 1024
    return (tile.outputs + tile.tokens) * tile.inputs * itemsize * tile.stages + (tile.outputs * tile.tokens * 4 + 256)


def geometries(rows: int, dtype: str) -> list[MatmulTile]:
    """Tiles before they are fitted to a product: one compilation each."""
    itemsize = DTYPES[dtype].itemsize
    most = 32 if rows <= 32 else 64
    if rows <= 16:
        cuts = [(16, outputs, width, 4) for outputs, width in cross((16, 32, 64, 128), (256, 512))]
        cuts += [(16, 64, 128, 4), (16, 128, 128, 4), (16, 128, 256, 8), (16, 256, 128, 8)]
        cuts += [(16, 32, 1024, 4), (16, 16, 1024, 4)]
    elif rows <= 64:
        cuts = [(most, outputs, width, 4) for outputs, width in cross((32, 64, 128), (128, 256))]
        cuts += [(most, outputs, width, 8) for outputs, width in cross((128, 256), (128, 256))]
        cuts += [(32, 128, 128, 4), (32, 64, 256, 4), (most, 64, 512, 4)]
    else:
        cuts = [(tokens, outputs, 128, 8) for tokens, outputs in cross((64, 128, 256), (128, 256))]
        cuts += [(tokens, 64, 128, 4) for tokens in (64, 128, 256)] + [(64, 128, 256, 8), (128, 128, 256, 8)]
    found: dict[MatmulTile, None] = {}
    for (tokens, outputs, width, warps), tma in cross(cuts, (False, True)):
        base = MatmulTile(tokens, outputs, width // itemsize, warps, tma=tma)
        for programs in (1, 2):  # of a multiprocessor, that its shared memory has room for
            room = (SHARED_BYTES - 2048) // programs
            fits = [n for n in (3, 4, 5, 6, 8) if shared_bytes(replace(base, stages=n), itemsize) <= room]
            found |= {replace(base, stages=n): None for n in fits[-1:]}
        if shared_bytes(replace(base, stages=4), itemsize) <= SHARED_BYTES - 2048:
            found[replace(base, stages=4)] = None
    found |= dict.fromkeys(early(rows, dtype))
    # The tokens as left operand, as one would write it first.
    found |= {
        MatmulTile(most if rows > 16 else 16, 64, 256 // itemsize, 4, 5, tma=tma, swap=False): None
        for tma in (False, True)
    }
    return list(found)


def candidates(product: Product, rows: int, dtype: str, processors: int) -> Iterator[MatmulTile]:
    itemsize = DTYPES[dtype].itemsize
    for tile in geometries(rows, dtype):
        if tile.inputs > product.inputs or tile.outputs > product.outputs:
            continue
        each = min(4, SHARED_BYTES // shared_bytes(tile, itemsize), 2048 // (32 * tile.warps))
        _, tiles, blocks, _ = tile.launch(rows, product.outputs, product.inputs)
        splits = (1, 2, 4, 8, 16)
        if tile.prefetch:
            splits = sorted({1, 2, 3, 4, *(max(1, each * processors // tiles) for each in (1, 2))})
        for split in splits:
            if split <= blocks // 2 and (split == 1 or tiles * split <= 2 * each * processors):
                found = replace(tile, split=split)
                if found.fits_32_bits(rows, product.outputs, product.inputs):
                    for ahead in (0, 2, 6) if tile.prefetch else (0,):
                        if ahead == 0 or tile.prefetch < -(-blocks // split):
                            yield replace(found, prefetch_l2=ahead)
        if tiles % processors and not tile.prefetch:
            for programs in {processors, each * processors}:
                found = replace(tile, programs=programs)
                if programs <= tiles * blocks // 2 and found.fits_32_bits(rows, product.outputs, product.inputs):
                    yield found


class Bench:
    """A product's weights and inputs."""

    def __init__(self, product: Product, rows: int, dtype: str) -> None:
        self.product, self.rows, self.dtype = product, rows, dtype
        keep_shared_memory(GPU)  # As an engine does.
        count = max(2, -(-ROTATED_BYTES // product.bytes(dtype)))
        kind = DTYPES[dtype]
        shape = (product.outputs, product.inputs)
        self.stream = torch.cuda.Stream()
        self.waited = torch.zeros(WAITING, dtype=torch.int32, device=GPU)
        self.waits: float | None = None
        self.graph = self.captured(lambda: torch.zeros(1, device=GPU), None)
        self.weights = [torch.randn(shape, device=GPU, dtype=torch.bfloat16).to(kind) for _ in range(count)]
        self.use(rows)

    def use(self, rows: int) -> None:
        """Rows to multiply from now on."""
        self.rows = rows
        kind = DTYPES[self.dtype]
        self.x = torch.randn(rows, self.product.inputs, device=GPU, dtype=torch.bfloat16).to(kind)
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

    def check(self, run: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
        return wrong(lambda: run(self.weights[-1]), self.exact, self.counts)

    def captured(self, run: Callable[[], object], pool: tuple[int, int] | None) -> torch.cuda.CUDAGraph:
        """Not by torch.cuda.graph: it empties the allocator's cache each time, and there are thousands of these."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(*(() if pool is None else (pool,)))
            try:
                run()
            finally:
                graph.capture_end()
        return graph

    def behind(self) -> None:
        """The kernel in front."""
        wait_long(self.waited, self.product.behind)

    def us(self, run: Callable[[torch.Tensor], torch.Tensor], repeats: int) -> float:
        """Median microseconds of a product."""
        if not self.product.behind:
            return self.chain(run, repeats)

        def after(weight: torch.Tensor) -> None:
            self.behind()
            run(weight)

        if self.waits is None:
            self.waits = self.chain(lambda weight: self.behind(), 15)
        return self.chain(after, repeats) - self.waits

    def chain(self, run: Callable[[torch.Tensor], object], repeats: int) -> float:
        """Median microseconds of one of a chain, a weight each."""
        run(self.weights[0])
        # The last graph lives on until there is a new one: it holds the pool that both allocate from.
        self.graph = graph = self.captured(lambda: [run(weight) for weight in self.weights], self.graph.pool())
        graph.replay()
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(self.weights))
        return statistics.median(times)


Geometries = dict[str, list[MatmulTile]]
"""Tiles before they are fitted to a product, by kind of weight."""


def compile_share(several: Geometries, share: int, of: int) -> None:
    """Run each geometry of a share on a small product, so that the timed process finds it compiled."""
    small = Product("", "", 2048, 4096)
    for dtype, geometries in several.items():
        found = geometries[share::of]
        bench = Bench(small, 256, dtype) if found else None
        for tile in found:
            for how in ({"split": 1}, {"split": 2}, {"programs": 3})[: 2 if tile.prefetch else 3]:
                try:
                    bench.ours(replace(tile, **how))(bench.weights[0])
                except Exception:  # the timed process reports it
                    torch.cuda.synchronize()


def compile_all(several: Geometries) -> None:
    count = max(1, len(os.sched_getaffinity(0)) - 1)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_share, args=(several, i, count)) for i in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


KINDS: tuple[tuple[int, Callable[[MatmulTile], bool]], ...] = (
    (6, lambda tile: True),
    (2, lambda tile: tile.prefetch > 0),
    (2, lambda tile: tile.prefetch == 0),
    (1, lambda tile: tile.tma),
    (1, lambda tile: not tile.tma),
    (1, lambda tile: tile.programs > 0),
    (1, lambda tile: tile.programs == 0 and tile.split > 1),
    (1, lambda tile: tile.programs == 0 and tile.split == 1),
    (1, lambda tile: not tile.swap),
)


def is_right(bench: Bench, tile: MatmulTile) -> bool:
    fault = bench.check(bench.ours(tile))
    if fault is not None:
        print(f"  {describe(tile)}: {fault}", flush=True)
    return fault is None


def measure(bench: Bench, processors: int) -> dict:
    """Best candidates first: all in a few replays, the quickest once more in many."""
    product, rows, dtype = bench.product, bench.rows, bench.dtype
    library = {}
    for name, run in bench.library().items():
        try:
            library[name] = bench.us(run, 15)
        except Exception as error:
            torch.cuda.synchronize()
            print(f"  {name}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    found: list[tuple[float, MatmulTile]] = []
    for tile in candidates(product, rows, dtype, processors):
        try:
            found.append((bench.us(bench.ours(tile), 2), tile))
        except Exception as error:  # a tile that does not fit is no candidate
            torch.cuda.synchronize()
            print(f"  {describe(tile)}: {type(error).__name__}: {str(error)[:100]}", flush=True)
    found.sort(key=lambda pair: pair[0])
    finals: dict[MatmulTile, None] = {}
    # The best of each kind too: what a way of doing it brings is worth knowing even where it does not win.
    for most, keep in KINDS:
        right = (tile for _, tile in found if keep(tile) and (tile in finals or is_right(bench, tile)))
        finals |= dict.fromkeys(islice(right, most))
    best = sorted(((bench.us(bench.ours(tile), 15), tile) for tile in finals), key=lambda pair: pair[0])
    return record(product, rows, dtype, len(found), library, best)


def record(
    product: Product,
    rows: int,
    dtype: str,
    tried: int,
    library: dict[str, float],
    best: list[tuple[float, MatmulTile]],
) -> dict:
    """As `written` takes it. `best`: quickest first."""
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


def describe(tile: MatmulTile) -> str:
    how = f"{tile.programs} programs" if tile.programs else f"split {tile.split}"
    flags = (
        " tma" * tile.tma
        + " unswapped" * (not tile.swap)
        + f" prefetch {tile.prefetch}+{tile.prefetch_l2} every {tile.prefetch_cycles}" * (tile.prefetch > 0)
    )
    return f"{tile.tokens}x{tile.outputs}x{tile.inputs} w{tile.warps} s{tile.stages} {how}{flags}"


def line(record: dict, bandwidth: float) -> str:
    tile = dict(record["tiles"][0])
    us = tile.pop("us")
    kinds = "  ".join(f"{name} {best:.1f}" for name, best in by_kind(record))
    limit = record["outputs"] * record["inputs"] * DTYPES[record["dtype"]].itemsize / bandwidth / 1e6
    library = min(record["library"].items(), key=lambda pair: pair[1], default=("-", float("nan")))
    return (
        f"{record['model']:6s}{record['product']:8s}{record['dtype']:5s}{record['rows']:4d} rows  limit {limit:7.1f}"
        f"  ours {us:7.1f}  library {library[1]:7.1f} ({library[0]})  {describe(MatmulTile(**tile))}  [{kinds}]"
    )


def written(device: str, records: list[dict]) -> str:
    """JSON, a product a line."""
    lines = ",\n".join(json.dumps(record) for record in records)
    return f'{{"device": {json.dumps(device)}, "products": [\n{lines}\n]}}\n'


def by_kind(record: dict) -> Iterator[tuple[str, float]]:
    tiles = [(each["us"], MatmulTile(**{k: v for k, v in each.items() if k != "us"})) for each in record["tiles"]]
    for name, (_, keep) in zip(
        ("early", "late", "tma", "pointers", "stream", "split", "whole", "unswapped"), KINDS[1:], strict=True
    ):
        times = [us for us, tile in tiles if keep(tile)]
        if times:
            yield name, min(times)


def totals(records: list[dict], bandwidth: float) -> Iterator[str]:
    layers = [r for r in records if r["product"] != "head"]
    for model, dtype, rows in dict.fromkeys((r["model"], r["dtype"], r["rows"]) for r in layers):
        those = [r for r in layers if (r["model"], r["dtype"], r["rows"]) == (model, dtype, rows)]
        limit = sum(r["outputs"] * r["inputs"] * DTYPES[dtype].itemsize for r in those) / bandwidth / 1e6
        ours = sum(r["tiles"][0]["us"] for r in those)
        names = dict.fromkeys(name for r in those for name in r["library"])
        sums = {name: sum(r["library"].get(name, float("nan")) for r in those) for name in names}
        library = "  ".join(f"{name} {us:6.1f}" for name, us in sums.items())
        start = f"{model:6s}{dtype:5s}{rows:4d} rows: limit {limit:6.1f}"
        yield f"{start}  ours {ours:6.1f} ({limit / ours:4.0%})  {library}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="8b,70b")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--dtypes", default="fp8,bf16")
    parser.add_argument("--bandwidth", type=float, default=4.44, help="TB/s that memory can be read at")
    parser.add_argument("--seconds", type=float, default=500.0, help="start no product after so many")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU: there is none")
    began = time.monotonic()
    rows, dtypes = [int(n) for n in args.rows.split(",")], args.dtypes.split(",")
    torch.manual_seed(torch.seed() % 2**31)
    compile_all({dtype: list(dict.fromkeys(t for n in rows for t in geometries(n, dtype))) for dtype in dtypes})
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    records: list[dict] = []
    shapes = [product for model in args.shapes.split(",") for product in products(model)]
    for product, dtype in cross(shapes, dtypes):
        if time.monotonic() - began > args.seconds:
            print(f"out of time before {product} {dtype}")
            break
        bench = Bench(product, rows[0], dtype)
        for count in rows:
            bench.use(count)
            records.append(measure(bench, processors))
            print(line(records[-1], args.bandwidth), f"  {time.monotonic() - began:.0f} s", flush=True)
        del bench
        torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(written(torch.cuda.get_device_name(), records))
    print(f"\n{torch.cuda.get_device_name()}, us a product; all four of a layer added up:")
    print("\n".join(totals(records, args.bandwidth)))


if __name__ == "__main__":
    main()
