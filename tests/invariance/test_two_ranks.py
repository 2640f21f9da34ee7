"""Tensor parallel over two processes gives the tokens of one process."""

from __future__ import annotations

import pytest

from dovetail import LLM, SamplingParams

PROMPTS = ["def fib(n):\n", "import os\n\nclass Path:\n", "for i in range(10):\n    print(i)\nfor "]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=24, n=2),
    SamplingParams(temperature=0.0, max_tokens=32, repetition_penalty=1.1, logprobs=1, prompt_logprobs=2),
]


def tokens(*overrides: str) -> list[list[list[int]]]:
    with LLM("tiny", overrides=["engine.device=cpu", "engine.dtype=float32", "engine.max_len=128", *overrides]) as llm:
        return [[c.token_ids for c in g.completions] for g in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "overrides",
    [["collective=nccl"], ["collective=ordered", "engine.depth=2", "spec_decode=ngram", "engine.kv_pages=16"]],
    ids=["nccl", "ordered"],
)
def test_two_processes_equal_one(overrides: list[str]) -> None:
    assert tokens("executor=multiproc", "engine.tp=2", *overrides) == tokens()
