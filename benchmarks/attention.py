"""Paged attention of attention=triton on a GPU: checked against float64 first, then timed.

    python benchmarks/attention.py [--tune] [--only "decode 64"] [--quick] [--heads 32] [--kv-heads 8] [--head-dim 128]
        [--page 16,64] [--decode 24x600,64x640,64x640x5]

Times are medians over replays of a CUDA graph of several layers, each with its own KV, so that nothing is found in the
L2 cache (except much of a single row's few keys). A decode layer also applies rope to the new keys and writes them, as
a step does. It runs after a stand-in for the preceding matmul, whose time is subtracted. Decode counts
bytes of K and V, prefill counts the operations of visible pairs. On Hopper, the kernel for all GPUs is timed as well.
attention=flashinfer is timed where its package is installed; it plans once, which is not timed. --tune tries block
sizes and prints the best, of the steps in --decode if there are any.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import timing
import torch

from dovetail.core.interfaces import (
    PLAIN,
    AttentionBackend,
    AttentionLayer,
    AttnCtx,
    BatchMeta,
    HostBounds,
    KVGroup,
    KVPool,
    Plane,
    Rope,
)
from dovetail.core.ops.kernels.launch import HOPPER
from dovetail.plugins.attention.config import FlashInferConfig, TritonConfig
from dovetail.plugins.attention.flashinfer.backend import FlashInfer
from dovetail.plugins.attention.triton.backend import Triton
from dovetail.plugins.attention.triton.tiles import WARP_KEYS, DecodeTile, PromptTile, Shape, Tile, Tiles, fit

GPU = torch.device("cuda")
DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
KV_BYTES = 1 << 30
"""Layers are added until their KV exceeds this: many times the L2 cache, and enough that the launch of a graph and the
plan do not count."""
CHAIN = 32
"""Decode layers of a graph, so that the plan hardly counts: some run more than once."""
PRECEDING_US, PROGRAMS = 4.0, 120
"""Time and programs of the stand-in for the preceding matmul. Keys are prefetched while it runs."""
SEVERAL_PROMPTS = ((16, 512), (8, 1024))
"""(rows, tokens of each) of steps that feed several prompts."""


@dataclass(frozen=True)
class Work:
    """A step of equal rows."""

    name: str
    rows: int
    count: int
    """Tokens of a row in this step."""
    length: int
    """Keys of a row after it."""
    kv: str = "bf16"
    page: int = 16

    @property
    def decode(self) -> bool:
        return self.name.startswith("decode")

    @property
    def label(self) -> str:
        return f"{self.name} {self.kv} page {self.page}"


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int

    def bytes(self, work: Work) -> int:
        return 2 * work.rows * work.length * self.kv * self.dim * DTYPES[work.kv].itemsize

    def flops(self, work: Work) -> float:
        pairs = work.count * (work.length - work.count) + work.count * (work.count + 1) / 2
        return 4.0 * work.rows * pairs * self.query * self.dim

    def rate(self, work: Work, us: float) -> str:
        if work.decode:
            return f"{self.bytes(work) / us / 1e6:6.2f} TB/s"
        return f"{self.flops(work) / us / 1e6:6.0f} TF/s"


class Fixed(Tiles):
    """One tile for everything."""

    def __init__(self, tile: Tile) -> None:
        self.tile = tile

    def decode(self, shape: Shape, tokens: int, programs: float) -> Tile:
        return self.tile if isinstance(self.tile, DecodeTile) else fit(self.tile, shape)

    def prefill(self, shape: Shape, tokens: int, rows: int) -> Tile:
        return self.tile if isinstance(self.tile, PromptTile) else fit(self.tile, shape)


class Bench:
    """Several layers of random pages for backends to attend over."""

    def __init__(self, work: Work, heads: Heads, layers: int = 0) -> None:
        """layers: 0 = as many as KV_BYTES asks for."""
        self.work, self.heads = work, heads
        layers = layers or max(1, min(8, -(-KV_BYTES // heads.bytes(work))))
        row_pages = -(-work.length // work.page)
        pages = work.rows * row_pages
        plane = (heads.kv, heads.dim)
        dtype = DTYPES[work.kv]
        group = KVGroup(
            0, tuple(range(layers)), (Plane("k", plane, dtype), Plane("v", plane, dtype)), page_tokens=work.page
        )
        shape = (layers, pages + 1, work.page, *plane)
        self.pool = KVPool(group, {name: random_plane(shape, dtype) for name in ("k", "v")})
        self.table = (torch.randperm(pages, device=GPU) + 1).int().view(work.rows, row_pages)
        total = work.rows * work.count
        unused = torch.zeros(total, dtype=torch.int64, device=GPU)
        self.meta = BatchMeta(
            row_start_B1=torch.arange(work.rows + 1, dtype=torch.int32, device=GPU) * work.count,
            kv_len_B=torch.full((work.rows,), work.length, dtype=torch.int32, device=GPU),
            slots_B=torch.arange(work.rows, device=GPU),
            positions_T=unused,
            rows_T=unused,
            page_table_BP=self.table,
            write_T=unused,
            page_tokens=work.page,
        )
        bounds = (work.length,) * work.rows
        self.host = HostBounds((work.count,) * work.rows, bounds, work.rows if work.decode else 0)
        self.q = torch.randn(total, heads.query, heads.dim, device=GPU, dtype=torch.bfloat16)
        wide = (heads.query + 2 * heads.kv) * heads.dim
        self.qkv = torch.randn(total if work.decode else 0, wide, device=GPU, dtype=torch.bfloat16)
        self.rope = Rope(torch.randn(work.length, heads.dim, device=GPU))
        scale = 1.0 if dtype == torch.bfloat16 else 0.02
        self.layers = [
            AttentionLayer(i, 0, i, heads.query, heads.kv, heads.dim, heads.dim**-0.5, 0, scale, scale)
            for i in range(layers)
        ]

    def triton(self, tiles: Tiles | None = None, gluon: bool = True) -> AttentionBackend:
        backend = Triton(TritonConfig(gluon=gluon))
        if tiles is not None:
            backend.tiles = tiles
        backend.bind({0: self.pool})
        return backend

    def plan(self, backend: AttentionBackend) -> AttnCtx:
        return backend.plan_device(self.meta, self.host, backend.plan_host(self.host))

    def attend(self, tiles: Tiles | None = None, gluon: bool = True) -> Callable[[], torch.Tensor]:
        """Attention of all layers with its plan, without writing keys."""
        backend = self.triton(tiles, gluon)
        return lambda: self.layer_by_layer(backend, self.plan(backend))

    def flashinfer(self) -> Callable[[], torch.Tensor]:
        backend = FlashInfer(FlashInferConfig())
        backend.bind({0: self.pool})
        ctx = self.plan(backend)  # its plans cannot be captured
        return lambda: self.layer_by_layer(backend, ctx)

    def layer_by_layer(self, backend: AttentionBackend, ctx: AttnCtx) -> torch.Tensor:
        for layer in self.layers:
            out = backend.attend(layer, ctx, self.q)[PLAIN].values
        return out

    def us(self, run: Callable[[], object]) -> float:
        """Median microseconds of a layer."""
        return timing.microseconds(run, repeats=12) / len(self.layers)

    def step(self, tiles: Tiles | None = None, gluon: bool = True) -> float:
        """Microseconds of a layer as a step runs it: decode rows write their new keys."""
        if not self.work.decode:
            return self.us(self.attend(tiles, gluon))
        backend, layers = self.triton(tiles, gluon), self.layers * -(-CHAIN // len(self.layers))
        programs = torch.zeros(PROGRAMS, dtype=torch.int32, device=GPU)

        def preceding() -> None:
            timing.delay(programs, PRECEDING_US)

        def run() -> None:
            ctx = self.plan(backend)
            for layer in layers:
                preceding()
                backend.write_and_attend(layer, ctx, self.qkv, self.rope)

        alone = self.us(lambda: [preceding() for _ in layers])
        return (self.us(run) - alone) * len(self.layers) / len(layers)

    def check(self, run: Callable[[], torch.Tensor], what: str) -> float:
        """Compare a few tokens of the last layer with float64; return the largest relative error."""
        work, heads = self.work, self.heads
        got = run().view(work.rows, work.count, heads.query, heads.dim)
        layer = self.layers[-1]
        worst = 0.0
        for row, at in ((0, 0), (work.rows // 2, work.count // 2), (work.rows - 1, work.count - 1)):
            k, v = (
                self.pool.layer(layer.local, name)[self.table[row].long()].flatten(0, 1)[: work.length].double()
                * layer.k_scale
                for name in ("k", "v")
            )
            seen = work.length - work.count + at + 1
            k, v = (x[:seen].repeat_interleave(heads.query // heads.kv, dim=1) for x in (k, v))
            q = self.q.view(got.shape)[row, at].double()
            want = torch.einsum("hl,lhd->hd", (torch.einsum("hd,lhd->hl", q, k) * layer.scale).softmax(-1), v)
            worst = max(worst, float((got[row, at].double() - want).norm() / want.norm()))
        assert worst < 0.02, f"{work}: {what} is off by {worst:.1e}"
        return worst


def random_plane(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers, scaled into the range of 8-bit formats. One chunk is repeated: only its bytes count."""
    plane = torch.empty(shape, dtype=dtype, device=GPU)
    flat = plane.view(torch.uint8).flatten()
    chunk = torch.randn(1 << 24, device=GPU)
    data = (chunk if dtype == torch.bfloat16 else chunk / 0.02).to(dtype).view(torch.uint8)
    for start in range(0, flat.numel(), data.numel()):
        part = flat[start : start + data.numel()]
        part.copy_(data[: part.numel()])
    return plane


