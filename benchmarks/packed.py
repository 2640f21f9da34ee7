"""Matmuls with packed weights of many rows on a GPU: our kernel, which decodes in registers, beside decoding the whole
weight to memory for the library.

    python benchmarks/packed.py [--shapes 8b,70b] [--rows 256,512,1024,2048,8192] [--formats uint4,e2m1]

Prints microseconds of each way for 16-bit and E4M3 inputs, what decoding takes alone, and the library with a weight
that is already decoded. Weights of a graph's calls differ, so that none is found in the L2 cache. `kernel` is the tile
that the rule picks, whether or not it applies to so many rows. For E4M3, `library` is the weight rounded to E4M3,
`rounded` the kernel for Hopper that rounds it as it decodes it, and `off` the relative error of the library's result
beside that of `kernel`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from timing import copies, microseconds

from dovetail.core.interfaces.weight import PackedWeight, WeightFormat
from dovetail.core.ops import packed_tiles, weight_formats
from dovetail.core.ops.kernels.packed_matmul import packed_matmul_triton
from dovetail.core.ops.matmul import device_facts, scaled_matmul
from dovetail.core.ops.packed_matmul import decoded, reserve, rounds_by_kernel
from dovetail.core.ops.packing import by_group, pack_scales, scales_to_round, words_of_row
from dovetail.core.ops.tiles import MOST_SHARED_TILES

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = {
    "8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
}
"""(outputs, inputs) of a layer's matmuls."""
FORMATS = {
    "uint4": (weight_formats.UINT4, 128, BF16),
    "int4": (weight_formats.INT4, 128, BF16),
    "e2m1": (weight_formats.E2M1, 16, E4M3),
}
"""Format, group and dtype of scales."""
COLUMNS = ("kernel", "rounded", "library", "decode", "ready")


def random_weight(fmt: WeightFormat, group: int, scale: torch.dtype, outputs: int, inputs: int) -> PackedWeight:
    groups = inputs // group
    codes = torch.randint(-(2**31), 2**31, (outputs, words_of_row(inputs, 4)), dtype=torch.int32, device="cuda")
    scale_OG = (torch.rand(outputs, groups, device="cuda") + 0.5).to(scale)
    # As PackedLinear keeps them.
    scale_OG = pack_scales(scale_OG) if scale is E4M3 else by_group(scale_OG)
    zero_OG = by_group(torch.randint(16, (outputs, groups), dtype=torch.uint8, device="cuda")) if fmt.zero else None
    weight = PackedWeight(fmt, inputs, group, codes, scale_OG, zero_OG)
    return replace(weight, rounded_scale=scales_to_round(weight))


def with_rule(rows: int, weight: PackedWeight, itemsize: int) -> packed_tiles.MatmulTile | None:
    """Return the tile that the rule picks for these rows, without its limit of rows."""
    _, processors, hopper, shared = device_facts(weight.codes.device)
    how = weight.format.stored_bits, itemsize, processors, shared
    if not hopper:
        return packed_tiles.packed_tile(min(rows, packed_tiles.MOST_ROWS), len(weight.codes), weight.inputs, *how)
    return packed_tiles.specialized_tile(rows, len(weight.codes), weight.inputs, *how, weight.group)


def measure(weights: list[PackedWeight], rows: int, dtype: torch.dtype) -> None:
    first = weights[0]
    inputs, counts = first.inputs, torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device="cuda")
    x_TI = torch.randn(rows, inputs, device="cuda").to(dtype)
    x_scale_T1 = torch.rand(rows, 1, device="cuda") + 0.5 if dtype is E4M3 else None
    tile = with_rule(rows, first, dtype.itemsize)
    turn = itertools.cycle(weights)

    def kernel() -> torch.Tensor:
        assert tile is not None
        return packed_matmul_triton(x_TI, next(turn), tile, counts, None, x_scale_T1, BF16)

    def library() -> torch.Tensor:
        weight = next(turn)
        weight_OI = decoded(weight, dtype)
        if x_scale_T1 is None:
            return torch.nn.functional.linear(x_TI, weight_OI)
        assert weight.rounded_scale is not None
        return scaled_matmul(x_TI, weight_OI, x_scale_T1, weight.rounded_scale, None, BF16, counts)

    ready_OI = torch.randn(len(first.codes), inputs, device="cuda").to(dtype)

    def ready() -> torch.Tensor:
        if x_scale_T1 is None:
            return torch.nn.functional.linear(x_TI, ready_OI)
        scale_1O = first.rounded_scale[None] if first.rounded_scale is not None else None
        return torch._scaled_mm(x_TI, ready_OI.t(), x_scale_T1, scale_1O, out_dtype=BF16, use_fast_accum=True)

    # Results of all calls stay in the graph's memory.
    calls = len(weights) if rows <= 1024 else 2
    ways: dict[str, Callable[[], object]] = {"library": library, "decode": lambda: decoded(next(turn), dtype)}
    ways |= {"ready": ready} | ({"kernel": kernel} if tile is not None else {})
    _, processors, hopper, _ = device_facts(first.codes.device)
    if hopper and dtype is E4M3 and rounds_by_kernel(first):
        rounding = packed_tiles.rounded_tile(rows, len(first.codes), inputs, processors)
        how = counts, None, x_scale_T1, BF16
        ways["rounded"] = lambda: packed_matmul_triton(x_TI, next(turn), rounding, *how)
    found = {name: microseconds(way, calls) for name, way in ways.items()}
    off = ""
    if tile is not None:
        turn = iter([first, first])
        exact, got = kernel().float(), library().float()
        off = f"{((got - exact).norm() / exact.norm()).item():9.4f}"
    kind = "e4m3" if dtype is E4M3 else "16 bits"
    shape = f"{first.format.name:6s}{len(first.codes):7d} x {inputs:<6d}{rows:6d} {kind:8s}"
    times = "".join(f"{found.get(name, float('nan')):10.1f}" for name in COLUMNS)
    rate = 2e-6 * rows * len(first.codes) * inputs
    print(f"{shape}{times}{rate / found['library']:8.0f}{off}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8b,70b")
    parser.add_argument("--rows", default="256,512,1024,2048,8192")
    parser.add_argument("--formats", default="uint4")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU: there is none")
    print(f"{'':39s}{''.join(f'{name:>10}' for name in COLUMNS)}{'TFLOP/s':>8}{'off':>9}")
    for name in args.formats.split(","):
        for outputs, inputs in itertools.chain.from_iterable(SHAPES[shape] for shape in args.shapes.split(",")):
            space = reserve(outputs, inputs, BF16, torch.device("cuda"))
            number = copies(outputs * inputs // 2)
            weights = [random_weight(*FORMATS[name], outputs, inputs) for _ in range(number)]
            for rows in map(int, args.rows.split(",")):
                for dtype in (BF16, E4M3):
                    measure(weights, rows, dtype)
                    gc.collect()
                    torch.cuda.empty_cache()
            del space, weights


if __name__ == "__main__":
    with torch.inference_mode():
        main()
