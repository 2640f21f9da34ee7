"""What LoRA adapters add to the products of a decoder layer, on a GPU: checked against torch first, then timed.

python benchmarks/lora.py [--layers 4] [--ranks 16,64] [--slots 8]

Shapes are Llama 3 8B's. Times are medians over replays of a CUDA graph of several layers, each with weights of its own,
so that nothing is found in the L2 cache: the four products of a layer without adapters, and what adapters add to them
in microseconds, with every row on one adapter and with rows spread over all slots.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from dovetail.core.ops import matmul
from dovetail.plugins.adapter.lora.kernel import lora_triton, output_blocks
from dovetail.plugins.adapter.lora.reference import lora_reference

GPU, DTYPE = torch.device("cuda"), torch.bfloat16
PRODUCTS = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
"""(inputs, outputs of each part): qkv, o, gate and up, down."""
ROWS = (1, 16, 64, 256, 2048)


class Product:
    def __init__(self, inputs: int, parts: tuple[int, ...], rank: int, slots: int) -> None:
        self.inputs, self.parts = inputs, parts
        self.weight_OI = torch.randn(sum(parts), inputs, device=GPU, dtype=DTYPE) / inputs**0.5
        self.a_SPRI = torch.randn(slots, len(parts), rank, inputs, device=GPU, dtype=DTYPE) / inputs**0.5
        self.b_SOR = torch.randn(slots, sum(parts), rank, device=GPU, dtype=DTYPE) / rank**0.5
        self.blocks = output_blocks(parts, GPU)

    def plain(self, x_TI: torch.Tensor) -> torch.Tensor:
        return matmul(x_TI, self.weight_OI)

    def adapted(self, x_TI: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        y_TO = self.plain(x_TI)
        lora_triton(x_TI, y_TO, self.a_SPRI, self.b_SOR, slots_T, self.blocks)
        return y_TO

    def check(self, slots_T: torch.Tensor) -> None:
        x_TI = torch.randn(len(slots_T), self.inputs, device=GPU, dtype=DTYPE)
        expected = self.plain(x_TI)
        lora_reference(x_TI, expected, self.a_SPRI, self.b_SOR, slots_T, self.parts)
        error = (self.adapted(x_TI, slots_T) - expected).norm() / expected.norm()
        assert error < 1e-2, f"{len(slots_T)} rows, outputs {self.parts}: off by {error:.1e}"


def microseconds(call: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--slots", type=int, default=8)
    given = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {given.slots} slots; microseconds a layer")
    print(f"{'rank':>5}{'rows':>6}{'products':>10}{'+ one adapter':>15}{'+ all slots':>13}")
    for rank in map(int, given.ranks.split(",")):
        layers = [Product(*shape, rank, given.slots) for _ in range(given.layers) for shape in PRODUCTS]
        for rows in ROWS:
            one_T = torch.zeros(rows, dtype=torch.int32, device=GPU)
            all_T = torch.arange(rows, dtype=torch.int32, device=GPU) % given.slots
            for product in layers[: len(PRODUCTS)]:
                product.check(all_T - 1)
            inputs = {product.inputs: torch.randn(rows, product.inputs, device=GPU, dtype=DTYPE) for product in layers}

            def run(slots_T: torch.Tensor | None) -> None:
                for product in layers:  # noqa: B023
                    x_TI = inputs[product.inputs]  # noqa: B023
                    product.plain(x_TI) if slots_T is None else product.adapted(x_TI, slots_T)

            plain, one, every = (microseconds(lambda: run(slots)) / given.layers for slots in (None, one_T, all_T))  # noqa: B023
            print(f"{rank:>5}{rows:>6}{plain:>10.1f}{one - plain:>15.1f}{every - plain:>13.1f}")


if __name__ == "__main__":
    main()
