"""The whole engine on a GPU against the CPU reference, with the bundled model."""

from __future__ import annotations

import pytest

from dovetail import LLM, SamplingParams

PROMPTS = [
    "def fibonacci(n):\n",
    "import os\n\nclass Path:\n    def __init__(self, ",
    "for i in range(10):\n    ",
    "def read_json(path):\n    with open(",
    "class Node:\n",
    '"""Return the',
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


def tokens(*overrides: str) -> list[list[int]]:
    with LLM("tiny", overrides=overrides) as llm:
        return [g.token_ids for g in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    return tokens("engine.device=cpu", "engine.dtype=float32")


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_float32_tokens_equal_the_cpu_reference(reference: list[list[int]], depth: int, drafter: str) -> None:
    got = tokens("engine.device=cuda", "engine.dtype=float32", f"engine.depth={depth}", f"spec_decode={drafter}")
    assert got == reference


def test_chunks_and_preemption_change_nothing(reference: list[list[int]]) -> None:
    got = tokens(
        "engine.device=cuda",
        "engine.dtype=float32",
        "engine.depth=2",
        "engine.token_budget=16",
        "engine.kv_pages=14",
        "engine.max_len=128",
    )
    assert got == reference


def test_bfloat16_stays_close(reference: list[list[int]]) -> None:
    """Not equal: 16-bit near-ties fall either way. But the first tokens, before paths part, agree nearly always."""
    got = tokens("engine.device=cuda", "engine.dtype=bfloat16")
    agree = sum(
        a == b for ours, theirs in zip(got, reference, strict=True) for a, b in zip(ours[:8], theirs[:8], strict=True)
    )
    assert agree >= 0.8 * 8 * len(PROMPTS)


def test_int8_runs_on_the_gpu(reference: list[list[int]]) -> None:
    got = tokens("engine.device=cuda", "engine.dtype=bfloat16", "quant=int8")
    agree = sum(
        a == b for ours, theirs in zip(got, reference, strict=True) for a, b in zip(ours[:4], theirs[:4], strict=True)
    )
    assert agree >= 0.6 * 4 * len(PROMPTS)


def test_no_step_waits_for_the_device() -> None:
    """Decode steps under torch's sync debug mode: any hidden synchronisation raises in the engine's thread."""
    import torch

    with LLM("tiny", overrides=["engine.device=cuda", "engine.depth=2"]) as llm:
        llm.generate(PROMPTS, GREEDY)
        runner = llm.engine.executor._runner  # type: ignore[attr-defined]
        execute = runner.execute

        def strict(plan, blobs):  # type: ignore[no-untyped-def]
            torch.cuda.set_sync_debug_mode("error" if not plan.joins else "default")
            try:
                execute(plan, blobs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.execute = strict
        llm.generate(PROMPTS, GREEDY)
