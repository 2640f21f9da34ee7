"""Where a decode step's time goes: kernels by kind, and how long the device idles between them.

python benchmarks/profile_step.py 64 -- model=llama3_8b attention=triton engine.depth=2 engine.max_len=1024
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dovetail import LLM, SamplingParams

STEPS = 40


def kernels(rows: int, context: int, overrides: list[str]) -> list[tuple[str, float, float]]:
    """(name, start us, duration us) of every device activity of some decode steps of `rows` sequences."""
    with LLM(overrides=overrides) as llm:
        engine, rng = llm.engine, random.Random(0)
        vocab = engine.info.spec.vocab
        params = SamplingParams(temperature=0.0, max_tokens=STEPS * 3, ignore_eos=True)
        events: list[Any] = []
        state = {"decodes": 0}
        submit = engine.executor.submit
        recorder = profile(activities=[ProfilerActivity.CUDA], acc_events=True)

        def counted(plan: Any, blobs: Any) -> None:
            state["decodes"] += not plan.joins and len(plan.rows) == rows
            if state["decodes"] == STEPS // 2:
                torch.cuda.synchronize()
                recorder.start()
            if state["decodes"] == STEPS // 2 + STEPS:
                torch.cuda.synchronize()
                recorder.stop()
                events.extend(recorder.events())
                state["decodes"] += 1
            submit(plan, blobs)

        engine.executor.submit = counted  # type: ignore[method-assign]
        llm.generate([[rng.randrange(vocab) for _ in range(context)] for _ in range(rows)], params)
    return [
        (e.name, e.time_range.start, e.time_range.elapsed_us())
        for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]


def main() -> None:
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each sequence")
    args = parser.parse_args(argv[:cut])
    for rows in args.rows:
        found = sorted(kernels(rows, args.context, [*argv[cut + 1 :], f"engine.max_seqs={rows}"]), key=lambda k: k[1])
        span = found[-1][1] + found[-1][2] - found[0][1]
        busy = sum(duration for _, _, duration in found)
        by_name: dict[str, list[float]] = defaultdict(list)
        for name, _, duration in found:
            by_name[name].append(duration)
        step_ms, idle = span / STEPS / 1e3, 1 - busy / span
        print(f"\n{rows} rows: {step_ms:.3f} ms a step, {idle:.1%} idle, {len(found) / STEPS:.0f} kernels")
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:24]:
            each, mean = len(times) / STEPS, sum(times) / len(times)
            print(f"{each * mean:9.1f} us {each:7.1f} x {mean:7.2f} us  {name[:90]}")


if __name__ == "__main__":
    main()
