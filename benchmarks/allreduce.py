"""All-reduce on the GPUs of one host: each algorithm of collective=symm_mem beside NCCL, in CUDA graphs, first checked
against a sum in float32, then timed. `boundary` is what a layer pays: sum, residual, RMSNorm, E4M3 by token; `sharded`
and `nccl_sharded` leave the residual with the ranks by rows there. `argmax` is how ranks agree on a token.

    python benchmarks/allreduce.py                       # all GPUs
    python benchmarks/allreduce.py --ranks 2 --columns 8192 --out benchmarks/results/allreduce_x2.json
    python benchmarks/allreduce.py --play 8              # eight ranks played by two GPUs (played.py): times alone

A case that hangs is ended after --patience seconds, named, and left out; the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS = (1, 4, 16, 64, 128, 256, 512, 2048, 8192)
KINDS = {
    "sum": ("nccl", "one_shot", "two_shot"),
    "boundary": ("nccl", "one_shot", "two_shot", "nccl_sharded", "sharded"),
    "argmax": ("nccl", "one_shot"),
}
EPS = 1e-5


def cases(columns: list[int]) -> list[tuple[int, str, str, int]]:
    rows_of = {"argmax": [rows for rows in ROWS if rows <= 256]}
    return [
        (c, kind, name, rows)
        for c in columns
        for kind, names in KINDS.items()
        if kind != "argmax" or c == columns[0]
        for name in names
        for rows in rows_of.get(kind, ROWS)
    ]


def played_cases(ranks: int) -> list[tuple[int, str, str, int]]:
    """What two players do as `ranks` would: no call of NCCL's, and by rows only where each rank has as many."""
    return [
        (c, kind, name, rows)
        for c, kind, name, rows in cases([8192])
        if kind != "argmax" and "nccl" not in name and (name != "sharded" or rows % ranks == 0)
    ]


# A rank.


def run_rank(rank: int, size: int, address: str, todo: list[list[Any]], playing: int) -> None:
    """`playing`: ranks that two play; 0 = as many as there are."""
    import torch

    from dovetail.plugins.collective.config import SymmMemConfig
    from dovetail.plugins.collective.symm_mem.collective import SymmMemCollective

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    collective = SymmMemCollective(SymmMemConfig(algorithm="sharded"))
    if playing:
        import played

        played.shorten_boxes()
        collective = played.Collective(SymmMemConfig(algorithm="sharded"))
    began = time.perf_counter()
    collective.connect(rank, playing or size, address, device)
    collective.barrier()
    if rank == 0:
        _tell({"connected": round(time.perf_counter() - began, 2), "gpu": torch.cuda.get_device_name(device)})
    with torch.inference_mode():
        for columns, kind, name, rows in todo:
            case = {"columns": columns, "kind": kind, "algorithm": name, "rows": rows}
            if rank == 0:
                _tell({"begin": case})
            try:
                found = (
                    _argmax(collective, name, rows)
                    if kind == "argmax"
                    else _case(collective, columns, kind, name, rows, right=not playing)
                )
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-1500:]}
            if rank == 0 or "error" in found:
                _tell({"case": case, "rank": rank, **found})
        if rank == 0:
            _tell({"begin": "measuring the table"})
        began = time.perf_counter()
        sums, edges, sharded = collective.autotune(shards=True)
        if rank == 0:
            tables = {"sum": str(sums), "boundary": str(edges)}
            tables |= {f"boundary, {8 if narrow else 16} bits": str(table) for narrow, table in sharded.items()}
            _tell({"tables": tables, "seconds": round(time.perf_counter() - began, 2)})
    if playing:
        # They are not as many as the collective thinks, and would not end together.
        sys.stdout.flush()
        os._exit(0)
    collective.barrier()
    collective.close()


