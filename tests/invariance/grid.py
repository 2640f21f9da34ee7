"""All choices that must not change a token, and a small set of compositions that covers every pair of choices.

`python tests/invariance/grid.py` runs all combinations (hours): for a nightly job, not for CI.
"""

from __future__ import annotations

import itertools
import random
import sys

from dovetail.core.compose import installed

AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "scheduler": tuple((f"scheduler={name}",) for name in installed().options("scheduler")),
    "kv_cache": tuple((f"kv_cache={name}",) for name in installed().options("kv_cache")),
    "depth": (("engine.depth=1",), ("engine.depth=2",), ("engine.depth=4", "executor.delay=3")),
    "chunk": ((), ("engine.token_budget=64",), ("engine.token_budget=9",)),
    "drafter": (
        (),
        ("spec_decode=ngram",),
        ("spec_decode=suffix", "spec_decode.growth=2"),
        ("spec_decode=draft_model",),
        ("spec_decode=eagle3",),
        ("spec_decode=medusa",),
        ("spec_decode=draft_model", "spec_decode.tree=12"),
        ("spec_decode=eagle3", "spec_decode.tree=10"),
    ),
    "pages": ((), ("engine.kv_pages=14",), ("engine.page_size=64", "engine.kv_pages=6")),
    "batch": ((), ("engine.max_seqs=3",)),
}


def pairwise(seed: int = 0, tries: int = 40) -> list[tuple[tuple[str, ...], ...]]:
    """Build a greedy covering: each new composition has an uncovered pair, and of a random sample of such compositions
    it is the one with the most."""
    rng = random.Random(seed)
    axes = list(AXES.values())
    places = itertools.combinations(range(len(axes)), 2)
    missing = {(i, a, j, b) for i, j in places for a in axes[i] for b in axes[j]}
    chosen = []
    while missing:
        i, a, j, b = min(missing)
        samples = [[rng.choice(axis) for axis in axes] for _ in range(tries)]
        for sample in samples:
            sample[i], sample[j] = a, b
        best = max(map(tuple, samples), key=lambda choice: len(_pairs(choice) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(choice: tuple[tuple[str, ...], ...]) -> set[tuple[int, tuple[str, ...], int, tuple[str, ...]]]:
    return {(i, choice[i], j, choice[j]) for i, j in itertools.combinations(range(len(choice)), 2)}


def flatten(choice: tuple[tuple[str, ...], ...]) -> list[str]:
    return [override for part in choice for override in part]


def main() -> int:
    from test_same_tokens import REFERENCE, outputs, run

    reference = [outputs(g) for g in run(*REFERENCE)]
    failed = 0
    every = list(itertools.product(*AXES.values()))
    for i, choice in enumerate(every):
        same = [outputs(g) for g in run(*flatten(choice))] == reference
        failed += not same
        if not same or i % 20 == 0:
            print(f"{i + 1}/{len(every)} {'same' if same else 'DIFFERENT'}: {' '.join(flatten(choice))}", flush=True)
    print(f"{len(every) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
