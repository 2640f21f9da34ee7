"""Placements of experts over two GPUs, in CUDA graphs and without: the tokens of one CPU process."""

from __future__ import annotations

import pytest
import torch

from dovetail import LLM, SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROMPTS = [[7, 300, 21, 4], [9] * 40, [500, 2, 77]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TP2 = ("executor=multiproc", "engine.tp=2", "engine.device=cuda", "attention=triton", "engine.depth=2")


def tokens(*overrides: str) -> list[list[int]]:
    small = ["engine.dtype=float32", "engine.max_len=96", "engine.max_seqs=8", "engine.token_budget=32"]
    with LLM(overrides=["model=small_moe", *small, *overrides]) as llm:
        return [g.token_ids for g in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "overrides",
    [
        ("experts=tensor",),
        ("experts=whole",),
        ("experts=gather",),
        ("experts=all_to_all",),
        ("experts=all_to_all", "experts.capacity=0.3", "experts.check_rows=8", "engine.cuda_graphs=false"),
        ("experts=gather", "collective=symm_mem"),
        ("experts=whole", "collective=symm_mem"),
        ("experts=all_to_all", "engine.overlap_tokens=16", "engine.graph_tokens=0"),
        ("experts=whole", "experts.redundant=4", "experts.rebalance=2"),
        ("experts=gather", "experts.rebalance=1", "collective=symm_mem"),
        ("experts=all_to_all", "experts.redundant=8", "experts.rebalance=1"),
    ],
    ids=" ".join,
)
def test_two_gpus_equal_one_cpu(overrides: tuple[str, ...]) -> None:
    assert tokens(*TP2, *overrides) == tokens("engine.device=cpu")