def _case(collective: Any, columns: int, kind: str, name: str, rows: int, right: bool = True) -> dict[str, Any]:
    """`right`: whether the numbers mean something."""
    import torch

    from dovetail.core.interfaces import Partial
    from dovetail.core.ops import rms_norm
    from dovetail.plugins.collective.nccl import NcclCollective
    from dovetail.plugins.collective.sharded import RowShard, own_rows, sharded_boundary
    from dovetail.plugins.collective.symm_mem.size_table import measure
    from dovetail.plugins.quant.fp8.format import FP8_TOKEN

    reducer, device = collective.reducer, collective._device
    if name == "one_shot" and rows > reducer.mail.boxes:
        return {"skipped": f"more than {reducer.mail.boxes} rows"}
    generator = torch.Generator(device).manual_seed(1000 * rows + collective.rank)
    x_TC = torch.randn(rows, columns, device=device, generator=generator).bfloat16()
    x_TC.masked_fill_(torch.rand(x_TC.shape, device=device, generator=generator) < 0.1, -0.0)
    common = torch.Generator(device).manual_seed(rows)
    residual_TC = torch.randn(rows, columns, device=device, generator=common).bfloat16()
    weight_C = torch.randn(columns, device=device, generator=common).bfloat16()
    exact_TC = NcclCollective.all_reduce(collective, x_TC.float()) if right else x_TC

    def reduced(x: torch.Tensor) -> torch.Tensor:
        if name == "nccl":
            return NcclCollective.all_reduce(collective, x)
        return reducer.reduce(x, name)

    own = RowShard(own_rows(collective, residual_TC), rows)

    def norm(x: torch.Tensor, residual: torch.Tensor | None, emit: Any) -> tuple[Any, torch.Tensor]:
        return rms_norm(x, residual, weight_C, EPS, emit)

    def boundary() -> tuple[Any, Any]:
        if name == "sharded":
            bundle, after = reducer.sharded_boundary(x_TC, own.values, weight_C, EPS, (FP8_TOKEN,))
            return bundle, RowShard(after, rows)
        if name == "nccl_sharded":
            return sharded_boundary(collective, Partial(x_TC), own, norm, (FP8_TOKEN,))
        if name == "nccl":
            return norm(reduced(x_TC), residual_TC, (FP8_TOKEN,))
        return reducer.boundary(x_TC, residual_TC, weight_C, EPS, (FP8_TOKEN,), name)

    def check(found: torch.Tensor, exact: torch.Tensor, most: float, what: str) -> None:
        if not right:
            return
        error = ((found.float() - exact.float()).norm() / exact.float().norm()).item()
        if not error <= most:
            raise ValueError(f"{what} is off by {error:.2%}, more than {most:.2%}")
        # The same bits on every rank.
        bits = found.contiguous().view(torch.uint8).view(-1, 2).long()
        mark = ((bits[:, 0] * 256 + bits[:, 1]) * torch.arange(1, len(bits) + 1, device=device)).sum()[None]
        marks = NcclCollective.all_gather(collective, mark)
        if not bool((marks == marks[0]).all()):
            raise ValueError(f"{what} has other bits on other ranks: {marks.tolist()}")

    def check_boundary(bundle: Any, after: Any) -> None:
        if not right:
            return
        expected, expected_after = rms_norm(exact_TC.bfloat16(), residual_TC, weight_C, EPS, (FP8_TOKEN,))
        check(collective.whole(after), expected_after, 0.01, "x + residual")
        values, wanted = bundle[FP8_TOKEN], expected[FP8_TOKEN]
        check(values.values.float() * values.scale, wanted.values.float() * wanted.scale, 0.02, "the encoded norm")

    call: Callable[[], Any]
    if kind == "sum":
        for _ in range(5):
            check(reduced(x_TC.clone()), exact_TC, 0.01, "the sum")
        nothing = torch.zeros_like(x_TC)
        call = lambda: reduced(nothing)  # noqa: E731
    else:
        kept = x_TC.clone()
        for _ in range(5):
            x_TC.copy_(kept)
            check_boundary(*boundary())
        if name == "nccl":
            x_TC.zero_()  # NCCL sums in place.
        call = boundary
    seconds = measure(call)
    if kind == "sum":
        check(reduced(x_TC.clone()), exact_TC, 0.01, "the sum after the graph")
    else:
        x_TC.copy_(kept)
        check_boundary(*boundary())
    return {"us": round(seconds * 1e6, 2)}


def _argmax(collective: Any, name: str, rows: int) -> dict[str, Any]:
    import torch

    from dovetail.core.interfaces import Collective
    from dovetail.plugins.collective.nccl import NcclCollective
    from dovetail.plugins.collective.symm_mem.size_table import measure

    device, rank = collective._device, collective.rank
    generator = torch.Generator(device).manual_seed(1000 * rows + rank)
    # Few values, so that many are equal.
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
            raise ValueError("not the index of the largest value")

    for _ in range(5):
        check()
    seconds = measure(call)
    check()
    return {"us": round(seconds * 1e6, 2)}


