"""Offline throughput of the engine on fixed token workloads: all requests at once, greedy, EOS ignored.

    python benchmarks/offline.py batch64 --out benchmarks/results/NAME.json -- model=llama3_8b model.load=dummy

TPOT = (time of the whole run - time of the same run with one output token) / (output tokens per request - 1).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dovetail import LLM, SamplingParams

WORKLOADS = {
    "smoke": (4, 16, 8),
    "latency": (1, 512, 256),
    "batch64": (64, 512, 256),
    "batch256": (256, 512, 256),
    "throughput": (1000, 512, 256),
    "long": (32, 8192, 256),
}
"""name -> (requests, prompt tokens, output tokens)"""


def run(llm: LLM, requests: int, prompt: int, output: int, seed: int) -> float:
    """Seconds for one batch of random prompts."""
    rng = random.Random(seed)
    vocab = llm.engine.info.spec.vocab
    prompts = [[rng.randrange(vocab) for _ in range(prompt)] for _ in range(requests)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    began = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    assert sum(len(r.token_ids) for r in results) == requests * output
    return seconds


def measure(llm: LLM, workload: str, repeats: int) -> dict[str, Any]:
    requests, prompt, output = WORKLOADS[workload]
    run(llm, min(requests, 4), 32, 4, seed=99)
    llm.engine.counters.schedule_seconds, llm.engine.counters.steps = 0.0, 0
    first = statistics.median(run(llm, requests, prompt, 1, seed=10 + i) for i in range(repeats))
    whole = statistics.median(run(llm, requests, prompt, output, seed=20 + i) for i in range(repeats))
    counters = llm.engine.counters
    return {
        "workload": workload,
        "requests": requests,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "first_token_s": round(first, 4),
        "total_s": round(whole, 4),
        "tpot_ms": round((whole - first) / (output - 1) * 1e3, 3),
        "output_tokens_per_s": round(requests * output / whole, 1),
        "schedule_ms_per_step": round(counters.schedule_seconds / counters.steps * 1e3, 4),
    }


def machine() -> dict[str, Any]:
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit or None,
    }


def main() -> None:
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv[:cut])
    overrides = argv[cut + 1 :]
    began = time.perf_counter()
    with LLM(overrides=overrides) as llm:
        result = machine() | {
            "overrides": overrides,
            "startup_s": round(time.perf_counter() - began, 2),
            "phases_s": {name: round(s, 2) for name, s in llm.engine.info.phases.items()},
            "results": [],
        }
        for workload in args.workloads:
            figures = measure(llm, workload, args.repeats)
            print(json.dumps(figures), flush=True)
            result["results"].append(figures)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
