"""Contract suite for drafts of the checkpoint's layer for multi-token prediction, over a small DeepSeek V3."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dovetail.core.compose import Selected
from dovetail.core.interfaces import Drafter, Hidden, ModelSource, TargetView
from dovetail.core.testing.executor_scripts import small_composition
from dovetail.core.testing.model_driver import build_context
from dovetail.core.testing.spec_decode import FIRST_GROUP, DrafterContract
from dovetail.plugins.model.config import LlamaConfig
from dovetail.plugins.model.llama.decoder import Llama
from dovetail.plugins.spec_decode.mtp import MTP

from ..faults import rejects, suite, variant

pytestmark = pytest.mark.nightly

VOCAB = 19
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_nextn_predict_layers": 1,
}


@cache
def selected(*words: str) -> Selected:
    return small_composition("spec_decode=mtp", "spec_decode.lookahead=3", *words).part("spec_decode")


def loud(drafter: Any) -> Any:
    """Multiply random weights, whose drafts would else hardly depend on hidden states."""
    bind = drafter.bind

    def bind_loudly(view: TargetView) -> None:
        bind(view)
        layer = drafter.layer.layer
        for linear in (layer.pair, layer.block.attention.down, layer.block.attention.o):
            linear.params["weight"].mul_(20)

    drafter.bind = bind_loudly
    return drafter


class TestMTP(DrafterContract):
    slots, vocab = 3, VOCAB

    def make(self) -> Drafter:
        return loud(selected().build())

    def target(self, slots: int) -> TargetView:
        config = LlamaConfig(hf=DEEPSEEK_V3, load="dummy")
        model = Llama(config, build_context(Llama.spec(config), max_len=2 * self.max_len))
        model.init_dummy(1)
        return TargetView(
            build=model.build,
            source=ModelSource(None, dummy=True),
            max_seqs=slots,
            max_len=self.max_len,
            first_group=FIRST_GROUP,
            embed=model.embed,
            # Random heads are nearly uniform: draws would hardly depend on states.
            logits=lambda states_BC: 50 * model.logits(states_BC),
            mtp_layer=model.mtp_layer,
        )


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        # After a prefix hit it lacks the state of the last cached token.
        ({"follows_features": False}, "test_pages_of_a_shared_prefix_serve_as_its_own"),
        # It takes the state of a token for the one before it.
        ({"features_of": lambda self, hidden: (_later(hidden),)}, "test_chunks_of_a_prompt_change_no_draft"),
    ],
)
def test_a_drafter_that_loses_states_is_rejected(fault: dict[str, Any], test: str) -> None:
    def make(self: DrafterContract) -> Drafter:
        # Probabilities are compared, too.
        return loud(variant(MTP, "Broken", **fault)(selected("spec_decode.verify=rejection").config))

    assert rejects(suite(TestMTP, make=make), test)


def _later(hidden: Hidden) -> torch.Tensor:
    return hidden.states.roll(1, 0)
