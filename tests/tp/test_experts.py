"""Placements of experts over processes give the tokens of one rank. They run nightly; in CI, ranks are threads
(tests/numerics/test_tensor_parallel.py, tests/contract/experts)."""

from __future__ import annotations

import pytest
from lane_threads import Work, alone

from dovetail import LLM, SamplingParams

PROMPTS = [[7, 300, 21, 4], [9] * 40, [500, 2, 77]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, n=2),
]
pytestmark = pytest.mark.nightly
CHOICES = [
    ("all_to_all", 2, ("experts.capacity=0.9", "experts.check_rows=8", "engine.depth=2")),
    *((name, 2, ()) for name in ("tensor", "whole", "gather", "all_to_all")),
    *((name, 4, ("engine.ep=2",)) for name in ("whole", "gather", "all_to_all")),
    ("gather", 4, ("collective.shard_rows=8",)),
    ("whole", 4, ("collective=ordered",)),
    ("all_to_all", 2, ("engine.overlap_tokens=16",)),
    ("gather", 4, ("experts.redundant=8",)),
    ("whole", 2, ("quant=none", "engine.overlap_tokens=16", "experts.redundant=2", "experts.rebalance=1")),
]


def tokens(*overrides: str) -> list[list[list[int]]]:
    small = ["engine.device=cpu", "engine.max_len=64", "engine.kv_pages=64", "engine.token_budget=32"]
    with LLM(overrides=["model=small_moe", *small, *overrides]) as llm:
        return [[c.token_ids for c in g.completions] for g in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    return tokens()


@pytest.mark.parametrize(("placement", "ranks", "more"), CHOICES)
def test_processes_equal_one(placement, ranks, more, expected):
    """Prompts are chunked: the second one is longer than a step."""
    found = tokens(f"experts={placement}", "executor=multiproc", f"engine.tp={ranks}", *more)
    assert found == expected
    assert len({tuple(ids) for group in found for ids in group}) == 4


@pytest.mark.parametrize(
    ("placement", "ranks", "more"),
    [
        ("whole", 2, ("experts.redundant=4", "experts.rebalance=2", "engine.depth=2")),
        ("whole", 4, ("engine.ep=2", "experts.rebalance=1")),
        ("gather", 4, ("experts.redundant=4", "experts.rebalance=1", "spec_decode=ngram")),
        ("all_to_all", 4, ("experts.redundant=16", "experts.rebalance=3", "engine.depth=2")),
        ("whole", 2, ("experts.redundant=4", "experts.rebalance=2", "quant=int4", "quant.group=32")),
    ],
)
def test_moves_change_no_token(placement: str, ranks: int, more: tuple[str, ...]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    work = [Work(n, prompt, params) for n, prompt in enumerate(PROMPTS)]
    options = "model=small_moe", "engine.token_budget=32"
    moving = alone(work, *options, f"experts={placement}", "executor=multiproc", f"engine.tp={ranks}", *more)
    assert moving.moved > 3 and moving.loads
    quantizer = [option for option in more if option.startswith("quant")]
    assert moving.tokens == alone(work, *options, *quantizer).tokens
