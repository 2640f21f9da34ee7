"""Tensor parallel over two GPUs and NCCL: the tokens of one CPU process, and an orderly end if a rank dies."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.compose.cli import main
from dovetail.core.frontend.engines import EngineProcesses

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


def on_replicas(*overrides: str) -> list[list[int]]:
    """Return the tokens of two or more replicas, all of which ran steps."""
    with LLM("tiny", overrides=overrides) as llm:
        assert isinstance(llm._engines, EngineProcesses)
        found = [g.token_ids for g in llm.generate(PROMPTS * 4, PARAMS * 4)]
        assert all(one["steps"] for one in llm._engines.check())
    assert found[:3] == found[3:6] == found[6:9] == found[9:]
    return found[:3]


REPLICAS = ["engine.device=cuda", "engine.dtype=float32", "engine.max_len=256", "router=round_robin"]


@pytest.mark.parametrize("graphs", ["true", "false"])
def test_a_replica_on_each_gpu_equals_one_cpu(graphs: str) -> None:
    parts = ["attention=triton", "engine.depth=2", "engine.max_seqs=8", f"engine.cuda_graphs={graphs}"]
    assert on_replicas(*REPLICAS, *parts, "engine.dp=2") == tokens("engine.device=cpu", "engine.max_len=256")


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_two_replicas_of_two_ranks_equal_one_cpu() -> None:
    parts = ["attention=triton", "executor=multiproc", "engine.tp=2", "engine.max_seqs=8"]
    assert on_replicas(*REPLICAS, *parts, "engine.dp=2") == tokens("engine.device=cpu", "engine.max_len=256")


def test_replicas_take_separate_gpus_and_no_more_than_there_are(capfd: pytest.CaptureFixture[str]) -> None:
    gpus = torch.cuda.device_count()
    before = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(gpus)]
    with LLM("tiny", overrides=[*REPLICAS, "engine.dp=2", "engine.kv_pages=20000"]):
        taken = [free - torch.cuda.mem_get_info(gpu)[0] for gpu, free in enumerate(before)]
    assert min(taken[:2]) > 300 << 20 and max(taken[:2]) < 1.2 * min(taken[:2]), taken
    assert all(abs(amount) < 100 << 20 for amount in taken[2:]), taken
    assert main([*REPLICAS, f"engine.dp={gpus + 1}"]) == 2
    assert f"replica {gpus} failed: engine.device=cuda: rank 0 needs GPU {gpus}" in capfd.readouterr().err


def test_the_error_names_a_killed_rank() -> None:
    with LLM("tiny", overrides=[*TP2, "engine.depth=2"]) as llm:
        (worker,) = llm.engine.executor.worker_pids  # type: ignore[attr-defined]
        llm.generate(PROMPTS, PARAMS)
        timer = threading.Timer(0.5, os.kill, (worker, signal.SIGKILL))
        timer.start()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1"):
            while time.monotonic() - began < 20:
                llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
        assert time.monotonic() - began < 10
