"""Where a step's time goes: kernels by kind, and how long the device idles between them.

    python benchmarks/profile_step.py 1 64 256 -- +preset=h200_bf16_tp1 engine.max_len=1024
    python benchmarks/profile_step.py 256 --prefill -- +preset=h200_bf16_tp1 engine.max_len=1024

Decode steps of so many sequences, or with --prefill the steps that feed so many prompts. Kernels that start before the
one in front has ended (programmatic dependent launch) count from their start, so their sum may pass the step's time.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from contextlib import nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from dovetail import SamplingParams
from dovetail.core.compose import compose
from dovetail.core.engine.engine import Engine
from dovetail.core.interfaces import Sequence

STEPS = 40
WARM = 20


Activity = tuple[str, float, float]
"""Name, start and duration in microseconds, of something that the device did."""


def burst(engine: Engine, rows: int, context: int, output: int) -> list[Sequence]:
    """Queue `rows` prompts of random ids."""
    vocab = engine.info.spec.vocab
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return [engine.add([random.randrange(vocab) for _ in range(context)], params)[0] for _ in range(rows)]


def prefill(engine: Engine, rows: int, context: int) -> tuple[list[Activity], int]:
    """Of the steps that feed `rows` prompts, after as many to warm up; and how many steps that were."""
    for counted in (False, True):
        burst(engine, rows, context, 1)
        before = engine.counters.steps
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) if counted else nullcontext() as recorder:
            while engine.has_work:
                engine.step()
            torch.cuda.synchronize()
    return activities(recorder), engine.counters.steps - before


def decode(engine: Engine, rows: int, context: int) -> tuple[list[Activity], int]:
    """Of STEPS decode steps of `rows` sequences."""
    sequences = burst(engine, rows, context, 2 * (WARM + STEPS))

    def go(steps: int) -> None:
        target = sequences[-1].known_len + steps
        while sequences[-1].known_len < target:
            engine.step()
        torch.cuda.synchronize()

    while any(seq.known_len == seq.prompt_len for seq in sequences):
        engine.step()
    go(WARM)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorder:
        go(STEPS)
    while engine.has_work:
        engine.step()
    return activities(recorder), STEPS


def activities(recorder: profile) -> list[Activity]:
    return [
        (e.name, e.time_range.start, e.time_range.elapsed_us())
        for e in recorder.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]


def main() -> None:
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each sequence")
    parser.add_argument("--prefill", action="store_true", help="the steps that feed prompts, not decode steps")
    parser.add_argument("--kernels", type=int, default=24, help="kernels to list, longest first")
    args = parser.parse_args(argv[:cut])
    engine = Engine(compose([*argv[cut + 1 :], f"engine.max_seqs={max(args.rows)}"]))
    engine.start()
    for rows in args.rows:
        found, steps = (prefill if args.prefill else decode)(engine, rows, args.context)
        found.sort(key=lambda k: k[1])
        span = found[-1][1] + found[-1][2] - found[0][1]
        busy = sum(duration for _, _, duration in found)
        by_name: dict[str, list[float]] = defaultdict(list)
        for name, _, duration in found:
            by_name[name].append(duration)
        step_ms, idle = span / steps / 1e3, 1 - busy / span
        print(f"\n{rows} rows: {step_ms:.3f} ms a step, {idle:.1%} idle, {len(found) / steps:.0f} kernels")
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[: args.kernels]:
            each, mean = len(times) / steps, sum(times) / len(times)
            print(f"{each * mean:9.1f} us {each:7.1f} x {mean:7.2f} us  {name[:90]}")
    engine.shutdown()


if __name__ == "__main__":
    main()
