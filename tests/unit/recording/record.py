"""Stored recordings: a small load with preemption, aborts, shared prefixes and several samples, for each built-in
scheduler and allocator. A change of a policy changes its plans, so record them again then:

    python tests/unit/recording/record.py
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dovetail.core.compose import compose
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.interfaces import RequestOptions, SamplingParams

STORED = Path(__file__).parent / "stored"
SCHEDULERS = ("deadline", "fair", "fcfs", "longest_prefix", "priority", "shortest_job", "static")
ALLOCATORS = ("contiguous", "paged", "prefix_hash", "radix")
PAIRS = [(scheduler, "prefix_hash") for scheduler in SCHEDULERS]
PAIRS += [("fcfs", allocator) for allocator in ALLOCATORS if allocator != "prefix_hash"]

SMALL = (
    "executor=simulated engine.device=cpu engine.max_len=128 engine.max_seqs=4 engine.token_budget=48 engine.depth=2"
)
PAGES = {"contiguous": 32}
"""Pages that are enough for one sequence, and few enough that some are preempted; FEW for allocators not listed."""
FEW = 10


def small_engine(*overrides: str) -> Engine:
    return start_engine(compose([*SMALL.split(), *overrides], app="generate"))


def run(engine: Engine, seed: int = 0, requests: int = 10) -> None:
    """Run a load that is the same in each call with equal arguments, and close the engine."""
    rng = random.Random(seed)
    shared = rng.choices(range(1, 400), k=40)
    waiting = sorted((rng.randrange(30), i) for i in range(requests))
    aborts: dict[int, int] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            _, i = waiting.pop(0)
            for seq in engine.add(*_request(rng, shared, i, engine.clock())):
                if rng.random() < 0.15:
                    aborts[seq.uid] = step + rng.randrange(12)
        for uid in [uid for uid, at in aborts.items() if at <= step]:
            engine.abort(uid)
            del aborts[uid]
        if engine.has_work:
            engine.step()
        step += 1
    engine.shutdown()


def _request(rng: random.Random, shared: list[int], i: int, now: float) -> tuple[Any, ...]:
    own = rng.choices(range(1, 400), k=rng.randrange(1, 40))
    prompt = shared[: rng.choice([0, 16, 37, 40])] + own
    output = rng.randrange(1, 30)
    params = SamplingParams(temperature=0.0, max_tokens=output, n=rng.choice([1, 1, 2]), ignore_eos=True)
    options = RequestOptions(
        priority=rng.randrange(3),
        user=rng.choice("ab"),
        deadline=now + rng.random(),
        hints={"output_tokens": float(output)} if i % 2 else {},
        cache_salt=rng.choice(["", "", "x"]),
    )
    return prompt, params, options


def main() -> None:
    STORED.mkdir(exist_ok=True)
    os.chdir(STORED)  # so that the recordings name no folder of this machine
    for scheduler, allocator in PAIRS:
        path = Path(f"{scheduler}-{allocator}.rec")
        path.unlink(missing_ok=True)
        pages = PAGES.get(allocator, FEW)
        words = (f"scheduler={scheduler}", f"kv_cache={allocator}", f"engine.kv_pages={pages}")
        with patch("dovetail.core.recording.file.zstd", lambda: None):  # readable without the extra
            run(small_engine(*words, f"engine.record={path}"))


if __name__ == "__main__":
    main()
