"""Every layout of the GPUs at hand gives the tokens of one GPU: tensor parallel, replicas, replicas of several ranks.

The first thing to run on a machine of 4 or 8 GPUs, after tests/gpu/test_symm_mem.py:

    pytest -q tests/gpu/test_symm_mem.py tests/gpu/test_many_gpus.py tests/gpu/test_two_gpus.py
"""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.frontend.engines import EngineProcesses
from dovetail.plugins.collective.symm_mem.reduce import Reducer

from .models import dummy_llama

GPUS = torch.cuda.device_count()
MOST = next((tp for tp in (8, 4, 2) if tp <= GPUS), 1)
"""Largest number of ranks that divides the heads."""
pytestmark = [pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"), pytest.mark.timeout(300)]
MODEL = dummy_llama(
    "engine.device=cuda",
    "engine.dtype=float32",
    "engine.kv_pages=2000",
    "engine.max_seqs=12",
    "engine.token_budget=512",
    "engine.depth=2",
    "attention=triton",
    vocab_size=509,  # The last of 8 ranks has fewer tokens than the others.
    hidden_size=512,
    num_hidden_layers=4,
    max_position_embeddings=4096,
)
"""All steps run as graphs: chunks, mixed steps and decode steps."""
PROMPTS = [[(7 * n + i * i) % 509 for i in range(3 + 130 * n)] for n in range(10)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=2, top_k=40, top_p=0.9, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, repetition_penalty=1.2),
]
"""Ranks exchange candidates for the first two, and logits for the others."""


def run(llm: LLM) -> list[list[int]]:
    return [g.token_ids for g in llm.generate(PROMPTS, [PARAMS[n % len(PARAMS)] for n in range(len(PROMPTS))])]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(overrides=MODEL) as llm:
        return run(llm)


def ranks(tp: int, collective: str, *options: str) -> list[str]:
    return ["executor=multiproc", f"engine.tp={tp}", f"collective={collective}", *options]


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("algorithm", ["measured", "one_shot", "two_shot"])
def test_ranks_give_the_tokens_of_one(
    tp: int, algorithm: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if tp > GPUS:
        pytest.skip(f"needs {tp} GPUs")
    called: set[str] = set()
    for name in ("boundary", "argmax"):
        method = getattr(Reducer, name)

        def recorded(*args: object, name: str = name, method: object = method) -> object:
            called.add(name)
            return method(*args)  # type: ignore[operator]

        monkeypatch.setattr(Reducer, name, recorded)
    with LLM(overrides=[*MODEL, *ranks(tp, "symm_mem", f"collective.algorithm={algorithm}")]) as llm:
        # Prompts of the second run begin in the cache.
        assert [run(llm) for _ in range(2)] == [expected] * 2
    # Rank 0 is in this process. With `measured`, NCCL may be the faster one for sums.
    assert called >= ({"argmax"} if algorithm == "measured" else {"argmax", "boundary"})


@pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")
@pytest.mark.parametrize("algorithm", ["measured", "two_shot"])
def test_replicas_of_several_ranks_give_the_tokens_of_one(algorithm: str, expected: list[list[int]]) -> None:
    options = ranks(GPUS // 2, "symm_mem", f"collective.algorithm={algorithm}", "engine.dp=2", "router=round_robin")
    with LLM(overrides=[*MODEL, *options]) as llm:
        assert isinstance(llm._engines, EngineProcesses)
        assert [run(llm) for _ in range(3)] == [expected] * 3
        assert all(one["steps"] for one in llm._engines.check())


def test_a_replica_on_every_gpu_gives_the_tokens_of_one(expected: list[list[int]]) -> None:
    with LLM(overrides=[*MODEL, f"engine.dp={GPUS}", "router=round_robin"]) as llm:
        assert [run(llm) for _ in range(3)] == [expected] * 3
        assert all(one["steps"] for one in llm._engines.check())


@pytest.mark.parametrize("collective", ["nccl", "symm_mem"])
def test_half_batches_give_the_tokens_of_whole_ones(collective: str, expected: list[list[int]]) -> None:
    """Sums run on a dedicated stream and overlap with matmuls that fill the SMs."""
    options = ["engine.overlap_tokens=64", "engine.graph_tokens=0"]
    with LLM(overrides=[*MODEL, *ranks(MOST, collective, *options)]) as llm:
        assert [run(llm) for _ in range(2)] == [expected] * 2


def test_a_killed_rank_ends_graphs_that_wait_for_it() -> None:
    with LLM(overrides=[*MODEL, *ranks(MOST, "symm_mem", "collective.algorithm=two_shot")]) as llm:
        victim = llm.engine.executor.worker_pids[-1]  # type: ignore[attr-defined]
        run(llm)
        threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank"):
            while time.monotonic() - began < 60:
                run(llm)
        assert time.monotonic() - began < 30
