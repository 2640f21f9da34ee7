"""Tensor parallel over two GPUs and NCCL: the tokens of one CPU process, and a death that ends everything in order."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from dovetail import LLM, SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROMPTS = ["def fibonacci(n):\n", "import os\n\nclass Path:\n", "for i in range(10):\n    "]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=48, logprobs=1, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=48, repetition_penalty=1.1),
]
TP2 = ["executor=multiproc", "engine.tp=2", "engine.device=cuda", "engine.dtype=float32", "engine.max_len=256"]


def tokens(*overrides: str) -> list[list[int]]:
    with LLM("tiny", overrides=overrides) as llm:
        return [g.token_ids for g in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "overrides",
    [
        ["collective=nccl"],
        ["collective=ordered"],
        ["engine.depth=2", "spec_decode=ngram"],
        ["attention=triton", "engine.depth=2", "engine.max_seqs=8"],
        ["attention=triton", "engine.depth=2", "engine.max_seqs=8", "engine.cuda_graphs=false"],
    ],
    ids=str,
)
def test_two_gpus_equal_one_cpu(overrides: list[str]) -> None:
    assert tokens(*TP2, *overrides) == tokens("engine.device=cpu", "engine.max_len=256")


def test_a_killed_rank_ends_the_engine_with_its_name() -> None:
    llm = LLM("tiny", overrides=[*TP2, "engine.depth=2"])
    (worker,) = llm.engine.executor.worker_pids  # type: ignore[attr-defined]
    llm.generate(PROMPTS, PARAMS)
    timer = threading.Timer(0.5, os.kill, (worker, signal.SIGKILL))
    timer.start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1"):
        while time.monotonic() - began < 20:
            llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    assert time.monotonic() - began < 10
    llm.close()
