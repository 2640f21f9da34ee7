"""Bundled drafters draft well on text that they were not trained on (examples/train_tiny)."""

from __future__ import annotations

import pytest

from dovetail import LLM, SamplingParams
from dovetail.core.compose import compose
from dovetail.core.engine.cost import drafter_facts
from dovetail.core.errors import ConfigError
from dovetail.core.held_out import held_out_texts
from dovetail.plugins.model.llama.families import spec_of

LEAST = {"eagle": 2.1, "eagle3": 2.1, "medusa": 1.1, "mtp": 1.5}
"""Tokens of a row and step, of 5, 5, 5 and 2 that are possible. Random weights bring 1.0."""


@pytest.mark.parametrize("drafter", LEAST)
def test_tokens_of_a_step_on_held_out_text(drafter: str) -> None:
    text = next(iter(held_out_texts("the text of this test")))
    prompts = [text[at : at + 300] for at in range(0, 2400, 400)]
    fixed = ["engine.drafts=always", "engine.device=cpu", "engine.max_len=256", "engine.kv_pages=128"]
    with LLM("tiny_moe" if drafter == "mtp" else "tiny", overrides=[f"spec_decode={drafter}", *fixed]) as llm:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
        counters = llm.counters
    tokens = 1 + sum(counters.accepted_at) / counters.reached_at[0]
    assert tokens > LEAST[drafter]


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "medusa"])
def test_a_bundled_head_is_only_for_the_bundled_model(drafter: str) -> None:
    composition = compose(["app=plan", f"spec_decode={drafter}", "model=small_moe"])
    spec = spec_of(composition.part("model").config)
    with pytest.raises(ConfigError, match=r"a hidden size of 256 and .*set spec_decode\.path"):
        drafter_facts(composition, spec)
