"""Drafts by some of the target's layers (spec_decode=layer_skip)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dovetail import LLM, SamplingParams
from dovetail.core.compose import compose
from dovetail.core.engine.checks import check_fit
from dovetail.core.engine.cost import bind_cost
from dovetail.core.errors import ConfigError, DovetailError
from dovetail.core.interfaces import ForwardContext, Row
from dovetail.core.interfaces.plan import SAMPLE
from dovetail.core.testing.executor_scripts import SMALL_LLAMA, save_adapter, small_composition, small_runner
from dovetail.core.worker.batch import Rows, build_batch
from dovetail.plugins.spec_decode import layer_skip
from dovetail.plugins.spec_decode.layer_skip import skipped_layers

SANDWICH = [
    "model=llama",
    "model.load=dummy",
    f"model.hf={SMALL_LLAMA}".replace("LlamaForCausalLM", "Gemma2ForCausalLM"),
]
"""A model whose blocks end in norms."""
SMALL = ["engine.device=cpu", "engine.max_len=96", "engine.max_seqs=4"]
PROMPTS = ["def f(x):\n", "class Stack:\n    def push(self, item):\n        self.items.append(item)\n", "import os\n"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=24, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=24, top_k=20, logprobs=1, ignore_eos=True),
]


@pytest.fixture(scope="module")
def expected() -> Iterator[list[list[int]]]:
    with LLM("tiny", overrides=SMALL) as plain:
        yield [result.token_ids for result in plain.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("overrides", [["engine.depth=2"], ["engine.kv_pages=14", "engine.token_budget=9"]])
def test_the_text_is_that_of_plain_decoding(expected: list[list[int]], overrides: list[str]) -> None:
    """In chunks, with preemption, and a second time with prefixes in the cache."""
    skip = ["spec_decode=layer_skip", "spec_decode.share=0.75", "spec_decode.lookahead=3"]
    with LLM("tiny", overrides=[*SMALL, *skip, *overrides]) as llm:
        for _ in range(2):
            assert [result.token_ids for result in llm.generate(PROMPTS, PARAMS)] == expected
        assert llm.engine.counters.accepted > 0
        assert llm.engine.kv.stats().owned == 0


def test_layers_are_left_out() -> None:
    """A pass without the second layer is the pass of a model that has the first one alone."""
    runner = small_runner()
    model = runner.parts.model
    rows = Rows([Row(0, 1, 1, 3, 3, 0, SAMPLE)])
    runner.state.tables[0][0] = 1
    batch = build_batch(
        rows, torch.tensor([0]), torch.tensor([0, 3]), runner.state, runner.parts.groups, runner.parts.attention
    )
    ctx = ForwardContext(batch.tokens.positions_T, batch.attn, batch.tokens.live_T)
    embeds_TC = torch.randn(3, model.build.spec.hidden)
    with torch.inference_mode():
        skipped = model.forward(embeds_TC, replace(ctx, skip=frozenset({1}))).states
        whole = model.forward(embeds_TC, ctx).states
        del model.blocks[1:]
        assert torch.equal(skipped, model.forward(embeds_TC, ctx).states)
    assert not torch.allclose(skipped, whole)
    runner.close()


def test_a_row_drafts_with_its_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of all layers are those of the target, if the drafting passes use the row's adapter."""
    monkeypatch.setattr(layer_skip, "skipped_layers", lambda share, layers: frozenset())
    save_adapter(tmp_path / "x", 1)
    adapter = ["adapter=lora", f"adapter.load={{x: {tmp_path / 'x'}}}"]
    params = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
    with LLM(composition=small_composition("spec_decode=layer_skip", *adapter)) as llm:
        adapted, base = (llm.generate([[5, 6, 7]], params, adapter=name)[0].token_ids for name in ("x", ""))
        assert llm.engine.counters.accepted == llm.engine.counters.drafted > 24
    assert adapted != base


@pytest.mark.parametrize(
    ("share", "layers", "skipped"),
    [(0.5, 8, {1, 3, 4, 6}), (0.99, 8, {6}), (0.01, 4, {1, 2, 3}), (0.5, 2, {1}), (0.75, 4, {1})],
)
def test_kept_layers_are_spread(share: float, layers: int, skipped: set[int]) -> None:
    found = skipped_layers(share, layers)
    assert len(found) == len(skipped) and 0 not in found
    assert len(skipped) == layers - 1 or layers - 1 not in found


def test_bad_input_is_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match="one layer"):
        skipped_layers(0.5, 1)
    with pytest.raises(DovetailError, match="spec_decode=layer_skip .*skips_layers"):
        check_fit(compose(["app=generate", "spec_decode=layer_skip", *SANDWICH, "engine.device=cpu"]))


def test_its_time_is_predicted() -> None:
    words = ["app=plan", "cost=h200", "model=llama3_8b", "spec_decode=layer_skip"]
    composition = compose([*words, "spec_decode.share=0.25"])
    cost = bind_cost(composition, composition.part("model").facts(), "cuda")
    assert cost is not None
    step = cost.decode_seconds(1, 1000)
    assert 0.8 * step < cost.draft_seconds(1, 4, 1000) < 1.6 * step
