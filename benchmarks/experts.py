"""Routing and products of experts on a GPU, against their limit, in microseconds.

    python benchmarks/experts.py [--models qwen3_30b_a3b,mixtral_8x7b,glm45_air] [--dtypes bf16,fp8] [--rows 1,64,8192]
    python benchmarks/experts.py --models gpt_oss_20b,gpt_oss_120b --dtypes mxfp4,mxfp4_a8
    python benchmarks/experts.py --models deepseek_v3_rank --dtypes fp8_block
    python benchmarks/experts.py --models qwen3_30b_a3b,mixtral_8x7b --dtypes int4,int4_a8 --rows 1,16,64,256,1024,8192
    python benchmarks/experts.py --search --models qwen3_30b_a3b --rows 1,64

mxfp4 has inputs in bfloat16, mxfp4_a8 in FP8; fp8_block has a scale for each block of 128 x 128 weights. int4 has codes
with a scale and a zero for each 128 inputs, as GPTQ and AWQ, nvfp4 a scale for each 16, nf4 for each 64; int4_a8 has
inputs in FP8. int8 has weights and inputs of 8 bits.

Every call has its own routing, drawn uniformly. `experts` is the mean number of experts that a call touches. The limit
is the larger of the time to read their matrices at --bandwidth and of the products at --tflops; below about 50 MB the
cache may be faster. `route` is the router's product and the selection; `products` is all the rest of a layer.

--search measures other tiles of each product than the rule's, the other product unchanged, and prints the fastest with
its time over the rule's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from timing import microseconds

from dovetail.core.arithmetic import ceil_div
from dovetail.core.compose import compose
from dovetail.core.interfaces import PLAIN, SWIGLU, Activation, MoE, Routing, RoutingRule
from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops import (
    ExpertWeights,
    PackedExperts,
    encode,
    gated_experts,
    packed_gated_experts,
    route,
    router_logits,
)
from dovetail.core.ops.expert_tiles import (
    ExpertTile,
    expert_tile,
    most_tiles,
    packed_expert_tile,
    packed_shared,
    specialized,
    specialized_expert_tile,
    specialized_packed,
    specialized_rows,
    stacked_expert_tile,
    stacked_shared,
)
from dovetail.core.ops.kernels.experts import gated_experts_triton
from dovetail.core.ops.kernels.packed_experts import packed_experts_triton
from dovetail.core.ops.kernels.stacked_experts import in_e4m3, stacked_experts_triton
from dovetail.core.ops.matmul import device_facts
from dovetail.core.ops.packed_experts import BIAS, EACH, spans
from dovetail.core.ops.packing import by_group, pack_scales, words_of_row
from dovetail.core.ops.stacked_experts import StackedExperts, stacked_gated_experts
from dovetail.core.ops.tiles import MOST_SHARED_TILES
from dovetail.core.ops.weight_formats import E2M1, NF4, UINT4
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int8.format import INT8_TOKEN

BLOCK = 128
"""Outputs, and inputs, that share a scale of fp8_block; a model's channels are multiples of it."""
STACKED = {
    "int4": (UINT4, 128, torch.bfloat16),
    "nvfp4": (E2M1, 16, torch.float8_e4m3fn),
    "nf4": (NF4, 64, torch.float32),
}
"""Format, inputs that share a scale, and dtype of scales."""
CALLS = 8
"""Calls in a graph, each with its own routing."""
DEVICE, GPU = torch.device("cuda"), torch.device("cuda", 0)


