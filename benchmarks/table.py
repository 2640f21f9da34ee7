"""The README's table: models beside vLLM, every workload, in one run on one machine.

    python benchmarks/table.py --gpus 0,1,2 --out benchmarks/results -- --python /venvs/vllm/bin/python
    python benchmarks/table.py --models 8b_fp8 --out /tmp/results -- --env PYTHONPATH=/vllm/site-packages
    python benchmarks/table.py --models 70b_bf16_tp8,70b_fp8_tp8 --gpus 0,1,2,3,4,5,6,7 --out benchmarks/results \
        -- --python /venvs/vllm/bin/python --env VLLM_FLASHINFER_ALLREDUCE_BACKEND=trtllm

A model is one or two runs of compare.py, which gets what follows `--`: requests that are all there at once, and a
server's. A run has its GPUs for itself, with an equal share of the cores; those of several GPUs come first, then the
longest, and who is left waits for a GPU. Without --models, those of one GPU. vLLM's ranks fuse their sums and norms.
Kernels, and what else the engines keep, are compiled anew for each. What a run says goes to NAME.log beside its result;
the tables come last. A run that fails is named, and the others go on.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import offline
import served

COMPARE = Path(__file__).parent / "compare.py"
PEER = "vllm"
TOLD_EVERY = 30.0
"""Seconds between two words on what goes on."""
CACHES = ("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
VLLM_FP8: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
VLLM_FUSED: dict[str, Any] = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": True}}}


@dataclass(frozen=True)
class Run:
    """Of compare.py."""

    model: str
    title: str
    options: tuple[str, ...]
    overrides: tuple[str, ...]
    gpus: int = 1


def _args(**settings: Any) -> tuple[str, ...]:
    return "--args", json.dumps(settings)


def _at_once(*options: str) -> tuple[str, ...]:
    return "--workloads", "latency,batch64,batch256,throughput,long,shared_prefix", *options


def _over_time(**settings: str) -> tuple[str, ...]:
    said = (word for name, value in settings.items() for word in ("--set", f"online:workload.{name}={value}"))
    return "--workloads", "online", *said


_70B_FP8 = ("+preset=h200_fp8_tp1", "model=llama3_70b", "engine.max_len=9216", "engine.max_seqs=256")
_8B_FP8 = ("+preset=h200_fp8_tp1", "model=llama3_8b", "engine.max_len=9216", "engine.max_seqs=512")
_8B_BF16 = ("+preset=h200_bf16_tp1", *_8B_FP8[1:])
_TP8 = ("model=llama3_70b", "engine.max_len=9216", "engine.max_seqs=512")
_FP8 = _args(**VLLM_FP8)
_ONLINE = _over_time(seconds="8", at_least="8")
RUNS = {
    "70b_bf16_tp8": Run(
        "70b_bf16_tp8",
        "70B bf16 on eight",
        (*_args(**VLLM_FUSED), *_at_once()),
        ("+preset=h200_bf16_tp8", *_TP8),
        gpus=8,
    ),
    "70b_fp8_tp8": Run(
        "70b_fp8_tp8",
        "70B FP8 on eight",
        (*_args(**VLLM_FP8, **VLLM_FUSED), *_at_once()),
        ("+preset=h200_fp8_tp8", *_TP8),
        gpus=8,
    ),
    "70b_fp8": Run("70b_fp8", "70B FP8", (*_FP8, *_at_once("--whole-only", "throughput")), _70B_FP8),
    "8b_bf16": Run("8b_bf16", "8B bf16", _at_once(), _8B_BF16),
    "8b_fp8": Run("8b_fp8", "8B FP8", (*_FP8, *_at_once()), _8B_FP8),
    "70b_fp8_online": Run(
        "70b_fp8", "70B FP8", (*_FP8, *_over_time(seconds="4", at_least="8", rates="[1,2,4,8,16]")), _70B_FP8
    ),
    "8b_bf16_online": Run("8b_bf16", "8B bf16", _ONLINE, _8B_BF16),
    "8b_fp8_online": Run("8b_fp8", "8B FP8", (*_FP8, *_ONLINE), _8B_FP8),
}
"""The longest first."""
MODELS = ("8b_bf16", "8b_fp8", "70b_fp8", "70b_bf16_tp8", "70b_fp8_tp8")
"""In the tables' order."""
ON_ONE = tuple(model for model in MODELS if RUNS[model].gpus == 1)


@dataclass(frozen=True)
class Place:
    gpus: str
    cores: frozenset[int]