def works(pages: list[int], quick: bool, decode: list[tuple[int, int, int]]) -> Iterator[Work]:
    """`decode`: (rows, keys of each, tokens of each) of decode steps; empty = a grid of rows and keys."""
    slow = ((1, 32768), (64, 32768), (256, 32768), (256, 4096))
    grid = [(rows, length, 1) for rows in (1, 64, 256) for length in (640, 4096, 32768)]
    for page in pages:
        for kv in ("bf16", "e4m3"):
            for rows, length, count in decode or grid:
                if decode or not (quick and (rows, length) in slow):
                    name = f"decode {rows} x {length}" + (f" x {count}" if count > 1 else "")
                    yield Work(name, rows, count, length, kv, page)
        for count, length in ((512, 512), (2048, 2048), (8192, 8192), (2048, 10240), (2048, 34816)):
            yield Work(f"prefill {count} of {length}", 1, count, length, "bf16", page)
        for count, length in ((8192, 8192), (2048, 10240)):
            yield Work(f"prefill {count} of {length}", 1, count, length, "e4m3", page)
        for rows, count in SEVERAL_PROMPTS:
            for kv in ("bf16", "e4m3"):
                yield Work(f"prefill {rows} x {count}", rows, count, count, kv, page)


def compare(heads: Heads, pages: list[int], only: str, quick: bool, decode: list[tuple[int, int, int]]) -> list[str]:
    lines, hopper = [], torch.cuda.get_device_capability() == HOPPER
    for work in (work for work in works(pages, quick, decode) if only in work.label):
        bench = Bench(work, heads)
        off, us = bench.check(bench.attend(), "triton"), bench.step()
        line = f"{work.name:24s} {work.kv:5s} page {work.page:3d} {us:9.1f} us {heads.rate(work, us)}  off {off:.0e}"
        if hopper:
            line += f"  for all GPUs {bench.step(gluon=False):9.1f} us"
        if importlib.util.find_spec("flashinfer"):
            bench.check(bench.flashinfer(), "flashinfer")
            us = bench.us(bench.flashinfer())
            line += f"  flashinfer {us:9.1f} us {heads.rate(work, us)}"
        print(line, flush=True)
        lines.append(line)
        del bench
        torch.cuda.empty_cache()
    return lines


