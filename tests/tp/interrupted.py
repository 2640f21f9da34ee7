"""A program that runs steps until it is interrupted. Prints its workers' process ids first."""

from __future__ import annotations

import sys

import rank_runners

from dovetail.core.compose import compose
from dovetail.core.interfaces import StepPlan

executor = rank_runners.executor(rank_runners.Connected, compose(["app=generate", "executor=multiproc", "engine.tp=2"]))
try:
    executor.start(lambda phase, share: None)
    print(*executor.worker_pids, flush=True)
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
