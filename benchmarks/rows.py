"""Kernels that take a row of an activation each, on a GPU: microseconds, and the share of bandwidth that is.

    python benchmarks/rows.py [--shapes 8b,70b] [--rows 1,64,256,8192] [--warps 16,32]

norm adds the residual and writes E4M3 by token, alone or with the scales of a product that left them to it; silu is
silu(gate) * up, in E4M3 too; encode is what attention in a library is followed by. Limit: what each reads and writes,
once, at the bandwidth given; below some 50 MB the cache may do better.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import triton

from dovetail.core.ops import encode, rms_norm, silu_and_mul
from dovetail.core.ops.kernels import formats, gated, norm
from dovetail.plugins.quant.fp8.format import FP8_TOKEN

SHAPES = {"8b": (4096, 14336), "70b": (8192, 28672), "405b": (16384, 53248)}
"""Hidden and intermediate channels of a model on one rank; "70b/8" is a rank of eight."""
EMIT = (FP8_TOKEN,)


def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def kernels(shape: str, rows: int) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """(name, bytes it must move, call)."""
    name, _, ranks = shape.partition("/")
    hidden, wide = SHAPES[name]
    wide //= int(ranks or 1)
    x, residual, weight = cuda(rows, hidden), cuda(rows, hidden), cuda(hidden)
    yield "norm", rows * hidden * (3 * 2 + 1), lambda: rms_norm(x, residual, weight, 1e-5, EMIT)
    yield "encode", rows * hidden * (2 + 1), lambda: encode(x, EMIT)
    gate_up = cuda(rows, 2 * wide)
    moved = rows * wide * (2 * 2 + 1)
    yield "silu", moved, lambda: silu_and_mul(gate_up, EMIT)
    scale = cuda(rows, 1).float().abs(), cuda(hidden).float().abs()
    moved = rows * hidden * (3 * 2 + 1)
    yield "norm, scaled", moved, lambda: rms_norm(x, residual, weight, 1e-5, EMIT, scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8b,70b")
    parser.add_argument("--rows", default="1,64,256,8192")
    parser.add_argument("--warps", default="", help="of a program: each of these in place of the rule, and the rule")
    parser.add_argument("--bandwidth", type=float, default=4.44, help="TB/s that memory can be read at")
    args = parser.parse_args()
    rule = formats.warps
    rules = {"rule": rule} | {n: lambda block, rows=None, n=n: int(n) for n in filter(None, args.warps.split(","))}
    print(f"{'':24s}{'limit':>9}" + "".join(f"{name + (' warps' if name != 'rule' else ''):>10}" for name in rules))
    for shape in args.shapes.split(","):
        for rows in map(int, args.rows.split(",")):
            for name, moved, call in kernels(shape, rows):
                times = []
                for count in rules.values():
                    for module in (formats, gated, norm):
                        module.warps = count
                    times.append(1e3 * triton.testing.do_bench_cudagraph(call))
                line = "".join(f"{us:>10.1f}" for us in times)
                print(f"{shape:6s}{rows:5d} {name:12s}{moved / args.bandwidth / 1e6:>9.1f}{line}", flush=True)


if __name__ == "__main__":
    main()
