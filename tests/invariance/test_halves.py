"""A step run as two halves (engine.overlap_tokens) gives the same tokens as one run at once: with chunked prompts,
cached prefixes, decode rows, drafts and adapters, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dovetail import LLM, SamplingParams
from dovetail.core.interfaces import Layers
from dovetail.plugins.model.llama.decoder import Llama

PREFIX = "def fib(n):\n    if n < 2:\n        return n\n"
PROMPTS = [PREFIX + "    return fib(", "import os\n\nclass Path:\n", PREFIX + "\ndef fact(n):\n", "x"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=9, n=2),
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, prompt_logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=10, repetition_penalty=1.2),
]
BASE = ["engine.device=cpu", "engine.dtype=float32", "engine.max_len=128", "engine.max_seqs=4"]
HALVES = "engine.overlap_tokens=2"


def tokens(*overrides: str, adapters: tuple[str, ...] = ("", "")) -> list[list[list[int]]]:
    """Return the tokens of one run per adapter. By default no run has one, and the second run finds prefixes in the
    cache."""
    with LLM("tiny", overrides=[*BASE, *overrides]) as llm:
        found = [g for name in adapters for g in llm.generate(PROMPTS, PARAMS, adapter=name)]
        return [[c.token_ids for c in g.completions] for g in found]


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of tokens of each half that ran."""
    parts: list[int] = []
    layers = Llama.layers

    def counted(self: Llama, embeds_TC, ctx, taps=()) -> Layers:  # type: ignore[no-untyped-def]
        parts.append(len(embeds_TC))
        return layers(self, embeds_TC, ctx, taps)

    monkeypatch.setattr(Llama, "layers", counted)
    return parts


def test_halves_change_no_token(cut: list[int]) -> None:
    overrides = [
        "engine.token_budget=24",
        "kv_cache=radix",
        "spec_decode=ngram",
        "engine.kv_pages=24",
        "engine.depth=2",
    ]
    expected = tokens(*overrides)
    steps = len(cut)
    assert tokens(*overrides, HALVES) == expected
    assert len(cut) - steps > 1.5 * steps, "hardly a step was cut"


@pytest.mark.nightly
def test_each_half_runs_with_its_own_adapters(save_lora: Callable[..., str]) -> None:
    overrides = ["engine.token_budget=24", "adapter=lora", f"+adapter.load.a='{save_lora('a', seed=1)}'"]
    with LLM("tiny", overrides=[*BASE, *overrides]) as whole, LLM("tiny", overrides=[*BASE, *overrides, HALVES]) as cut:
        found = []
        for llm in (whole, cut):
            streams = [llm.stream(prompt, PARAMS[0], adapter=name) for prompt in PROMPTS[:2] for name in ("a", "")]
            begun = [list(next(stream).token_ids) for stream in streams]
            found.append(
                [[*ids, *(t for d in rest for t in d.token_ids)] for ids, rest in zip(begun, streams, strict=True)]
            )
        assert found[0] == found[1]
        assert found[0][0] != found[0][1]


@pytest.mark.nightly
def test_halves_on_two_ranks_equal_one() -> None:
    """Halves of at least eight tokens are sharded over the ranks by rows; smaller ones are not."""
    ranks = ["executor=multiproc", "engine.tp=2", "engine.depth=2", "collective.shard_rows=8"]
    assert tokens("engine.token_budget=20", HALVES, *ranks, adapters=("",)) == tokens(adapters=("",))
