"""All-reduce on the GPUs of one host: each algorithm of collective=symm_mem and NCCL is checked, then timed in graphs.

    python benchmarks/allreduce.py                       # all GPUs
    python benchmarks/allreduce.py --ranks 2 --columns 8192 --out benchmarks/results/allreduce_x2.json
    python benchmarks/allreduce.py --emulate 8           # eight ranks on two GPUs (emulated_ranks.py): times only

`sum` is compared with a sum in float32. `boundary` is what a layer pays: sum, residual, RMSNorm, E4M3 by token;
`sharded` and `nccl_sharded` leave the residual there distributed over the ranks by rows. `argmax` is how ranks agree on
a token. --out is written after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated_ranks
import torch

from dovetail.core.interfaces import Collective, Partial
from dovetail.core.interfaces.rows import RowShard
from dovetail.core.ops import rms_norm
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.sharded import own_rows, sharded_boundary
from dovetail.plugins.collective.symm_mem.collective import COLUMNS, SymmMemCollective
from dovetail.plugins.collective.symm_mem.size_table import measure
from dovetail.plugins.quant.fp8.format import FP8_TOKEN

ROWS = (1, 4, 16, 64, 128, 256, 512, 2048, 8192)
MOST_ARGMAX = 256
KINDS = {
    "sum": ("nccl", "one_shot", "two_shot"),
    "boundary": ("nccl", "one_shot", "two_shot", "nccl_sharded", "sharded"),
    "argmax": ("nccl", "one_shot"),
}
EPS = 1e-5
Case = tuple[int, str, str, int]
"""(columns, kind, algorithm, rows)."""


def cases(columns: list[int]) -> list[Case]:
    return [
        (c, kind, name, rows)
        for c in columns
        for kind, names in KINDS.items()
        for name in names
        for rows in ROWS
        if kind != "argmax" or (c == columns[0] and rows <= MOST_ARGMAX)
    ]


def emulated_cases(ranks: int) -> list[Case]:
    """Cases that two processes can emulate: without NCCL, and by rows only where each rank has equally many."""
    return [
        (c, kind, name, rows)
        for c, kind, name, rows in cases([COLUMNS])
        if kind != "argmax" and "nccl" not in name and (name != "sharded" or rows % ranks == 0)
    ]


class Reduction:
    """One sum, or one boundary of a layer, by one algorithm."""

    def __init__(self, collective: SymmMemCollective, columns: int, kind: str, name: str, rows: int) -> None:
        self.collective, self.kind, self.name, self.rows = collective, kind, name, rows
        device = collective._device
        generator = torch.Generator(device).manual_seed(1000 * rows + collective.rank)
        self.x_TC = torch.randn(rows, columns, device=device, generator=generator).bfloat16()
        self.x_TC.masked_fill_(torch.rand(self.x_TC.shape, device=device, generator=generator) < 0.1, -0.0)
        common = torch.Generator(device).manual_seed(rows)
        self.residual_TC = torch.randn(rows, columns, device=device, generator=common).bfloat16()
        self.weight_C = torch.randn(columns, device=device, generator=common).bfloat16()
        self.own = RowShard(own_rows(collective, self.residual_TC), rows)

    def norm(self, x: torch.Tensor, residual: torch.Tensor | None, emit: Any) -> tuple[Any, torch.Tensor]:
        return rms_norm(x, residual, self.weight_C, EPS, emit)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.name == "nccl":
            return NcclCollective.all_reduce(self.collective, x)
        return self.collective.reducer.reduce(x, self.name)

    def boundary(self) -> tuple[Any, Any]:
        reducer, emit = self.collective.reducer, (FP8_TOKEN,)
        if self.name == "sharded":
            bundle, after = reducer.sharded_boundary(self.x_TC, self.own.values, self.weight_C, EPS, emit)
            return bundle, RowShard(after, self.rows)
        if self.name == "nccl_sharded":
            return sharded_boundary(self.collective, Partial(self.x_TC), self.own, self.norm, emit)
        if self.name == "nccl":
            return self.norm(self.sum(self.x_TC), self.residual_TC, emit)
        return reducer.boundary(self.x_TC, self.residual_TC, self.weight_C, EPS, emit, self.name)

    def check(self, times: int) -> None:
        """Compare the result with sums in float32, and its bits with those of the other ranks."""
        kept = self.x_TC.clone()
        exact_TC = NcclCollective.all_reduce(self.collective, kept.float())
        for _ in range(times):
            self.x_TC.copy_(kept)  # NCCL sums in place
            if self.kind == "sum":
                self.compare(self.sum(self.x_TC), exact_TC, 0.01, "the sum")
                continue
            bundle, after = self.boundary()
            expected, summed = rms_norm(exact_TC.bfloat16(), self.residual_TC, self.weight_C, EPS, (FP8_TOKEN,))
            self.compare(self.collective.whole(after), summed, 0.01, "x + residual")
            values, wanted = bundle[FP8_TOKEN], expected[FP8_TOKEN]
            decoded = values.values.float() * values.scale
            self.compare(decoded, wanted.values.float() * wanted.scale, 0.02, "the encoded norm")
        self.x_TC.copy_(kept)

    def compare(self, found: torch.Tensor, exact: torch.Tensor, most: float, what: str) -> None:
        error = ((found.float() - exact.float()).norm() / exact.float().norm()).item()
        if not error <= most:
            raise ValueError(f"{self.name}, {self.rows} rows: {what} is off by {error:.2%}, more than {most:.2%}")
        bits = found.contiguous().view(torch.uint8).view(-1, 2).long()
        weights = torch.arange(1, len(bits) + 1, device=bits.device)
        mark = ((bits[:, 0] * 256 + bits[:, 1]) * weights).sum()[None]
        marks = NcclCollective.all_gather(self.collective, mark)
        if not bool((marks == marks[0]).all()):
            raise ValueError(f"{self.name}, {self.rows} rows: {what} has other bits on other ranks: {marks.tolist()}")

    def time(self, check: bool) -> float:
        """Seconds of one call. `check`: False for emulated ranks, whose numbers mean nothing."""
        if check:
            self.check(5)
        call: Callable[[], object] = self.boundary
        if self.kind == "sum":
            zeros = torch.zeros_like(self.x_TC)
            call = lambda: self.sum(zeros)  # noqa: E731
        kept = self.x_TC.clone()
        if self.name == "nccl":
            self.x_TC.zero_()  # NCCL sums in place: anything else would grow
        seconds = measure(call)
        self.x_TC.copy_(kept)
        if check:
            self.check(1)
        return seconds


def time_argmax(collective: SymmMemCollective, name: str, rows: int) -> float:
    device, rank = collective._device, collective.rank
    generator = torch.Generator(device).manual_seed(1000 * rows + rank)
    # Few different values, so that many are equal.
    value_N = torch.randint(0, 5, (rows,), device=device, generator=generator).float()
    index_N = torch.arange(rows, device=device) + rank * 16032

    def call() -> torch.Tensor:
        if name == "nccl":
            return Collective.argmax(collective, value_N, index_N)
        return collective.reducer.argmax(value_N, index_N)

    def check() -> None:
        values = NcclCollective.all_gather(collective, value_N[:, None])
        indices = NcclCollective.all_gather(collective, index_N[:, None])
        wins = values == values.amax(-1, keepdim=True)
        if not torch.equal(call(), torch.where(wins, indices, 2**31).amin(-1)):
            raise ValueError(f"{name}, {rows} rows: not the index of the largest value")

    for _ in range(5):
        check()
    seconds = measure(call)
    check()
    return seconds


def run_rank(rank: int, address: str, args: argparse.Namespace) -> None:
    began = time.perf_counter()
    ranks = args.emulate or args.ranks
    collective = emulated_ranks.connect(rank, ranks, address, emulated=bool(args.emulate), algorithm="sharded")
    collective.barrier()
    with torch.inference_mode():
        time_cases(collective, args, round(time.perf_counter() - began, 2))
    if args.emulate:
        # Emulated ranks are fewer than the collective expects, and would not end together.
        sys.stdout.flush()
        os._exit(0)
    collective.barrier()
    collective.close()


def time_cases(collective: SymmMemCollective, args: argparse.Namespace, connected: float) -> None:
    """Time all cases. The first rank prints and writes the results."""
    rank = collective.rank
    record: dict[str, Any] = {
        "ranks": collective.size,
        "gpus": args.ranks,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "connected": connected,
        "cases": [],
    }
    for columns, kind, name, rows in emulated_cases(args.emulate) if args.emulate else cases(args.columns):
        found: dict[str, Any] = {"columns": columns, "kind": kind, "algorithm": name, "rows": rows}
        if kind == "argmax":
            found["us"] = round(1e6 * time_argmax(collective, name, rows), 2)
        elif name != "one_shot" or rows <= collective.reducer.mail.boxes:
            found["us"] = round(1e6 * Reduction(collective, columns, kind, name, rows).time(not args.emulate), 2)
        record["cases"].append(found)
        if rank == 0 and args.out is not None:
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    began = time.perf_counter()
    sums, edges, sharded = collective.autotune(shards=True)
    tables = {"sum": str(sums), "boundary": str(edges)}
    tables |= {f"boundary, {8 if narrow else 16} bits": str(table) for narrow, table in sharded.items()}
    record |= {"tables": tables, "seconds": round(time.perf_counter() - began, 2)}
    if rank == 0:
        emulation = f"{args.emulate} ranks emulated by " if args.emulate else ""
        print(f"{emulation}{args.ranks} x {record['gpu']}, connected in {record['connected']} s\n")
        print("\n\n".join(tables_of(record["cases"])))
        print(f"\nalgorithms that start-up would choose, measured in {record['seconds']} s: {tables}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(record, indent=1) + "\n")


def tables_of(found: list[dict[str, Any]]) -> Iterator[str]:
    for columns, kind in dict.fromkeys((case["columns"], case["kind"]) for case in found):
        mine = [case for case in found if (case["columns"], case["kind"]) == (columns, kind)]
        us = {(case["algorithm"], case["rows"]): case["us"] for case in mine if "us" in case}
        lines = [f"{kind}, {columns} columns, us".ljust(26) + "".join(f"{rows:>9}" for rows in ROWS)]
        for name in dict.fromkeys(name for name, _ in us):
            cells = (f"{us[name, rows]:>9.1f}" if (name, rows) in us else f"{'-':>9}" for rows in ROWS)
            lines.append(f"{name:<26}" + "".join(cells))
        yield "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="GPUs; all by default")
    parser.add_argument("--columns", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--emulate", type=int, default=0, metavar="RANKS", help="4, 8 or 16 ranks on two GPUs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", nargs=2, metavar=("INDEX", "ADDRESS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.emulate:
        args.ranks, args.columns = emulated_ranks.GPUS, [COLUMNS]
        if args.emulate not in (4, 8, 16):
            parser.error(f"--emulate {args.emulate}: two GPUs emulate 4, 8 or 16 ranks")
    args.ranks = args.ranks or torch.cuda.device_count()
    if args.rank:
        run_rank(int(args.rank[0]), args.rank[1], args)
        return
    if not 2 <= args.ranks <= torch.cuda.device_count():
        raise SystemExit(f"needs 2 GPUs or more: asked for {args.ranks} of {torch.cuda.device_count()}")
    emulated_ranks.launch_ranks(args.ranks)


if __name__ == "__main__":
    main()