# Tuning.

DECODE = [
    Tile(16, n, warps, stages, 2, pairs=True)
    for n, warps, stages in (
        (32, 1, 4), (32, 2, 4), (32, 2, 6), (64, 1, 3), (64, 2, 3), (64, 2, 4), (64, 4, 3), (64, 4, 4), (64, 4, 5),
        (64, 8, 4), (128, 2, 3), (128, 4, 3), (128, 4, 4), (128, 8, 3),
    )
]  # fmt: skip
DECODE += [
    Tile(8, n, warps, stages, 2, pairs=True, key_warps=warps)
    for n, warps, stages in (
        (16, 4, 3), (16, 4, 4), (16, 8, 2), (16, 8, 3), (32, 2, 3), (32, 2, 4), (32, 4, 2), (32, 4, 3), (64, 2, 2),
    )
]  # fmt: skip
DECODE += [
    DecodeTile(8, WARP_KEYS, warps, stages, 2, least=128, slabs=slabs, root=16)
    for warps, stages, slabs in (
        (4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 3, 1), (4, 3, 2), (4, 4, 1), (8, 1, 1), (8, 2, 1), (8, 2, 2), (8, 3, 1),
        (8, 4, 1),
    )
]  # fmt: skip
SEVERAL = [
    DecodeTile(heads, WARP_KEYS, warps, stages, 2, least=128, slabs=slabs, root=16, tokens=tokens)
    for heads, tokens in ((8, 2), (16, 4), (32, 8))
    for warps, stages, slabs in ((2, 3, 2), (4, 2, 1), (4, 2, 2), (4, 3, 1), (4, 3, 2), (8, 2, 1))
]
SEVERAL += [
    Tile(32, n, warps, stages, 2, least=128, pairs=True)
    for n, warps, stages in ((32, 2, 4), (64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3))
]
"""Tiles of rows with drafts, for four query heads per kv head."""
CUTS = ((1, 256), (3, 256), (4, 256), (1, 128), (2, 128), (2, 64), (2, 512), (2, 1024), (2, 2048))
"""(programs of a multiprocessor, least keys of a range). Each range that is joined costs 0.2 us (archive)."""
PREFILL = [
    Tile(m, n, warps, stages, 1, least=1024, tma=tma)
    for m, n, warps, stages in ((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2))
    for tma in (False, True)
]
PREFILL += [
    PromptTile(128, n, 4, stages, 1, least=1024, tma=True, persistent=persistent)
    for n, stages in ((128, 2), (64, 3), (64, 4))
    for persistent in (False, True)
]


