"""Tensor parallelism over two and over eight processes gives the tokens of one process."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from dovetail import LLM, RequestError, SamplingParams

PROMPTS = ["def fib(n):\n", "import os\n\nclass Path:\n", "for i in range(10):\n    print(i)\nfor "]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=24, n=2),
    SamplingParams(temperature=0.0, max_tokens=32, repetition_penalty=1.1, logprobs=1, prompt_logprobs=2),
]


def tokens(*overrides: str) -> list[list[list[int]]]:
    with LLM("tiny", overrides=["engine.device=cpu", "engine.dtype=float32", "engine.max_len=128", *overrides]) as llm:
        return [[c.token_ids for c in g.completions] for g in llm.generate(PROMPTS, PARAMS)]


# Long steps are sharded over the ranks by rows, short steps are not.
MIXED = ("collective.shard_rows=12", "engine.depth=2", "spec_decode=ngram", "engine.kv_pages=16")
OWN_LOGITS = (
    "{medusa_num_heads: 4, medusa_num_layers: 1, medusa_shared_head: false, hidden_size: 256, vocab_size: 4096}"
)
CHOICES = {"nccl, sharded": ["collective=nccl", *MIXED]}
if "DOVETAIL_NIGHTLY" in os.environ:
    CHOICES |= {
        "nccl": ["collective=nccl", "spec_decode=draft_model"],
        "nccl, trees": ["spec_decode=draft_model", "spec_decode.tree=12", "spec_decode.tree_shape=sequoia"],
        "nccl, sharded, features": ["collective=nccl", "collective.shard_rows=12", "spec_decode=eagle3"],
        "nccl, sharded, whole features": [
            *("collective=nccl", "collective.shard_rows=12", "spec_decode=eagle3", "spec_decode.tp=1")
        ],
        "nccl, whole draft model": ["spec_decode=draft_model", "spec_decode.tp=1", "spec_decode.tree=12"],
        "nccl, heads": [
            "collective=nccl",
            "spec_decode=medusa",
            "spec_decode.load=dummy",
            f"spec_decode.hf={OWN_LOGITS}",
        ],
        "ordered, sharded": ["collective=ordered", *MIXED],
    }


@pytest.mark.parametrize("overrides", CHOICES.values(), ids=CHOICES)
def test_two_processes_equal_one(overrides: list[str]) -> None:
    assert tokens("executor=multiproc", "engine.tp=2", *overrides) == tokens()


@pytest.mark.nightly
def test_eight_processes_equal_one() -> None:
    """There are twice as many processes as kv heads: each head is on two ranks."""
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    found = []
    for overrides in ((), ("executor=multiproc", "engine.tp=8")):
        with LLM(
            "tiny", overrides=["engine.device=cpu", "engine.dtype=float32", "engine.max_len=64", *overrides]
        ) as llm:
            found.append([g.token_ids for g in llm.generate(PROMPTS, greedy)])
    assert found[0] == found[1]


@pytest.mark.nightly
def test_adapters_over_two_processes_equal_one(save_lora: Callable[..., str]) -> None:
    """Each rank reads the adapters itself, while steps run, into one slot; all ranks refuse an invalid one."""
    first, second, wide = (save_lora(name, seed=seed, rank=seed * 8) for seed, name in enumerate("abc", 1))

    def tokens(*overrides: str) -> list[list[int]]:
        base = ["engine.device=cpu", "engine.dtype=float32", "engine.max_len=128", "adapter=lora", "adapter.slots=1"]
        with LLM("tiny", overrides=[*base, f"+adapter.load.first='{first}'", *overrides]) as llm:
            running = llm.stream(PROMPTS[0], PARAMS[0], adapter="first")
            found = [list(next(running).token_ids)]
            llm.load_adapter("second", second)
            with pytest.raises(RequestError, match="rank 24"):
                llm.load_adapter("wide", wide)
            llm.unload_adapter("first")
            with pytest.raises(RequestError, match="'first' is not loaded; there is second"):
                llm.generate(PROMPTS[0], PARAMS[0], adapter="first")
            found += [llm.generate(PROMPTS[1], PARAMS[0], adapter=name)[0].token_ids for name in ("second", "")]
            found[0] += [token for delta in running for token in delta.token_ids]
            llm.load_adapter("first", first)
            found += [g.token_ids for g in llm.generate(PROMPTS, PARAMS[0], adapter="first")]
            return found

    expected = tokens()
    assert expected[0] == expected[3] and expected[1] != expected[2]
    assert tokens("executor=multiproc", "engine.tp=2", "engine.depth=2") == expected
