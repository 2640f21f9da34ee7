"""A program that loads for a minute, or runs steps, until it is interrupted. It first prints its workers' process
ids."""

from __future__ import annotations

import sys

import rank_runners

from dovetail.core.compose import compose
from dovetail.core.interfaces import StepPlan

LOADING = sys.argv[1] == "load"
runner = rank_runners.SlowRankZero if LOADING else rank_runners.Connected
executor = rank_runners.executor(runner, compose(["app=generate", "executor=multiproc", "engine.tp=2"]))
started = []


def progress(phase: str, share: float | None) -> None:
    """Print the process ids: the workers exist once rank 0 loads."""
    if phase == "weights" and not started:
        started.append(executor.worker_pids)
        print(*executor.worker_pids, flush=True)
        if LOADING:
            print("runs", flush=True)


try:
    executor.start(progress)
    step = 0
    while True:
        executor.submit(StepPlan(step, []), {})
        executor.collect()
        step += 1
        if step == 20:
            print("runs", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
finally:
    executor.shutdown()
    print("shut down", flush=True)