def candidates(pages: list[int], only: str, decode: list[tuple[int, int, int]]) -> list[tuple[Work, list[Tile]]]:
    """`decode`: rows, keys and tokens of the steps to tune in place of the usual ones."""
    if decode:
        cases = [
            (
                Work(f"decode {rows} x {length} x {count}", rows, count, length, kv, page),
                SEVERAL if count > 1 else DECODE,
            )
            for page in pages
            for kv in ("bf16", "e4m3")
            for rows, length, count in decode
        ]
        return [(work, tiles) for work, tiles in cases if only in work.label]
    cases = [
        (Work(f"decode {rows} x {length}", rows, 1, length, kv, page), DECODE)
        for page in pages
        for kv in ("bf16", "e4m3")
        for rows, length in ((1, 640), (1, 4096), (1, 32768), (32, 8320), (64, 640), (64, 4096), (256, 640))
    ]
    cases += [
        (Work(f"decode {rows} x {length} x {count}", rows, count, length, "e4m3", page), SEVERAL)
        for page in pages
        for rows, length, count in ((64, 700, 5), (256, 700, 2), (256, 700, 4), (256, 700, 5), (64, 3000, 5))
    ]
    for page in pages:
        cases += [(Work(f"prefill {n}", 1, n, n, "bf16", page), PREFILL) for n in (512, 2048, 8192)]
        cases += [(Work(f"prefill {rows} x {n}", rows, n, n, "bf16", page), PREFILL) for rows, n in SEVERAL_PROMPTS]
        cases += [
            (Work(f"prefill {n} of {of}", 1, n, of, "e4m3", page), PREFILL) for n, of in ((8192, 8192), (2048, 10240))
        ]
    return [(work, tiles) for work, tiles in cases if only in work.label]


