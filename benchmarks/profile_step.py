"""Where a decode step's time goes: kernels by kind, and how long the device idles between them.

python benchmarks/profile_step.py 64 -- model=llama3_8b attention=triton engine.depth=2 engine.max_len=1024
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from dovetail import SamplingParams
from dovetail.core.compose import compose
from dovetail.core.engine.engine import Engine

STEPS = 40
WARM = 20


def kernels(engine: Engine, rows: int, context: int) -> list[tuple[str, float, float]]:
    """(name, start us, duration us) of every device activity of STEPS decode steps of `rows` sequences."""
    rng = random.Random(rows)
    vocab = engine.info.spec.vocab
    params = SamplingParams(temperature=0.0, max_tokens=2 * (WARM + STEPS), ignore_eos=True)
    sequences = [engine.add([rng.randrange(vocab) for _ in range(context)], params)[0] for _ in range(rows)]

    def decode(steps: int) -> None:
        target = sequences[-1].known_len + steps
        while sequences[-1].known_len < target:
            engine.step()
        torch.cuda.synchronize()

    while any(seq.known_len == seq.prompt_len for seq in sequences):
        engine.step()
    decode(WARM)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorder:
        decode(STEPS)
    while engine.has_work:
        engine.step()
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
    parser.add_argument("--kernels", type=int, default=24, help="kernels to list, longest first")
    args = parser.parse_args(argv[:cut])
    engine = Engine(compose([*argv[cut + 1 :], f"engine.max_seqs={max(args.rows)}"]))
    engine.start()
    for rows in args.rows:
        found = sorted(kernels(engine, rows, args.context), key=lambda k: k[1])
        span = found[-1][1] + found[-1][2] - found[0][1]
        busy = sum(duration for _, _, duration in found)
        by_name: dict[str, list[float]] = defaultdict(list)
        for name, _, duration in found:
            by_name[name].append(duration)
        step_ms, idle = span / STEPS / 1e3, 1 - busy / span
        print(f"\n{rows} rows: {step_ms:.3f} ms a step, {idle:.1%} idle, {len(found) / STEPS:.0f} kernels")
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[: args.kernels]:
            each, mean = len(times) / STEPS, sum(times) / len(times)
            print(f"{each * mean:9.1f} us {each:7.1f} x {mean:7.2f} us  {name[:90]}")
    engine.shutdown()


if __name__ == "__main__":
    main()
