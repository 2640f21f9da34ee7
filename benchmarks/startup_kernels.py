"""Compilation of kernels at start-up.

    python benchmarks/startup_kernels.py -- +preset=h200_fp8_tp1 model.load=dummy
    python benchmarks/startup_kernels.py --emulate --workers 2 16 -- +preset=h200_fp8_tp1

Starts the engine twice with an empty Triton cache, which the second start finds full, and prints the phases of both.

--emulate needs no GPU: a rank on an emulated H200 with dummy weights compiles the kernels of a start one after another.
It prints the variants of each kernel and the processor time of each stage of Triton, and computes from them how long
--workers threads or processes take at least. In threads, code generation (`python`: what is not in a stage) runs in one
of them at a time. The launches that find the kernels are not included.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

from dovetail.core.compose import compose

STAGES = ("python", "ttir", "ttgir", "llir", "ptx", "cubin")
Seconds = Counter[str]
"""Processor time by stage."""


def start(overrides: Sequence[str]) -> None:
    """Start an engine, and print its phases as JSON."""
    from dovetail.core.engine.engine import start_engine

    engine = start_engine(compose(overrides))
    print(json.dumps(engine.info.phases), flush=True)
    engine.shutdown()


def print_starts(overrides: Sequence[str]) -> None:
    """Print the phases of a start with an empty and one with a full cache, in processes of their own."""
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty", "full"):
            began = time.perf_counter()
            command = [sys.executable, __file__, "--start", "--", *overrides]
            environment = os.environ | {"TRITON_CACHE_DIR": cache}
            with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as popen:
                assert popen.stdout is not None
                line = popen.stdout.readline()
                seconds = time.perf_counter() - began
            if popen.returncode:
                sys.exit(popen.returncode)
            phases = ", ".join(f"{phase} {took:.1f}" for phase, took in json.loads(line).items())
            print(f"{name} cache: {seconds:.1f} s with imports ({phases})", flush=True)


def processor_seconds() -> float:
    """Return the processor time of this thread and of ended child processes (ptxas)."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime


def compile_emulated(overrides: Sequence[str]) -> list[tuple[str, Seconds]]:
    """Compile the kernels of a start for an H200. Return each variant's kernel and processor time."""
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    from dovetail.core.ops.kernels import launch
    from dovetail.core.testing.executor_scripts import quiet
    from dovetail.core.testing.no_gpu import no_gpu
    from dovetail.core.worker.loader import load_rank

    found: list[tuple[str, Seconds]] = []
    spent: Seconds = Counter()
    compile_one, add_stages = triton.compiler.compile, CUDABackend.add_stages

    def timed(stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = processor_seconds()
            result = call(*args)
            spent[stage] += processor_seconds() - began
            return result

        return run

    def add_timed(self: Any, stages: dict[str, Any], *how: Any) -> None:
        add_stages(self, stages, *how)
        stages.update({stage: timed(stage, call) for stage, call in stages.items()})

    def compile_timed(src: Any, **how: Any) -> Any:
        spent.clear()
        began = processor_seconds()
        kernel = compile_one(src, **how)
        spent["python"] = processor_seconds() - began - spent.total()
        found.append((src.name, Counter(spent)))
        return kernel

    shapes = ["model.load=dummy", "model.hf.num_hidden_layers=2", "engine.kv_pages=4000"]
    with (
        tempfile.TemporaryDirectory() as cache,
        triton.knobs.cache.scope(),
        triton.knobs.compilation.scope(),
        patch.object(launch, "keep_shared_memory", lambda device: None),
        patch.object(CUDABackend, "add_stages", add_timed),
        patch.object(triton.compiler, "compile", compile_timed),
        no_gpu(),
    ):
        triton.knobs.cache.dir = cache
        load_rank(compose([*shapes, *overrides]), quiet)
    return found


def in_processes(jobs: Sequence[Seconds], workers: int) -> float:
    """Return when the last of `jobs` ends, each of which starts on the next free worker."""
    free = [0.0] * workers
    for job in jobs:
        heapq.heapreplace(free, free[0] + job.total())
    return max(free)


def in_threads(jobs: Sequence[Seconds], workers: int) -> float:
    """The same, where one job at a time generates code."""
    free, generated = [0.0] * workers, 0.0
    for job in jobs:
        generated = max(free[0], generated) + job["python"]
        heapq.heapreplace(free, generated + job.total() - job["python"])
    return max(free)


def print_emulated(overrides: Sequence[str], workers: Sequence[int]) -> None:
    found = compile_emulated(overrides)
    variants = Counter(name for name, _ in found)
    by_kernel = {name: sum((took for kernel, took in found if kernel == name), Counter()) for name in variants}
    rows = sorted(by_kernel.items(), key=lambda row: -row[1].total())
    rows.append(("all", sum(by_kernel.values(), Counter())))
    variants["all"] = len(found)
    print(f"{'kernel':24} {'variants':>8} {'seconds':>8}" + "".join(f"{stage:>8}" for stage in STAGES))
    for name, took in rows:
        print(f"{name:24} {variants[name]:8} {took.total():8.2f}" + "".join(f"{took[stage]:8.2f}" for stage in STAGES))
    jobs = [took for _, took in found]
    print(f"the longest compilation takes {max(job.total() for job in jobs):.1f} s")
    for count in workers:
        print(
            f"{count} workers: {in_threads(jobs, count):.1f} s in threads, {in_processes(jobs, count):.1f} in processes"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if args.start:
        start(args.overrides)
    elif args.emulate:
        print_emulated(args.overrides, args.workers)
    else:
        print_starts(args.overrides)


if __name__ == "__main__":
    main()
