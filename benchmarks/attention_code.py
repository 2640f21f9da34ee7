"""What the compiler makes of the decode tiles that `attention.py --tune` tries, for an H200 and without a GPU.

    python benchmarks/attention_code.py [--heads 32] [--kv-heads 8] [--head-dim 128] [--page 64]

For each tile: registers of a thread, bytes of shared memory, programs that one multiprocessor holds at a time; and of
the loop over keys, for each KiB of K and V, the instructions that all its warps issue and how often they wait for each
other. A multiprocessor issues at most 4 instructions a cycle, and at 4.4 TB/s it gets a KiB in about 55. Not a measure
of time: a tile with fewer of both may still wait for memory more.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from attention import DECODE, DTYPES, Fixed, Heads, describe

from dovetail.core.interfaces import AttentionLayer, BatchMeta, HostBounds, KVGroup, Plane, Rope
from dovetail.core.memory.pools import make_pools
from dovetail.core.testing.compiling import compiled_for_hopper
from dovetail.plugins.attention.config import TritonConfig
from dovetail.plugins.attention.triton.backend import Triton
from dovetail.plugins.attention.triton.tiles import DecodeTile, Shape, Tile, fit

ROWS, LENGTH = 256, 1024
REGISTERS, SHARED_BYTES, THREADS = 65536, 227 * 1024, 2048
"""Of a Hopper multiprocessor."""
RESERVED_BYTES = 1024
"""Shared memory that the system takes for each program."""
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True, slots=True)
class Code:
    """Machine code of one kernel."""

    registers: int
    shared: int
    warps: int
    loop: tuple[str, ...]
    """Instructions of its longest loop."""

    @property
    def programs(self) -> int:
        threads = 32 * self.warps
        rounded = -(-self.registers // 8) * 8
        return min(REGISTERS // (rounded * threads), SHARED_BYTES // (self.shared + RESERVED_BYTES), THREADS // threads)

    def barriers(self) -> int:
        return sum(instruction.startswith("BAR.SYNC") for instruction in self.loop)


def read(kernel: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, listing = (
            subprocess.run([TOOLS / tool, *options, file.name], capture_output=True, text=True, check=True).stdout
            for tool, *options in (("cuobjdump", "-res-usage"), ("nvdisasm",))
        )
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    meta = kernel.metadata
    return Code(registers, meta.shared, meta.num_warps, max(loops(listing), key=len, default=()))


def loops(listing: str) -> Iterator[tuple[str, ...]]:
    """Instructions between a label and each branch back to it."""
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in listing.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            code.append(instruction[1])
            target = re.match(r"BRA.*`\(\.(L_x_\d+)\)", instruction[1])
            if target and target[1] in labels:
                yield tuple(code[labels[target[1]] :])


def compile_tile(tile: Tile, heads: Heads, kv: str, page: int) -> Code:
    """A decode step that turns and writes its keys, too."""
    with compiled_for_hopper() as compiled:

        def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="cuda")

        meta = BatchMeta(
            row_start_B1=cuda(ROWS + 1, dtype=torch.int32),
            kv_len_B=cuda(ROWS, dtype=torch.int32),
            slots_B=cuda(ROWS, dtype=torch.int64),
            positions_T=cuda(ROWS, dtype=torch.int64),
            rows_T=cuda(ROWS, dtype=torch.int64),
            page_table_BP=cuda(ROWS, LENGTH // page, dtype=torch.int32),
            write_T=cuda(ROWS, dtype=torch.int64),
            page_tokens=page,
        )
        backend = Triton(TritonConfig())
        backend.tiles = Fixed(tile)
        planes = tuple(Plane(name, (heads.kv, heads.dim), DTYPES[kv]) for name in "kv")
        backend.bind(make_pools([KVGroup(0, (0,), planes, page_tokens=page)], {0: 9}, torch.device("cuda")))
        layer = AttentionLayer(0, 0, 0, heads.query, heads.kv, heads.dim, heads.dim**-0.5, 0, 1.0, 1.0)
        host = HostBounds((1,) * ROWS, (LENGTH,) * ROWS, ROWS)
        ctx = backend.plan_device(meta, host, backend.plan_host(host))
        qkv = cuda(ROWS, (heads.query + 2 * heads.kv) * heads.dim)
        backend.write_and_attend(layer, ctx, qkv, Rope(cuda(LENGTH, heads.dim, dtype=torch.float32)))
    return read(next(kernel for name, kernel in compiled.kernels if name.endswith((":attend_items", ":attend_decode"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page", type=int, default=64)
    args = parser.parse_args()
    heads = Heads(args.heads, args.kv_heads, args.head_dim)
    for kv in ("bf16", "e4m3"):
        print(f"\n{kv:39s}registers  shared  programs  instructions/KiB  barriers/KiB")
        shape = Shape(heads.query // heads.kv, heads.dim, torch.bfloat16, DTYPES[kv], args.page)
        fitting = (tile if isinstance(tile, DecodeTile) else fit(tile, shape) for tile in DECODE)
        for tile in dict.fromkeys(fitting):
            code = compile_tile(tile, heads, kv, args.page)
            kib = 2 * tile.span * heads.dim * DTYPES[kv].itemsize / 1024
            print(
                f"{describe(tile):39s}{code.registers:9d}{code.shared:8d}{code.programs:10d}"
                f"{len(code.loop) * code.warps / kib:18.0f}{code.barriers() / kib:14.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
