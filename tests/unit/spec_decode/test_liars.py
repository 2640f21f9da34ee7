"""Drafters whose drafts are wrong, invalid or computed from NaN change no token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from dovetail import LLM, Component, Config, SamplingParams
from dovetail.core.compose import compose, installed
from dovetail.core.compose.registry import Package, Registered, Registry
from dovetail.core.interfaces import Draft, DraftContext, Drafter


class LiarConfig(Config):
    """No options."""


class Liar(Drafter):
    """In turn: random tokens, ids outside of the vocabulary, draws from NaN, counts below 0 and above k."""

    lookahead = 4  # type: ignore[assignment]
    calls = 0

    def propose(self, ctx: DraftContext) -> Draft:
        Liar.calls += 1
        rows, vocab = len(ctx.slots_B), self.target.build.spec.vocab
        tokens_BK = torch.randint(vocab, (rows, ctx.k))
        count_B = torch.randint(-2, ctx.k + 3, (rows,))
        if self.calls % 3 == 1:
            tokens_BK = torch.randint(-(2**31), 2**31, (rows, ctx.k))
        elif self.calls % 3 == 2:
            at = ctx.k // 2
            tokens_BK[:, at] = ctx.draw(torch.full((rows, vocab), float("nan")), at)
        return Draft(tokens_BK, count_B)


@pytest.fixture
def registry() -> Iterator[Registry]:
    module = ModuleType("acme_liar")
    module.Liar = Liar  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    component = Component(
        kind="spec_decode", name="liar", config=LiarConfig, target="acme_liar:Liar", api="spec_decode/0.8"
    )
    own = installed()
    yield Registry(
        [*own.registered.values(), Registered(component, Package("acme", "1"))], own.problems, own.config_dirs
    )
    del sys.modules[module.__name__]


def tokens(registry: Registry, *words: str) -> tuple[list[list[int]], int]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(temperature=0.9, seed=2, top_p=0.9, max_tokens=20, logprobs=1),
        SamplingParams(temperature=1.0, seed=5, max_tokens=20, logit_bias={7: 2.0}, stop=")\n"),
    ]
    base = ["engine.device=cpu", "engine.dtype=float32", "engine.max_len=96", "engine.token_budget=24", *words]
    with LLM(composition=compose(base, registry=registry)) as llm:
        found = llm.generate(["def fib(n):\n", "import os\n\nclass Path:\n", "for i in range(10):\n"], params)
        return [generation.token_ids for generation in found], llm.engine.counters.drafted


def test_they_change_no_token(registry: Registry) -> None:
    expected, _ = tokens(registry)
    found, drafted = tokens(registry, "spec_decode=liar", "engine.depth=2")
    assert found == expected and drafted > 20 and Liar.calls > 6
