"""Adapters on a GPU: same tokens as on a CPU with and without graphs, quantized matmuls, no hidden synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dovetail import LLM, SamplingParams
from dovetail.core.worker.runner import Runner

PROMPTS = ["def fibonacci(n):\n", "import os\n\nclass Path:\n    def __init__(self, ", "for i in range(10):\n    "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
NAMES = ("", "a", "b", "c")
Start = Callable[..., LLM]


@pytest.fixture
def start(save_lora: Callable[..., str]) -> Start:
    """Starts an engine with three adapters of different ranks."""
    load = [f"+adapter.load.{name}='{save_lora(name, seed=i, rank=8 * i)}'" for i, name in enumerate("abc", 1)]
    base = ["engine.kv_pages=500", "engine.max_seqs=12", "adapter=lora", "adapter.max_rank=32", "adapter.slots=3"]
    return lambda *overrides: LLM("tiny", overrides=[*base, *load, *overrides])


def mixed(llm: LLM) -> list[list[int]]:
    """Run every prompt with every adapter, all at once."""
    streams = [llm.stream(prompt, GREEDY, adapter=name) for name in NAMES for prompt in PROMPTS]
    first = [list(next(stream).token_ids) for stream in streams]
    return [
        tokens + [token for delta in stream for token in delta.token_ids]
        for tokens, stream in zip(first, streams, strict=True)
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["attention=sdpa"],
        ["attention=triton", "engine.cuda_graphs=false"],
        ["attention=triton", "engine.depth=2"],
        ["attention=triton", "engine.depth=2", "adapter.slots=1", "engine.token_budget=24"],
        ["attention=triton", "spec_decode=ngram"],
    ],
    ids=" ".join,
)
def test_float32_tokens_equal_those_of_a_cpu(overrides: list[str], start: Start) -> None:
    with start("engine.dtype=float32", "engine.device=cuda", *overrides) as llm:
        got = mixed(llm)
    with start("engine.dtype=float32", "engine.device=cpu") as llm:
        assert got == mixed(llm)


@pytest.mark.parametrize("quant", ["none", "fp8", "int8"])
def test_steps_with_adapters_do_not_synchronise(quant: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run under torch's sync debug mode, which raises in the engine's thread. Adapters also change the tokens."""
    import torch

    with start("engine.device=cuda", "engine.depth=2", "attention=triton", f"quant={quant}") as llm:
        expected = mixed(llm)
        execute, adapted = Runner.execute, []

        def strict(self, plan, blobs):  # type: ignore[no-untyped-def]
            torch.cuda.set_sync_debug_mode("error" if not plan.joins else "default")
            try:
                execute(self, plan, blobs)
                adapted.append(bool(self.slots.adapted))
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(Runner, "execute", strict)
        got = mixed(llm)
        assert any(adapted)
        per_adapter = [tuple(map(tuple, got[i : i + len(PROMPTS)])) for i in range(0, len(got), len(PROMPTS))]
        assert len(set(per_adapter)) == len(NAMES) and len(got) == len(expected)