def _tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


# The parent.


def run(size: int, todo: list[tuple[int, str, str, int]], patience: float, playing: int = 0) -> list[dict[str, Any]]:
    """What the ranks tell. After a hang they are started again, without the algorithm that hung."""
    told: list[dict[str, Any]] = []
    while todo:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        command = [sys.executable, __file__, "--rank", "{}", "--ranks", str(size), "--address", address]
        command += ["--play", str(playing)] if playing else []
        ranks = [
            subprocess.Popen(
                [part.format(rank) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for rank in range(size)
        ]
        lines: queue.Queue[str | None] = queue.Queue()
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(todo))
            rank.stdin.close()
            threading.Thread(target=_listen, args=(rank.stdout, lines), daemon=True).start()
        hung: Any = "starting"
        ended, allowed = 0, max(patience, 120.0)
        while ended < size:
            try:
                line = lines.get(timeout=allowed)
            except queue.Empty:
                break
            if line is None:
                ended += 1
                # The others may wait for a rank that has ended for as long as they live.
                allowed = 10.0
                continue
            if not line.startswith("{"):
                continue
            what = json.loads(line)
            told.append(what)
            allowed = patience
            hung = what.get("begin", hung)
            _show(what)
        for rank in ranks:
            rank.kill()
            rank.wait()
        if any("tables" in what for what in told):
            break
        if not isinstance(hung, dict):
            told.append({"fatal": f"the ranks ended or hung while {hung}"})
            _show(told[-1])
            break
        told.append({"case": hung, "rank": -1, "error": f"hung, or a rank died: ended after {allowed:g} s"})
        _show(told[-1])
        seen = {tuple(what["case"].values()) for what in told if "case" in what}
        todo = [
            case
            for case in todo
            if (case[0], case[1], case[2], case[3]) not in seen
            and not (case[1] == hung["kind"] and case[2] == hung["algorithm"])
        ]
    return told


def _listen(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _show(what: dict[str, Any]) -> None:
    if "case" in what and "us" not in what and "skipped" not in what:
        print(f"FAILED {what}", flush=True)
    elif "case" not in what and "begin" not in what:
        print(what, flush=True)


def table(told: list[dict[str, Any]], columns: int, kind: str) -> str:
    found = {tuple(w["case"].values())[2:]: w for w in told if "case" in w and w["case"]["columns"] == columns
             and w["case"]["kind"] == kind and w["rank"] <= 0}  # fmt: skip
    if not found:
        return ""
    lines = [f"{kind}, {columns} columns, us".ljust(26) + "".join(f"{rows:>9}" for rows in ROWS)]
    for name in KINDS[kind]:
        cells = [found.get((name, rows), {}) for rows in ROWS]
        lines.append(f"{name:<26}" + "".join(f"{c['us']:>9.1f}" if "us" in c else f"{'-':>9}" for c in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="GPUs; all by default")
    parser.add_argument("--columns", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--play", type=int, default=0, metavar="RANKS", help="so many played by two GPUs: 4, 8 or 16")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds of one case")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args.rank, args.ranks, args.address, json.load(sys.stdin), args.play)
        return
    import torch

    if args.play:
        args.ranks, args.columns = 2, [8192]
        if args.play not in (4, 8, 16):
            parser.error(f"--play {args.play}: two GPUs play 4, 8 or 16 ranks")
    size = args.ranks or torch.cuda.device_count()
    if not 2 <= size <= torch.cuda.device_count():
        raise SystemExit(f"needs 2 GPUs or more: asked for {size} of {torch.cuda.device_count()}")
    began = time.perf_counter()
    todo = played_cases(args.play) if args.play else cases(args.columns)
    told = run(size, todo, args.patience, args.play)
    for columns in args.columns:
        for kind in KINDS:
            print(table(told, columns, kind), end="\n\n")
    played_by = f"{args.play} ranks played by " if args.play else ""
    print(f"{played_by}{size} GPUs, {time.perf_counter() - began:.0f} s")
    if args.out is not None:
        record = {
            "ranks": args.play or size,
            "gpus": size,
            "torch": torch.__version__,
            "told": [what for what in told if "begin" not in what],
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
