"""The README's tables: models beside vLLM with every workload, in one run on one machine.

    python benchmarks/compare.py table --gpus 0,1,2 --out benchmarks/results -- --python /venvs/vllm/bin/python
    python benchmarks/compare.py table --models 8b_fp8 --out /tmp/results -- --env PYTHONPATH=/vllm/site-packages
    python benchmarks/compare.py table --models qwen25_7b_fp8 --parts offline --out /tmp/results \
        -- --python /venvs/vllm/bin/python --workloads chat,48x512/128
    python benchmarks/compare.py table --models 8b_fp8_drafts --out /tmp/results -- --python /venvs/vllm/bin/python
    python benchmarks/compare.py table --models qwen3_30b_a3b_fp8,gpt_oss_20b --together 2 --out /tmp/results \
        -- --python /venvs/vllm/bin/python
    python benchmarks/compare.py table --models 70b_bf16_tp8,70b_fp8_tp8 --gpus 0,1,2,3,4,5,6,7 --out /tmp/results \
        -- --python /venvs/vllm/bin/python --env VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm

A model is one or two runs of `compare.py vllm`, which gets the options after `--`: requests that all arrive at once,
and servers under load (`--parts` chooses). A run has its GPUs to itself and an equal share of the cores. With
--together N, so many runs share a GPU if they fit: their engines start at the same time, but only one of them runs
requests (compare.py --lock), first all of ours, which NAME_dovetail.json keeps, then all of vLLM's. Runs of several
GPUs go first, then the longest; the rest wait for a GPU. peers/runs.py has all models and runs; --models takes names of
both, and without it those of the README run. vLLM's ranks fuse all-reduce and norm, and models with experts route
uniformly on both sides. Each engine starts with empty caches of compiled kernels. The output of a run goes to NAME.log
next to its result; the tables are printed last, for models with drafters also how much faster each engine is with
drafts than without. A run that fails is named, and the others continue.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import offline, served
from peers.runs import MODELS, PARTS, PLAIN, README, RUNS, Run, runs_of

COMPARE = Path(__file__).parents[1] / "compare.py"
PEER = "vllm"
ENGINES = ("dovetail", PEER)
SPEEDUP = "TPOT without drafts over TPOT with them"
REPORT_EVERY = 30.0
"""Seconds between two progress reports of a run."""
CACHES = ("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class Place:
    """GPUs and cores of one run."""

    gpus: str
    cores: frozenset[int]


def places(gpus: Sequence[str], each: int) -> list[Place]:
    """Divide the machine for runs of `each` GPUs."""
    cores = sorted(os.sched_getaffinity(0))
    count = len(gpus) // each
    share = max(1, len(cores) // count)
    return [
        Place(",".join(gpus[i * each : (i + 1) * each]), frozenset(cores[i * share : (i + 1) * share] or cores))
        for i in range(count)
    ]


def commands(name: str, folder: Path, options: Sequence[str], lock: Path | None) -> list[list[str]]:
    """Return the commands of a run: one, or one for each engine where runs share a GPU. Then the same engine of all
    runs starts at the same time: no run's requests wait for another run's start."""
    shared = ["--lock", str(lock), *options] if lock is not None else options
    if lock is None or "--only" in options:
        return [command(RUNS[name], result_file(folder, name), shared)]
    ours = folder / f"{name}_dovetail.json"
    return [
        command(RUNS[name], ours, [*shared, "--only", "dovetail"]),
        command(RUNS[name], result_file(folder, name), [*shared, "--reuse", str(ours)]),
    ]


def command(run: Run, out: Path, options: Sequence[str]) -> list[str]:
    fixed = [PEER, "--rounds", "1", "--order", "sequential", "--out", str(out), *run.options]
    # The last of equal options counts, so the caller's follow ours.
    return [sys.executable, str(COMPARE), *fixed, *options, *_whole_only(run, options), "--", *run.overrides]


def _whole_only(run: Run, options: Sequence[str]) -> list[str]:
    """Return the option for those of the caller's workloads that have no run of one token in `run`."""
    if "--workloads" not in options or "--whole-only" in options or "--whole-only" not in run.options:
        return []
    ours, theirs = _value(run.options, "--whole-only"), _value(options, "--workloads")
    return ["--whole-only", ",".join(name for name in ours.split(",") if name in theirs.split(","))]


def _value(options: Sequence[str], name: str) -> str:
    """Return the value that counts, the last one."""
    return options[len(options) - 1 - list(reversed(options)).index(name) + 1]


def measure(name: str, command: Sequence[str], place: Place, folder: Path) -> bool:
    """Carry out one command of a run, whose output is added to the run's log; return whether it succeeded."""
    log = folder / f"{name}.log"
    began = time.monotonic()

    def report(text: str) -> None:
        offline.log(f"{name} on GPU {place.gpus}, {time.monotonic() - began:.0f} s: {text}")

    with tempfile.TemporaryDirectory() as caches, log.open("a", encoding="utf-8") as output:
        env = os.environ | {cache: str(Path(caches) / cache) for cache in CACHES} | {"CUDA_VISIBLE_DEVICES": place.gpus}
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        # Processes that it starts inherit these cores.
        os.sched_setaffinity(process.pid, place.cores)
        while process.returncode is None:
            try:
                process.wait(REPORT_EVERY)
            except subprocess.TimeoutExpired:
                report(last_line(log))
    report("done" if process.returncode == 0 else f"exit code {process.returncode}, see {log}")
    return process.returncode == 0


def last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "")


