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
EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
ROUTED: dict[str, Any] = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
)
MIXED: dict[str, Any] = dict(mlp_layer_types=["dense", "sparse"])
LATENT = dict(
    SIZES,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)
"""Compressed attention."""
SCALED_QUERIES = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    original_max_position_embeddings=16,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)
"""Ministral 3: queries are multiplied by a factor that grows with the position."""
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
    "deepseek_v3": dict(LATENT, **ROUTED),
    "youtu": LATENT,
    # Experts beside shared ones, and layers with windows.
    "afmoe": dict(SIZES, head_dim=16, **EXPERTS, moe_intermediate_size=32, num_dense_layers=1, **WINDOWED),
    "aria_text": dict(SIZES, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    "axk1": dict(LATENT, **ROUTED, **MIXED),
    "cohere2_moe": dict(SIZES, head_dim=16, logit_scale=0.5, **EXPERTS, **WINDOWED),
    "dots1": dict(SIZES, head_dim=16, n_shared_experts=1, **ROUTED, **WINDOWED),
    "ernie4_5_moe": dict(
        SIZES, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=1, moe_layer_end_index=1
    ),
    "exaone_moe": dict(
        SIZES, head_dim=16, **EXPERTS, moe_intermediate_size=32, n_group=1, topk_group=1, **MIXED, **WINDOWED
    ),
    "flex_olmo": dict(SIZES, **EXPERTS),
    "glm4_moe_lite": dict(LATENT, **ROUTED, **MIXED),
    "granitemoeshared": dict(SIZES, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32),
    "granitemoe_swa": dict(SIZES, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32, **WINDOWED),
    # Granite 4.0 Micro: a hybrid class without hybrid layers.
    "granitemoehybrid": dict(
        SIZES,
        layer_types=["full_attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=16,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=96,
        position_embedding_type="rope",
    ),
    "hy_v3": dict(SIZES, head_dim=16, **EXPERTS, moe_intermediate_size=32, **MIXED),
    "laguna": dict(
        SIZES,
        head_dim=16,
        num_attention_heads_per_layer=[4, 4],
        **EXPERTS,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        **MIXED,
        **WINDOWED,
    ),
    "phimoe": dict(SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=24),
    "sarvam_mla": dict(LATENT, **ROUTED),
    "sarvam_moe": dict(SIZES, head_dim=16, **ROUTED),
    "solar_open": dict(SIZES, head_dim=16, **ROUTED),
    # The others.
    "apertus": SIZES,
    "bert": dict(SIZES, is_decoder=True),
    "bitnet": SIZES,
    "codegen": dict(GPT2, rotary_dim=8, n_inner=128),
    "ctrl": SIZES,
    "cwm": dict(SIZES, head_dim=16, **WINDOWED),
    "exaone": SIZES,
    "granite_swa": dict(SIZES, **WINDOWED),
    "hunyuan_v1_dense": dict(SIZES, head_dim=16),
    "internlm3": dict(SIZES, head_dim=16),
    "jais2": SIZES,
    "minicpm3": dict(LATENT, head_dim=8),
    "ministral": dict(SIZES, head_dim=16, **WINDOWED),
    "ministral3": dict(SIZES, head_dim=16, sliding_window=24, rope_parameters=SCALED_QUERIES),
    "modernbert-decoder": dict(SIZES, local_attention=24, **WINDOWED),
    "nanochat": SIZES,
    "vaultgemma": dict(SIZES, head_dim=16, **WINDOWED),
}
"""model_type -> arguments of its config."""


CI = [
    *("gpt2", "gpt_bigcode", "opt", "gpt_neox", "phi", "persimmon", "starcoder2", "olmo", "nemotron", "helium"),
    *("smollm3", "exaone4", "gemma", "arcee", "granitemoe", "olmoe", "qwen2_moe", "aria_text", "afmoe", "youtu"),
]
"""Twenty without a native family: learned positions, matrices stored as [inputs, outputs], merged q, k and v, windows,
parallel blocks, layers without positions, scaled embeddings, experts with and without shared ones, values narrower than
keys. The others run in the nightly script."""


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
