"""Small kernels on a GPU, each against its limit or its alternatives, in microseconds.

    python benchmarks/kernels.py rows [--shapes 8b,70b] [--rows 1,64,256,8192]
    python benchmarks/kernels.py lora [--layers 4] [--ranks 16,64] [--slots 8]
    python benchmarks/kernels.py sampling [--rows 1,24,64,256] [--vocab 128256] [--spread 0.3,3] [--ways greedy,top-p]

rows: kernels in which a program takes one row of an activation. `norm` adds the residual and writes E4M3 by token,
alone or with the scales of a matmul that left them to it; `silu` is silu(gate) * up, in E4M3 as well; `encode` follows
attention backends that do not encode. The limit is what each reads and writes once, at --bandwidth; below about 50 MB
the cache may be faster.

lora: what LoRA adapters add to the four matmuls of a Llama 3 8B layer, with every row on one adapter and with rows
spread over all slots. Results are first compared with torch. Each layer of a graph has its own weights.

sampling: what a captured step does with the logits, for several settings (WAYS), less the time of greedy rows. In `one
...` a single row has these settings and all others draw at random. --spread is the standard deviation of the logits:
with 0.3 top-p keeps most of the vocabulary, with 3 a small part of it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import torch
from timing import microseconds

from dovetail import SamplingParams
from dovetail.core.interfaces import AttentionBackend, Join, JoinBlob, Model, Request, StepPlan
from dovetail.core.ops import encode, matmul, rms_norm, silu_and_mul
from dovetail.core.worker.device_state import DeviceState
from dovetail.core.worker.drafts import Drafts
from dovetail.core.worker.graph_sizes import DrawSize
from dovetail.core.worker.graphs import StepGraphs
from dovetail.core.worker.slots import Draw, Slots
from dovetail.plugins.adapter.lora.kernel import lora_triton, output_blocks
from dovetail.plugins.adapter.lora.reference import lora_reference
from dovetail.plugins.logits.config import LogitBiasConfig, MinTokensConfig, PenaltiesConfig
from dovetail.plugins.logits.logit_bias import LogitBias
from dovetail.plugins.logits.min_tokens import MinTokens
from dovetail.plugins.logits.penalties import Penalties
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.spec_decode.config import NoneConfig
from dovetail.plugins.spec_decode.none import NoDrafter

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

Fields = dict[str, Any]
"""Fields of SamplingParams."""
GREEDY: Fields = {"temperature": 0.0}
RANDOM: Fields = {"temperature": 0.8}
BIAS: Fields = {"logit_bias": {str(token): 1.0 for token in range(100, 200)}}
WAYS: dict[str, list[Fields]] = {
    "greedy": [GREEDY],
    "random": [RANDOM],
    "top-p": [RANDOM | {"top_p": 0.95}],
    "top-p .7": [RANDOM | {"top_p": 0.7}],
    "top-k": [RANDOM | {"top_k": 50}],
    "both": [RANDOM | {"top_p": 0.8, "top_k": 20}],
    "min-p": [RANDOM | {"min_p": 0.05}],
    "penalty": [GREEDY | {"repetition_penalty": 1.1}],
    "both+pen": [RANDOM | {"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}],
    "5 lp": [GREEDY | {"logprobs": 5}],
    "20 lp+bias": [GREEDY | {"logprobs": 20} | BIAS],
    "all": [RANDOM | {"top_p": 0.9, "top_k": 200, "min_p": 0.01, "presence_penalty": 0.5, "logprobs": 5} | BIAS],
    "one top-p": [RANDOM | {"top_p": 0.95}, RANDOM],
    "one of all": [RANDOM | {"top_p": 0.9, "top_k": 200, "presence_penalty": 0.5, "logprobs": 5} | BIAS, RANDOM],
}
"""Parameters of the first rows; the last entry serves all further rows."""
HISTORY = 500
"""Tokens that precede each row."""


def captured_draw(logits_NV: torch.Tensor, fields: list[Fields]) -> Callable[[], object]:
    """Return the launches of the captured draw that serves rows of these parameters."""
    (rows, vocab), device = logits_NV.shape, logits_NV.device
    processors = {"penalties": Penalties(PenaltiesConfig()), "logit_bias": LogitBias(LogitBiasConfig())}
    processors["min_tokens"] = MinTokens(MinTokensConfig())
    for processor in processors.values():
        processor.allocate(rows + 1, vocab, device)
    slots = Slots()
    state = DeviceState(slots=rows, max_len=2 * HISTORY, lookahead=0, groups=(), device=device, seed=0)
    plan, infos = StepPlan(step=0, rows=[]), []
    for slot in range(rows):
        params = SamplingParams(**fields[min(slot, len(fields) - 1)])
        prompt = tuple(torch.randint(vocab, (HISTORY,)).tolist())
        request = Request(slot, prompt, params, eos_ids=(2,))
        used = tuple(name for name, processor in processors.items() if processor.wants(request))
        request = dataclasses.replace(request, processors=used)
        plan.joins.append(Join(slot, slot, 0, HISTORY - 1))
        infos.append(slots.join(slot, JoinBlob(prompt, request, 0)))
        for name in used:
            processors[name].join(slot, request)
    state.apply(plan, infos)
    model = SimpleNamespace(
        build=SimpleNamespace(spec=SimpleNamespace(hidden=8, vocab=vocab), dtype=logits_NV.dtype),
        logits=lambda states_NC: logits_NV,
        local_logits=lambda states_NC: (logits_NV, 0),
    )
    attention = cast("AttentionBackend", None)
    graphs = StepGraphs(
        cast("Model", model),
        state,
        (),
        attention,
        Drafts(NoDrafter(NoneConfig()), state, attention, vocab),
        most_rows=rows,
        most_tokens=0,
        max_len=2 * HISTORY,
        processors=list(processors.values()),
    )
    at = graphs.inputs[1]
    for slots_N in (at.slots_N, at.slots_R):
        slots_N.copy_(torch.arange(rows))
    for length_N in (at.position_N, at.base_R):
        length_N.fill_(HISTORY)
    draw = slots.draw(range(rows))
    return lambda: graphs.launch_draw(DrawSize(1, rows), cast("Draw", draw))


def time_sampling(args: argparse.Namespace) -> None:
    some = args.ways.split(",") if args.ways else list(WAYS)
    for vocab, spread in product(map(int, args.vocab.split(",")), map(float, args.spread.split(","))):
        print(f"vocabulary {vocab}, spread {spread}; us, the others in addition to greedy")
        print(f"{'':>5}" + "".join(f"{way:>11}" for way in some))
        for rows in map(int, args.rows.split(",")):
            logits_NV = random(rows, vocab).mul_(spread)
            times = {way: microseconds(captured_draw(logits_NV, WAYS[way]), 4) for way in some}
            base = times.get("greedy", 0.0)
            print(f"{rows:>5}" + "".join(f"{us - base * (way != 'greedy'):>11.1f}" for way, us in times.items()))


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
    sampling.add_argument("--ways", default="", help=f"of {', '.join(WAYS)}; all by default")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU: there is none")
    print(torch.cuda.get_device_name())
    args.time(args)


if __name__ == "__main__":
    main()