def result_file(folder: Path, name: str) -> Path:
    return folder / f"{name}_beside_{PEER}.json"


def run_all(
    names: Sequence[str], gpus: Sequence[str], folder: Path, options: Sequence[str], together: int = 1
) -> list[str]:
    """Carry out the runs, those of equally many GPUs concurrently, `together` on the same ones; return the names of
    those that failed."""
    failed: list[str] = []
    for each in sorted({RUNS[name].gpus for name in names}, reverse=True):
        same = [name for name in RUNS if name in names and RUNS[name].gpus == each]
        waiting: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        for first in range(0, len(same), together):
            waiting.put(same[first : first + together])

        def work(place: Place, waiting: queue.SimpleQueue[list[str]] = waiting) -> None:
            while True:
                try:
                    some = waiting.get_nowait()
                except queue.Empty:
                    return
                failed.extend(run_some(some, place, folder, options, shared=together > 1))

        in_parallel(work, places(gpus, each))
    return failed


def run_some(names: Sequence[str], place: Place, folder: Path, options: Sequence[str], *, shared: bool) -> list[str]:
    """Carry out runs at one place, all of them at once; return the names of those that failed."""
    lock = folder / f"gpu-{place.gpus.replace(',', '-')}.lock" if shared else None
    left = {name: commands(name, folder, options, lock) for name in names}
    for name in names:
        (folder / f"{name}.log").unlink(missing_ok=True)
    failed: list[str] = []

    def next_command(name: str) -> None:
        if not measure(name, left[name].pop(0), place, folder):
            failed.append(name)
            left[name].clear()

    while going := [name for name, more in left.items() if more]:
        in_parallel(next_command, going)
    return failed


def in_parallel(work: Callable[[Any], None], items: Sequence[Any]) -> None:
    threads = [threading.Thread(target=work, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tables(results: dict[str, dict[str, Any]]) -> str:
    """Markdown of both tables. `results`: name of a run -> what compare.py wrote."""
    at_once: dict[str, dict[str, Any]] = {}
    over_time: dict[str, dict[str, Any]] = {}
    speedups: dict[str, dict[str, Any]] = {}
    lines = []
    for name in sorted(results, key=lambda name: MODELS.index(RUNS[name].model)):
        result, title = results[name], RUNS[name].title
        for row in result["comparisons"]:
            at_once[f"{title}, {offline.label(row)}"] = row
            if speedup := _speedup(row, results.get(f"{RUNS[name].model}{PLAIN}", {})):
                speedups[f"{title}, {offline.label(row)}"] = speedup
        for row in result.get("served", ()):
            over_time[f"{title}, {row['workload']}, {row['rate']:g} ({row['requests']})"] = row
        for kind, engines in (("engine", result["engines"]), ("server", result.get("servers", {}))):
            if engines:
                started = ", ".join(f"{engine} {about['startup_s']:.1f} s" for engine, about in engines.items())
                lines.append(f"{title}: {kind} started in: {started}")
    parts = []
    if at_once:
        parts.append(offline.ratio_table("model, requests", offline.FIGURES, at_once, ENGINES))
    if speedups:
        parts.append(offline.ratio_table("drafter, requests", {"speedup": SPEEDUP}, speedups, ENGINES))
    if over_time:
        parts.append(offline.ratio_table("model, requests/s (requests)", served.FIGURES, over_time, ENGINES))
    return "\n\n".join([*parts, "\n".join(lines)])


def _speedup(row: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any] | None:
    """Return each engine's time per token without drafts over that with them; None where `plain` is the same run, or
    lacks the workload."""
    for other in plain.get("comparisons", ()):
        if other["workload"] == row["workload"] and other is not row and "tpot_ms" in row[PEER]:
            found = {name: other[name]["tpot_ms"] / row[name]["tpot_ms"] for name in ENGINES}
            ours, theirs = found.values()
            return {name: {"speedup": value} for name, value in found.items()} | {"ratio": {"speedup": ours / theirs}}
    return None


def main(argv: Sequence[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="compare.py table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", default="0", help="indices, separated by commas")
    parser.add_argument("--models", default=",".join(README), help=f"of {', '.join(MODELS)}, or single runs")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="runs that share a GPU if they fit")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    args = parser.parse_args(argv[:cut])
    models = args.models.split(",")
    if unknown := [name for name in models if name not in MODELS and name not in RUNS]:
        parser.error(f"--models {','.join(unknown)}: there are {', '.join(MODELS)}")
    parts = args.parts.split(",")
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"--parts {','.join(unknown)}: there are {', '.join(PARTS)}")
    if args.together < 1:
        parser.error(f"--together {args.together}: at least 1")
    names = runs_of(models, parts)
    if not names:
        parser.error(f"--models {args.models} --parts {args.parts}: no run is of these parts")
    if args.together > 1 and any(name.endswith("_online") for name in names):
        parser.error(f"--together {args.together}: servers have a GPU to themselves; add --parts offline")
    gpus = args.gpus.split(",")
    if few := [f"{name} takes {RUNS[name].gpus}" for name in names if RUNS[name].gpus > len(gpus)]:
        parser.error(f"--gpus {args.gpus}: {', '.join(few)}")
    args.out.mkdir(parents=True, exist_ok=True)
    failed = run_all(names, gpus, args.out, argv[cut + 1 :], args.together)
    files = {name: result_file(args.out, name) for name in names if name not in failed}
    print(tables({name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}))
    for name in failed:
        print(f"compare.py table: {name} failed, see {args.out / f'{name}.log'}", file=sys.stderr)
    return 1 if failed else 0