def places(gpus: Sequence[str], each: int) -> list[Place]:
    """For runs of `each` GPUs."""
    cores = sorted(os.sched_getaffinity(0))
    count = len(gpus) // each
    share = max(1, len(cores) // count)
    return [
        Place(",".join(gpus[i * each : (i + 1) * each]), frozenset(cores[i * share : (i + 1) * share] or cores))
        for i in range(count)
    ]


def command(run: Run, out: Path, options: Sequence[str]) -> list[str]:
    fixed = [PEER, "--rounds", "1", "--order", "sequential", "--out", str(out), *run.options]
    # Of two equal options the last counts, so the caller's come after ours.
    return [sys.executable, str(COMPARE), *fixed, *options, "--", *run.overrides]


def measure(name: str, place: Place, folder: Path, options: Sequence[str]) -> bool:
    """Whether it ended well."""
    out, log = result_file(folder, name), folder / f"{name}.log"
    with tempfile.TemporaryDirectory() as caches, log.open("w", encoding="utf-8") as words:
        env = os.environ | {cache: str(Path(caches) / cache) for cache in CACHES} | {"CUDA_VISIBLE_DEVICES": place.gpus}
        process = subprocess.Popen(
            command(RUNS[name], out, options), env=env, stdin=subprocess.DEVNULL, stdout=words, stderr=words
        )
        # What it starts later has these cores, too.
        os.sched_setaffinity(process.pid, place.cores)
        began = time.monotonic()
        while not ended(process, TOLD_EVERY):
            offline.say(f"{name} on GPU {place.gpus}, {time.monotonic() - began:.0f} s: {last_words(log)}")
    end = "done" if process.returncode == 0 else f"exit code {process.returncode}, see {log}"
    offline.say(f"{name} on GPU {place.gpus}, {time.monotonic() - began:.0f} s: {end}")
    return process.returncode == 0


def ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Within so many."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def last_words(log: Path) -> str:
    said = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip()[:160] for line in reversed(said) if line.strip()), "")


def result_file(folder: Path, name: str) -> Path:
    return folder / f"{name}_beside_{PEER}.json"


def run_all(names: Sequence[str], gpus: Sequence[str], folder: Path, options: Sequence[str]) -> list[str]:
    """Names of those that failed."""
    failed: list[str] = []
    for each in sorted({RUNS[name].gpus for name in names}, reverse=True):
        alike = [name for name in names if RUNS[name].gpus == each]
        failed += run_alike(alike, places(gpus, each), folder, options)
    return failed


def run_alike(names: Sequence[str], at: Sequence[Place], folder: Path, options: Sequence[str]) -> list[str]:
    """Runs of as many GPUs each."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in sorted(names, key=list(RUNS).index):
        waiting.put(name)
    failed: list[str] = []

    def work(place: Place) -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            if not measure(name, place, folder, options):
                failed.append(name)

    workers = [threading.Thread(target=work, args=(place,)) for place in at]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return failed


def tables(results: dict[str, dict[str, Any]]) -> str:
    """Name of a run -> what compare.py wrote."""
    at_once: dict[str, dict[str, Any]] = {}
    over_time: dict[str, dict[str, Any]] = {}
    lines = []
    for name in sorted(results, key=lambda name: MODELS.index(RUNS[name].model)):
        result, title = results[name], RUNS[name].title
        for row in result["comparisons"]:
            at_once[f"{title}, {row['requests']} x {row['prompt_tokens']}/{row['output_tokens']}"] = row
        for row in result.get("served", ()):
            over_time[f"{title}, {row['rate']:g} ({row['requests']})"] = row
        for kind, about in (("engine", result["engines"]), ("server", result.get("servers", {}))):
            if about:
                started = ", ".join(f"{engine} {told['startup_s']:.1f} s" for engine, told in about.items())
                lines.append(f"{title}: {kind} started in: {started}")
    parts = []
    if at_once:
        parts.append(offline.ratio_table("model, requests", offline.FIGURES, at_once, "dovetail", PEER))
    if over_time:
        parts.append(offline.ratio_table("model, requests/s (requests)", served.FIGURES, over_time, "dovetail", PEER))
    return "\n\n".join([*parts, "\n".join(lines)])


def main(argv: Sequence[str]) -> int:
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="0", help="indices, with commas between them")
    parser.add_argument("--models", default=",".join(ON_ONE), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    args = parser.parse_args(argv[:cut])
    models = args.models.split(",")
    if unknown := [name for name in models if name not in MODELS]:
        parser.error(f"--models {','.join(unknown)}: there are {', '.join(MODELS)}")
    names = [name for name, run in RUNS.items() if run.model in models]
    gpus = args.gpus.split(",")
    if few := [f"{name} takes {RUNS[name].gpus}" for name in names if RUNS[name].gpus > len(gpus)]:
        parser.error(f"--gpus {args.gpus}: {', '.join(few)}")
    args.out.mkdir(parents=True, exist_ok=True)
    failed = run_all(names, gpus, args.out, argv[cut + 1 :])
    files = {name: result_file(args.out, name) for name in names if name not in failed}
    print(tables({name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}))
    for name in failed:
        print(f"table.py: {name} failed, see {args.out / f'{name}.log'}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
