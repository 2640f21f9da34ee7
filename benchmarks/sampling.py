"""Time of drawing tokens from logits: greedy, random, and random with top-k and top-p, as a captured step does it.

python benchmarks/sampling.py 1 64 256
"""

from __future__ import annotations

import argparse

import torch
import triton

from dovetail.core.worker.sampler import SampleParams, sample

WAYS = {
    "greedy": {},
    "random": {},
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 50},
    "both": {"top_p": 0.9, "top_k": 50},
}


def make(way: str, rows: int) -> SampleParams:
    options = WAYS[way]

    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    return SampleParams(
        full(0.0 if way == "greedy" else 0.8),
        full(options.get("top_k", 0), torch.int64),
        full(options.get("top_p", 1.0)),
        full(0.0),
        torch.arange(rows, device="cuda"),
        random=way != "greedy",
        filtered=bool(options),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=int, nargs="+")
    parser.add_argument("--vocab", type=int, default=128256)
    args = parser.parse_args()
    print(f"{'us':>6}" + "".join(f"{way:>10}" for way in WAYS))
    for rows in args.rows:
        logits_NV = torch.randn(rows, args.vocab, device="cuda").mul_(3).bfloat16()
        position_N = torch.arange(rows, device="cuda")
        times = []
        for way in WAYS:
            params = make(way, rows)
            times.append(triton.testing.do_bench_cudagraph(lambda: sample(logits_NV, position_N, params)))  # noqa: B023
        print(f"{rows:>6}" + "".join(f"{1e3 * time:>10.1f}" for time in times))


if __name__ == "__main__":
    main()