class Layer:
    """Experts of one layer, with random weights, and the inputs of CALLS calls."""

    def __init__(self, moe: MoE, hidden: int, dtype: str, rows: int) -> None:
        self.moe, self.hidden, self.rows, self.dtype = moe, hidden, rows, dtype
        self.fp8 = dtype in ("fp8", "fp8_block") or dtype.endswith("_a8")
        self.int8 = dtype == "int8"
        self.block = (BLOCK, BLOCK) if dtype == "fp8_block" else None
        self.rule = RoutingRule(moe.experts, moe.active, normalize=True, uniform=True)
        self.fmt = FP8_TOKEN if self.fp8 else INT8_TOKEN if self.int8 else PLAIN
        self.weights = self.draw()
        self.router_EC = torch.randn(moe.experts, hidden, device=DEVICE).bfloat16() / hidden**0.5
        self.counts = torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=DEVICE)
        self.plain = [torch.randn(rows, hidden, device=DEVICE).bfloat16() for _ in range(CALLS)]
        self.inputs = [encode(x, (self.fmt,))[self.fmt] for x in self.plain]
        self.routings = [self.route(x) for x in self.plain]

    def draw(self) -> Any:
        up, up_scale = self._weights(self.moe.experts, 2 * self.moe.intermediate, self.hidden)
        down, down_scale = self._weights(self.moe.experts, self.hidden, self.moe.intermediate)
        return ExpertWeights(up, down, up_scale, down_scale, self.block)

    def _weights(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = torch.empty(shape, dtype=self.fmt.dtype or torch.bfloat16, device=DEVICE)
        # int8 has whole numbers up to 127.
        size = 40.0 if self.int8 else shape[-1] ** -0.5
        for expert in weight:
            expert.copy_((torch.randn(shape[1:], device=DEVICE) * size).clamp(-127, 127))
        scales = shape[:2] if self.block is None else (shape[0], *(ceil_div(size, BLOCK) for size in shape[1:]))
        return weight, torch.ones(scales, device=DEVICE) if self.fp8 or self.int8 else None

    def route(self, x_TC: torch.Tensor) -> Routing:
        return route(router_logits(x_TC, self.router_EC, self.counts), self.rule)

    def multiply(self, x: Activation, routing: Routing, tiles: tuple[ExpertTile, ExpertTile] | None = None) -> object:
        options = dict(between=self.fmt, dtype=torch.bfloat16)
        if tiles is None:
            return gated_experts(x, routing, self.weights, SWIGLU, **options)
        return gated_experts_triton(x, routing, self.weights, SWIGLU, None, **options, fast_accum=True, chosen=tiles)

    @property
    def touched(self) -> float:
        """Mean number of experts that a call touches."""
        return sum(len(routing.experts_TK.unique()) for routing in self.routings) / CALLS

    @property
    def nbytes(self) -> int:
        """Bytes of an expert's matrices, without scales of rows."""
        return int(self.weights.up[0].nbytes + self.weights.down[0].nbytes)

    def limit(self, bandwidth: float, tflops: float) -> float:
        """Microseconds that a call takes at least."""
        read = self.touched * self.nbytes / bandwidth / 1e6
        multiplied = 2 * self.rows * self.moe.active * 3 * self.hidden * self.moe.intermediate / tflops / 1e6
        return max(read, multiplied)

    def microseconds(self, tiles: tuple[ExpertTile, ExpertTile] | None = None) -> float:
        """Microseconds of all products of a call."""
        return _each(lambda i: self.multiply(self.inputs[i], self.routings[i], tiles))

    def ruled(self, rows: int) -> tuple[ExpertTile, ExpertTile]:
        """Tiles of the rule for tiles of so many rows."""
        tiles = most_tiles(self.rows * self.moe.active, self.moe.experts, rows)
        _, processors, hopper, shared = device_facts(GPU)
        _, hidden, channels = self.weights.down.shape
        size = self.weights.up.element_size()
        if hopper and specialized(rows, hidden, channels, size, self.block):
            return (specialized_expert_tile(rows, size, shared),) * 2
        group = 0 if self.block is None else BLOCK
        return (
            expert_tile(rows, tiles, channels, hidden, size, True, processors, shared, group),
            expert_tile(rows, tiles, hidden, channels, size, False, processors, shared, group),
        )

    def candidates(self, rows: int, gated: bool) -> Iterator[ExpertTile]:
        return candidates(rows, self.weights.up.element_size(), gated)


class PackedLayer(Layer):
    """The same in MXFP4."""

    def draw(self) -> PackedExperts:
        up, up_exponents = self._packed(2 * self.moe.intermediate, self.hidden)
        down, down_exponents = self._packed(self.hidden, self.moe.intermediate)
        return PackedExperts(E2M1, up, down, up_exponents, down_exponents)

    def _packed(self, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random codes, with exponents for products of about 1."""
        shape = self.moe.experts, outputs, inputs // EACH
        words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=DEVICE)
        exponent = BIAS - 1 - inputs.bit_length() // 2
        packed = sum(exponent << (8 * at) for at in range(8))
        count = len(list(spans(inputs)))
        return words, torch.full((self.moe.experts, count, outputs), packed, dtype=torch.int64, device=DEVICE)

    @property
    def nbytes(self) -> int:
        return super().nbytes + int(self.weights.up_exponents[0].nbytes + self.weights.down_exponents[0].nbytes)

    def multiply(self, x: Activation, routing: Routing, tiles: tuple[ExpertTile, ExpertTile] | None = None) -> object:
        options = dict(between=self.fmt, dtype=torch.bfloat16)
        if tiles is None:
            return packed_gated_experts(x, routing, self.weights, SWIGLU, **options)
        return packed_experts_triton(x, routing, self.weights, SWIGLU, None, **options, chosen=tiles)

    def ruled(self, rows: int) -> tuple[ExpertTile, ExpertTile]:
        _, _, hopper, shared = device_facts(GPU)
        if hopper and not self.fp8 and specialized_packed(self.hidden, self.moe.intermediate):
            return (specialized_expert_tile(rows, 0.5, shared),) * 2
        return (packed_expert_tile(rows, 1 if self.fp8 else 2, shared),) * 2

    def candidates(self, rows: int, gated: bool) -> Iterator[ExpertTile]:
        for outputs, stages in product((64, 128), (2, 3, 4, 5, 6)):
            tile = ExpertTile(rows, outputs, 256, outputs // 16, stages)
            if packed_shared(tile, 1 if self.fp8 else 2) <= device_facts(GPU)[3]:
                yield tile


class StackedLayer(Layer):
    """The same in a format of STACKED."""

    def draw(self) -> StackedExperts:
        """Random codes and zeros, with scales for products of about 1."""
        experts, hidden, channels = self.moe.experts, self.hidden, self.moe.intermediate
        return StackedExperts(self._packed(experts, 2 * channels, hidden), self._packed(experts, hidden, channels))

    def _packed(self, experts: int, outputs: int, inputs: int) -> PackedWeight:
        fmt, group, scales = STACKED[self.dtype.removesuffix("_a8")]
        groups = experts, outputs, ceil_div(inputs, group)
        words = experts, outputs, words_of_row(inputs, fmt.stored_bits)
        codes = torch.randint(-(2**31), 2**31, words, dtype=torch.int32, device=DEVICE)
        size = fmt.reference(torch.arange(16, dtype=torch.uint8)).std().item() * inputs**0.5
        row_scale = torch.full(groups[:2], 1 / size, device=DEVICE) if group == 16 else None
        scale = torch.full(groups, 1.0 if group == 16 else 1 / size, device=DEVICE).to(scales)
        # As PackedLinear keeps them.
        scale = pack_scales(scale) if scales is torch.float8_e4m3fn else by_group(scale)
        zero = by_group(torch.randint(6, 10, groups, dtype=torch.uint8, device=DEVICE)) if fmt.zero else None
        return PackedWeight(fmt, inputs, group, codes, scale, zero, row_scale)

    @property
    def nbytes(self) -> int:
        sides = self.weights.up, self.weights.down
        tensors = (x for side in sides for x in (side.codes, side.scale, side.zero, side.row_scale) if x is not None)
        return sum(x[0].nbytes for x in tensors)

    def multiply(self, x: Activation, routing: Routing, tiles: tuple[ExpertTile, ExpertTile] | None = None) -> object:
        if tiles is None:
            options = dict(between=self.fmt, dtype=torch.bfloat16)
            return stacked_gated_experts(x, routing, self.weights, SWIGLU, **options)
        return stacked_experts_triton(x, routing, self.weights, SWIGLU, None, self.fmt, torch.bfloat16, tiles)

    def ruled(self, rows: int) -> tuple[ExpertTile, ExpertTile]:
        up, down = (self._of(side, rows) for side in (self.weights.up, self.weights.down))
        shared = device_facts(GPU)[3]
        return stacked_expert_tile(rows, *up, True, shared), stacked_expert_tile(rows, *down, False, shared)

    def _of(self, packed: PackedWeight, rows: int) -> tuple[int, int]:
        """Bits of a code, and bytes of a number of x as it is multiplied."""
        return packed.format.stored_bits, 1 if self.fp8 and in_e4m3(packed, rows) else 2

    def candidates(self, rows: int, gated: bool) -> Iterator[ExpertTile]:
        bits, itemsize = self._of(self.weights.up if gated else self.weights.down, rows)
        for outputs, warps, stages in product((32, 64, 128, 256), (2, 4, 8), (1, 2, 3, 4, 5, 6)):
            tile = ExpertTile(rows, outputs, 1024 // bits, warps, stages)
            sums = rows * outputs * (1 + gated) // (32 * warps)
            fits = stacked_shared(tile, bits, itemsize, gated) <= device_facts(GPU)[3]
            if outputs >= 16 * warps and sums <= 160 and fits:
                yield tile


def _each(call: Callable[[int], object]) -> float:
    return microseconds(lambda: [call(i) for i in range(CALLS)]) / CALLS


def candidates(rows: int, itemsize: int, gated: bool) -> Iterator[ExpertTile]:
    """Yield tiles that fit into the GPU's shared memory, and whose sums fit into registers."""
    _, _, _, shared = device_facts(GPU)
    for outputs, columns, warps, stages in product((32, 64, 128, 256), (64, 128, 256), (4, 8), (3, 4, 5)):
        tile = ExpertTile(rows, outputs, columns, warps, stages)
        sums = rows * outputs * (1 + gated) // (32 * warps)
        if sums <= 160 and tile.shared_bytes(itemsize, gated) <= shared:
            yield tile


def search(layer: Layer) -> None:
    """Print the fastest tiles, for several numbers of rows of a tile, with their time over the rule's."""
    base = layer.microseconds()
    pairs, experts = layer.rows * layer.moe.active, layer.moe.experts
    usual = specialized_rows(pairs, experts, layer.moe.intermediate)
    for rows in sorted({max(16, usual // 2), usual, min(128, 2 * usual)}):
        best = list(layer.ruled(rows))
        least = layer.microseconds((best[0], best[1]))
        for which in range(2):
            for tile in layer.candidates(rows, gated=which == 0):
                us = layer.microseconds((tile, best[1]) if which == 0 else (best[0], tile))
                if us < least:
                    least, best[which] = us, tile
        print(f"    rows of a tile {rows}: {least:.1f} us, {least / base:.3f} of the rule's", flush=True)
        for tile in best:
            print(f"        {tile}", flush=True)


def measure(model: str, dtype: str, rows: int, args: argparse.Namespace) -> None:
    spec = compose([f"model={model}"]).part("model").facts()
    kind = PackedLayer if dtype.startswith("mxfp4") else Layer
    kind = StackedLayer if dtype.removesuffix("_a8") in STACKED else kind
    layer = kind(spec.moe, spec.hidden, dtype, rows)
    routing = _each(lambda i: layer.route(layer.plain[i]))
    limit = layer.limit(args.bandwidth, args.tflops or (900 if layer.fp8 or layer.int8 else 600))
    us = layer.microseconds()
    name = f"{model:16s}{dtype:>9}{rows:>6}"
    print(
        f"{name}{layer.touched:>9.1f}{limit:>9.1f}{routing:>8.1f}{us:>10.1f}{us / limit:>10.2f}",
        flush=True,
    )
    if args.search:
        search(layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3_30b_a3b,mixtral_8x7b,glm45_air")
    parser.add_argument("--dtypes", default="bf16,fp8")
    parser.add_argument("--rows", default="1,16,64,256,8192")
    parser.add_argument("--bandwidth", type=float, default=4.44, help="TB/s")
    parser.add_argument("--tflops", type=float, default=0, help="0 = 600 in bf16, 900 in 8 bits")
    parser.add_argument("--search", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU: there is none")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}; uniform routing, {CALLS} routings")
    print(f"{'':25s}{'rows':>6}{'experts':>9}{'limit':>9}{'route':>8}{'products':>10}{'of limit':>10}")
    for model, dtype, rows in product(args.models.split(","), args.dtypes.split(","), map(int, args.rows.split(","))):
        measure(model, dtype, rows, args)


if __name__ == "__main__":
    main()