def describe(tile: Tile) -> str:
    reads = " tma" * tile.tma + " pairs" * tile.pairs + " key warps" * (tile.key_warps > 0)
    if isinstance(tile, PromptTile):
        reads = " hopper" + " persistent" * tile.persistent
    if isinstance(tile, DecodeTile):
        reads = f" hopper {tile.slabs} slabs root {tile.root}"
    return f"{tile.block_m}x{tile.block_n} w{tile.warps} s{tile.stages} p{tile.programs} least {tile.least}{reads}"


def compile_share(
    heads: Heads, pages: list[int], only: str, decode: list[tuple[int, int, int]], share: int, of: int
) -> None:
    """Run one share of the candidates once."""
    for work, tiles in candidates(pages, only, decode):
        bench = Bench(work, heads)
        for tile in tiles[share::of]:
            try:
                bench.step(Fixed(tile))
            except Exception:  # the process that times it reports it
                torch.cuda.synchronize()


def tune(heads: Heads, pages: list[int], only: str, decode: list[tuple[int, int, int]]) -> list[str]:
    timing.in_processes(compile_share, heads, pages, only, decode)
    lines = []
    for work, tiles in candidates(pages, only, decode):
        bench = Bench(work, heads)
        found = []
        for tile in tiles:
            try:
                found.append((bench.step(Fixed(tile)), tile))
            except Exception as error:  # a tile that does not fit is no candidate
                torch.cuda.synchronize()
                print(f"  {tile}: {type(error).__name__}: {str(error)[:100]}")
        for programs, least in CUTS if work.decode else ():
            tile = replace(min(found, key=lambda pair: pair[0])[1], programs=programs, least=least)
            found.append((bench.step(Fixed(tile)), tile))
        found.sort(key=lambda pair: pair[0])
        shown = [f"{describe(tile):32s} {us:8.1f} us {heads.rate(work, us)}" for us, tile in found]
        for line in shown:
            print(f"  {work.label}: {line}", flush=True)
        lines.append(f"{work.label:34s} {shown[0]}")
        del bench
        torch.cuda.empty_cache()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try block sizes")
    parser.add_argument("--only", default="", help='cases whose label contains this, such as "decode 64"')
    parser.add_argument("--quick", action="store_true", help="leave out the longest cases")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page", default="16,64", help="tokens of a page")
    parser.add_argument("--decode", default="", help="rows x keys (x tokens) of decode steps, such as 24x600,64x640x5")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU: there is none")
    torch.manual_seed(torch.seed() % 2**31)
    heads = Heads(args.heads, args.kv_heads, args.head_dim)
    pages = [int(page) for page in args.page.split(",")]
    sizes = [[int(size) for size in step.split("x")] for step in args.decode.split(",") if step]
    decode = [(rows, keys, *(tokens or [1])) for rows, keys, *tokens in sizes]
    lines = tune(heads, pages, args.only, decode) if args.tune else compare(heads, pages, args.only, args.quick, decode)
    print(f"\n{torch.cuda.get_device_name()}, {heads.query} heads, {heads.kv} kv heads, head dim {heads.dim}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
