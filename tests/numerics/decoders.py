"""Small random decoders of transformers that no native family covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
WINDOWED: dict[str, Any] = dict(sliding_window=24, layer_types=["sliding_attention", "full_attention"])
GPT2 = dict(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2)
OPT = {key: value for key, value in SIZES.items() if key not in ("intermediate_size", "num_key_value_heads")}

DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "opt": dict(OPT, ffn_dim=96, word_embed_proj_dim=64),
    "gpt_neox": dict(SIZES, rotary_pct=0.5),
    "phi": SIZES,
    "phi3": dict(SIZES, sliding_window=24),
    "starcoder2": dict(SIZES, sliding_window=24),
    "olmo": dict(SIZES, clip_qkv=0.5),
    "olmo2": SIZES,
    "olmo3": dict(SIZES, **WINDOWED),
    "granite": dict(
        SIZES, attention_multiplier=0.2, residual_multiplier=0.5, embedding_multiplier=3.0, logits_scaling=2.0
    ),
    "cohere": dict(SIZES, logit_scale=0.5, use_qk_norm=True),
    "cohere2": dict(SIZES, logit_scale=0.5, **WINDOWED),
    "glm": dict(SIZES, head_dim=16),
    "glm4": dict(SIZES, head_dim=16),
    "gemma": dict(SIZES, head_dim=16),
    "gemma2": dict(SIZES, head_dim=16, sliding_window=24, attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "gemma3_text": dict(SIZES, head_dim=16, **WINDOWED),
    "gpt_oss": dict(SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, **WINDOWED),
    "helium": dict(SIZES, head_dim=16),
    "nemotron": SIZES,
    "smollm3": dict(SIZES, no_rope_layers=[1, 0]),
    "exaone4": dict(SIZES, **WINDOWED),
    "persimmon": SIZES,
    "arcee": SIZES,
    "seed_oss": dict(SIZES, head_dim=16),
    "ernie4_5": dict(SIZES, head_dim=16),
    "mixtral": dict(SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "olmoe": dict(SIZES, num_experts=4, num_experts_per_tok=2),
    "granitemoe": dict(SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": dict(
        SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "hunyuan_v1_moe": dict(SIZES, head_dim=16, num_experts=4, moe_topk=2),
    "minimax_m2": dict(SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": dict(
        SIZES,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    "youtu": dict(
        SIZES,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
}
"""model_type -> arguments of its config."""


CI = [
    "gpt2",
    "opt",
    "gpt_neox",
    "olmo2",
    "nemotron",
    "mixtral",
]
"""Decoders that differ most: learned positions, matrices stored as [inputs, outputs], merged q, k and v, windows, norms
after the block, multipliers, scaled embeddings, experts, values narrower than keys. The others run in the nightly
script."""


def save_decoder(folder: Path, kind: str, seed: int = 0, **changes: Any) -> Any:
    """Save a random model with its config.json and return it, in float32. `changes`: to DECODERS."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = CONFIG_MAPPING[kind](**{**DECODERS[kind], **changes})
    torch.manual_seed(seed)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.15)
            elif name.endswith("bias"):
                weight.normal_(std=0.1)
            else:
                weight.add_(torch.rand_like(weight) * 0.2)
    model.save_pretrained(folder)
    return model
