"""A target with a layer for multi-token prediction, for the contract suite of drafters."""

from __future__ import annotations

from typing import Any

from dovetail.core.compose import compose
from dovetail.core.interfaces import Model, ModelSource, TargetView
from dovetail.core.testing.model_driver import build_context

FIRST_GROUP = 3
SHAPE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
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
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_nextn_predict_layers": 1,
}


def target_with_mtp(vocab: int, slots: int, max_len: int) -> TargetView:
    """Return a small DeepSeek V3 with random weights."""
    shape = ", ".join(f"{key}: {value}" for key, value in {**SHAPE, "vocab_size": vocab, "q_lora_rank": "null"}.items())
    part = compose(["model=llama", "model.load=dummy", f"model.hf={{{shape}}}"]).part("model")
    of_kind: Any = part.target()
    model: Model = of_kind(part.config, build_context(of_kind.spec(part.config), max_len=2 * max_len))
    model.init_dummy(1)
    return TargetView(
        build=model.build,
        source=ModelSource(None, dummy=True),
        max_seqs=slots,
        max_len=max_len,
        first_group=FIRST_GROUP,
        embed=model.embed,
        # Logits of random heads are nearly equal: draws would hardly depend on states.
        logits=lambda states_BC: 50 * model.logits(states_BC),
        mtp_layer=model.mtp_layer,
    )
