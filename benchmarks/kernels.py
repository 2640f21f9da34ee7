"""Small kernels on a GPU, each against its limit or its alternatives, in microseconds.

    python benchmarks/kernels.py rows [--shapes 8b,70b] [--rows 1,64,256,8192]
    python benchmarks/kernels.py lora [--layers 4] [--ranks 16,64] [--slots 8]
    python benchmarks/kernels.py sampling [--rows 1,24,64,256] [--vocab 128256] [--spread 0.3,3]

rows: kernels in which a program takes one row of an activation. `norm` adds the residual and writes E4M3 by token,
alone or with the scales of a matmul that left them to it; `silu` is silu(gate) * up, in E4M3 as well; `encode` follows
attention backends that do not encode. The limit is what each reads and writes once, at --bandwidth; below about 50 MB
the cache may be faster.

lora: what LoRA adapters add to the four matmuls of a Llama 3 8B layer, with every row on one adapter and with rows
spread over all slots. Results are first compared with torch. Each layer of a graph has its own weights.

sampling: drawing tokens from logits as a captured step does: greedy, random, and random with filters. `one row` is a
batch in which one row has filters. --spread is the standard deviation of the logits: with 0.3 top-p keeps most of the
vocabulary, with 3 a small part of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product

import torch
from timing import microseconds

from dovetail.core.ops import encode, matmul, rms_norm, silu_and_mul
from dovetail.core.worker.sampler import SampleParams, sample
from dovetail.plugins.adapter.lora.kernel import lora_triton, output_blocks
from dovetail.plugins.adapter.lora.reference import lora_reference
from dovetail.plugins.quant.fp8.format import FP8_TOKEN

CALLS = 32
"""Calls of a kernel in a graph, so that its launch does not count."""


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


# rows

SHAPES = {"8b": (4096, 14336), "70b": (8192, 28672), "405b": (16384, 53248)}
"""Hidden and intermediate channels of a model on one rank; "70b/8" is a rank of eight."""
EMIT = (FP8_TOKEN,)


def row_kernels(shape: str, rows: int) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """(name, bytes it must move, call)."""
    name, _, ranks = shape.partition("/")
    hidden, wide = SHAPES[name]
    wide //= int(ranks or 1)
    x, residual, weight = random(rows, hidden), random(rows, hidden), random(hidden)
    yield "norm", rows * hidden * (3 * 2 + 1), lambda: rms_norm(x, residual, weight, 1e-5, EMIT)
    yield "encode", rows * hidden * (2 + 1), lambda: encode(x, EMIT)
    gate_up = random(rows, 2 * wide)
    yield "silu", rows * wide * (2 * 2 + 1), lambda: silu_and_mul(gate_up, EMIT)
    scale = random(rows, 1).float().abs(), random(hidden).float().abs()
    yield "norm, scaled", rows * hidden * (3 * 2 + 1), lambda: rms_norm(x, residual, weight, 1e-5, EMIT, scale)


def time_rows(args: argparse.Namespace) -> None:
    print(f"{'':24s}{'limit':>9}{'us':>10}")
    for shape in args.shapes.split(","):
        for rows in map(int, args.rows.split(",")):
            for name, moved, call in row_kernels(shape, rows):
                us = microseconds(call, CALLS)
                print(f"{shape:6s}{rows:5d} {name:12s}{moved / args.bandwidth / 1e6:>9.1f}{us:>10.1f}", flush=True)


# lora

MATMULS = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
"""(inputs, outputs of each part): qkv, o, gate and up, down."""


class Adapted:
    """A linear layer with LoRA adapters."""

    def __init__(self, inputs: int, parts: tuple[int, ...], rank: int, slots: int) -> None:
        self.inputs, self.parts = inputs, parts
        self.weight_OI = random(sum(parts), inputs) / inputs**0.5
        self.a_SPRI = random(slots, len(parts), rank, inputs) / inputs**0.5
        self.b_SOR = random(slots, sum(parts), rank) / rank**0.5
        self.blocks = output_blocks(parts, torch.device("cuda"))

    def run(self, x_TI: torch.Tensor, slots_T: torch.Tensor | None) -> torch.Tensor:
        y_TO = matmul(x_TI, self.weight_OI)
        if slots_T is not None:
            lora_triton(x_TI, y_TO, self.a_SPRI, self.b_SOR, slots_T, self.blocks)
        return y_TO

    def check(self, slots_T: torch.Tensor) -> None:
        x_TI = random(len(slots_T), self.inputs)
        expected = self.run(x_TI, None)
        lora_reference(x_TI, expected, self.a_SPRI, self.b_SOR, slots_T, self.parts)
        error = (self.run(x_TI, slots_T) - expected).norm() / expected.norm()
        assert error < 1e-2, f"{len(slots_T)} rows, outputs {self.parts}: off by {error:.1e}"


def time_lora(args: argparse.Namespace) -> None:
    print(f"{args.slots} slots; microseconds a layer")
    print(f"{'rank':>5}{'rows':>6}{'matmuls':>10}{'+ one adapter':>15}{'+ all slots':>13}")
    for rank in map(int, args.ranks.split(",")):
        layers = [Adapted(*shape, rank, args.slots) for _ in range(args.layers) for shape in MATMULS]
        for rows in map(int, args.rows.split(",")):
            one_T = torch.zeros(rows, dtype=torch.int32, device="cuda")
            all_T = torch.arange(rows, dtype=torch.int32, device="cuda") % args.slots
            for layer in layers[: len(MATMULS)]:
                layer.check(all_T - 1)
            inputs = {layer.inputs: random(rows, layer.inputs) for layer in layers}

            def run(slots_T: torch.Tensor | None) -> None:
                for layer in layers:  # noqa: B023
                    layer.run(inputs[layer.inputs], slots_T)  # noqa: B023

            plain, one, every = (microseconds(lambda: run(slots)) / args.layers for slots in (None, one_T, all_T))  # noqa: B023
            print(f"{rank:>5}{rows:>6}{plain:>10.1f}{one - plain:>15.1f}{every - plain:>13.1f}")


# sampling

WAYS = {
    "greedy": {},
    "random": {},
    "top-p": {"top_p": 0.95},
    "top-k": {"top_k": 50},
    "both": {"top_p": 0.8, "top_k": 20},
    "large k": {"top_k": 5000},
    "min-p": {"min_p": 0.05},
    "one row": {"top_p": 0.95},
}


def sample_params(way: str, rows: int) -> SampleParams:
    options = WAYS[way]

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    top_p_N = full(options.get("top_p", 1.0))
    if way == "one row":
        top_p_N[1:] = 1
    return SampleParams(
        full(0.0 if way == "greedy" else 0.8),
        full(options.get("top_k", 0), torch.int64),
        top_p_N,
        full(options.get("min_p", 0.0)),
        torch.arange(rows, device="cuda"),
        random=way != "greedy",
        filtered=bool(options),
    )


def time_sampling(args: argparse.Namespace) -> None:
    for vocab, spread in product(map(int, args.vocab.split(",")), map(float, args.spread.split(","))):
        print(f"vocabulary {vocab}, spread {spread}")
        print(f"{'us':>6}" + "".join(f"{way:>10}" for way in WAYS))
        for rows in map(int, args.rows.split(",")):
            logits_NV = random(rows, vocab).mul_(spread)
            position_N = torch.arange(rows, device="cuda")
            several = [sample_params(way, rows) for way in WAYS]
            times = [microseconds(lambda: sample(logits_NV, position_N, params), CALLS) for params in several]  # noqa: B023
            print(f"{rows:>6}" + "".join(f"{us:>10.1f}" for us in times))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="rows | lora | sampling")
    rows, lora, sampling = (commands.add_parser(name) for name in ("rows", "lora", "sampling"))
    rows.set_defaults(time=time_rows)
    rows.add_argument("--shapes", default="8b,70b", help=f"of {', '.join(SHAPES)}; 70b/8 is a rank of eight")
    rows.add_argument("--rows", default="1,64,256,8192")
    rows.add_argument("--bandwidth", type=float, default=4.44, help="read bandwidth of the memory, TB/s")
    lora.set_defaults(time=time_lora)
    lora.add_argument("--layers", type=int, default=4)
    lora.add_argument("--ranks", default="16,64", help="of the adapters")
    lora.add_argument("--slots", type=int, default=8, help="adapters loaded at once")
    lora.add_argument("--rows", default="1,16,64,256,2048")
    sampling.set_defaults(time=time_sampling)
    sampling.add_argument("--rows", default="1,24,64,256")
    sampling.add_argument("--vocab", default="128256")
    sampling.add_argument("--spread", default="0.3,3")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU: there is none")
    print(torch.cuda.get_device_name())
    args.time(args)


if __name__ == "__main__":
    main()
