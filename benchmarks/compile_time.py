"""Which Triton kernels start-up compiles and what each costs, on a machine without a GPU.

    python benchmarks/compile_time.py +preset=h200_fp8_tp1 model=llama3_8b engine.max_len=1024 engine.max_seqs=256

The engine is loaded on an H200 that is not there (dovetail.core.testing.no_gpu): shapes, dtypes, alignment and
constants are those of a real start, and every kernel goes down to machine code, one after another, in a cache of its
own. It says when a start meets each first:

    ahead     while kernels are compiled in threads
    measured  while memory is measured: one that the threads missed
    captured  while graphs are: the same

Seconds are those of this machine and of one core; `ast` is Python and holds its lock, the other stages do not.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from dovetail.core.compose import compose
from dovetail.core.testing.no_gpu import no_gpu
from dovetail.core.worker.loader import load_rank
from dovetail.core.worker.warmup import run_warmup_steps


@dataclass
class Variant:
    name: str
    when: str
    stages: dict[str, float]
    """Seconds."""

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


def compiled(overrides: Sequence[str]) -> list[Variant]:
    """In the order of a start."""
    composition = compose([*overrides, "model.load=dummy", "engine.kv_pages=256"])
    found: list[Variant] = []
    when = "ahead"

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            stages = dict([("ast", times.ir_initialization), *times.lowering_stages])
            found.append(Variant(src.fn.__name__, when, {name: us * 1e-6 for name, us in stages.items()}))

    def quiet(phase: str, share: float | None) -> None:
        """No progress bar."""

    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope(), triton.knobs.compilation.scope(), no_gpu():
        triton.knobs.cache.dir, triton.knobs.compilation.listener = cache, listener
        rank = load_rank(composition, quiet)
        when = "measured"
        with torch.inference_mode():
            run_warmup_steps(rank.parts)
        when = "captured"
        rank.bind(rank.info.num_pages)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", help="as for run.py; a preset of one GPU")
    parser.add_argument("--each", action="store_true", help="a line for each variant, not for each kernel")
    args = parser.parse_args(argv)
    found = compiled(args.overrides)
    if args.each:
        for each in sorted(found, key=lambda each: -each.seconds):
            print(f"{each.seconds:7.2f} s  {each.when:8}  {each.name}")
    else:
        taken: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for each in found:
            taken[each.name, each.when].append(each.seconds)
        for (name, when), seconds in sorted(taken.items(), key=lambda item: -sum(item[1])):
            print(f"{sum(seconds):7.2f} s  {len(seconds):3} variants  {when:8}  {name}")
    names = dict.fromkeys(name for each in found for name in each.stages)
    parts = ", ".join(f"{name} {sum(each.stages.get(name, 0.0) for each in found):.1f}" for name in names)
    longest = max(each.seconds for each in found)
    print(f"{len(found)} variants, {sum(each.seconds for each in found):.1f} s ({parts}); the longest {longest:.2f} s")
    for when in ("ahead", "measured", "captured"):
        mine = [each.seconds for each in found if each.when == when]
        print(f"{when:8} {len(mine):3} variants, {sum(mine):.2f} s")


if __name__ == "__main__":
    main()
