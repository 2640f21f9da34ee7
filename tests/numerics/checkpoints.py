"""Random checkpoints in transformers' format, and transformers' logits for them."""

from __future__ import annotations

import random
from pathlib import Path

import torch

SHAPE = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "eos_token_id": 2,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}
YARN_DEEPSEEK = {**YARN, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.6, "beta_fast": 8, "beta_slow": 0.5}
YARN_GIVEN = {**YARN, "attention_factor": 1.3, "truncate": False}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
OLD_FALCON = {"multi_query": False, "parallel_attn": False, "bias": True}
GEMMA = {"head_dim": 24, "sliding_window": 37, "query_pre_attn_scalar": 12}
GEMMA3 = {**GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 3}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
OLMO3_ROPE = {
    "rope_parameters": {
        "full_attention": {**YARN, "attention_factor": 1.2},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 1.5,
    "rms_norm_eps": 1e-2,
}
PARTLY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 2.0],
    "long_factor": [1.0, 1.5, 3.0, 9.0],
    "original_max_position_embeddings": 48,
}
QWEN3_MOE = {"head_dim": 24, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
GPT_OSS = {"head_dim": 24, "sliding_window": 37, "num_local_experts": 8, "num_experts_per_tok": 3}
GLM4_MOE = {"head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
LATENTS = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
V2_LITE = {**LATENTS, "q_lora_rank": None, "topk_method": "greedy", "rope_parameters": YARN_DEEPSEEK}
GROUPS = {"n_group": 4, "topk_group": 2}
VARIANTS: dict[str, tuple[str, dict]] = {
    "gqa": ("Llama", {}),
    "mha": ("Llama", {"num_key_value_heads": 8}),
    "mqa": ("Llama", {"num_key_value_heads": 1}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "head_dim": ("Llama", {"head_dim": 24}),
    "linear_rope": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "yarn_rope": ("Llama", {"rope_parameters": YARN}),
    "yarn_mscale": ("Llama", {"rope_parameters": YARN_DEEPSEEK, "head_dim": 32}),
    "yarn_attention_factor": ("Llama", {"rope_parameters": YARN_GIVEN}),
    "mistral_window": ("Mistral", {"sliding_window": 37}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied_yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2_window": ("Qwen2", QWEN_WINDOW),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3_window_biases": ("Qwen3", {**QWEN_WINDOW, "head_dim": 8, "attention_bias": True}),
    "falcon_7b": ("Falcon", {}),
    "falcon_40b": ("Falcon", NEW_FALCON),
    "falcon_11b": (
        "Falcon",
        {**NEW_FALCON, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 96, "tie_word_embeddings": False},
    ),
    "falcon_1b": ("Falcon", OLD_FALCON),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0}),
    "gemma3": ("Gemma3", {**GEMMA3, "rope_parameters": GEMMA3_ROPE}),
    "glm": ("Glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "phi3": ("Phi3", {"pad_token_id": 0, "rope_parameters": LONGROPE}),
    "phi3_window": ("Phi3", {"pad_token_id": 0, "sliding_window": 37, **PARTLY}),
    "gptj": ("GPTJ", {"rotary_dim": 6}),
    "gptj_tied": ("GPTJ", {"rotary_dim": 8, "tie_word_embeddings": True, "n_inner": 96}),
    "olmo2": ("Olmo2", {"pad_token_id": 0}),
    "olmo3": ("Olmo3", {"pad_token_id": 0, "sliding_window": 37, "num_hidden_layers": 4, **OLMO3_ROPE}),
    "granite": ("Granite", {**GRANITE, "tie_word_embeddings": True}),
    "cohere": ("Cohere", {"logit_scale": 0.4, "attention_bias": True, "pad_token_id": 0}),
    "cohere2": ("Cohere2", {"logit_scale": 0.8, "sliding_window": 37, "num_hidden_layers": 4, "pad_token_id": 0}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "pad_token_id": 0}),
    "stablelm_parallel": ("StableLm", {"use_parallel_residual": True, "partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 37}),
    "qwen3_moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3_moe_scores": ("Qwen3Moe", QWEN3_MOE),
    "gpt_oss": ("GptOss", GPT_OSS),
    "glm4_moe": ("Glm4Moe", {**GLM4_MOE, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5}),
    "glm4_moe_groups": ("Glm4Moe", {**GLM4_MOE, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}),
    "deepseek_v2_lite": ("DeepseekV2", V2_LITE),
    "deepseek_v2": ("DeepseekV2", {**LATENTS, **GROUPS, "q_lora_rank": 20, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", {**LATENTS, **GROUPS, "q_lora_rank": 20, "rope_parameters": YARN_DEEPSEEK}),
}
SEEDS = {"qwen3_moe_scores": 1, "glm4_moe": 4, "glm4_moe_groups": 1}
SEEDS |= {"deepseek_v2_lite": 5, "deepseek_v2": 2, "deepseek_v3": 2}
"""Seeds of models with experts whose routers have gaps of LEAST_GAP in the tests."""
LEAST_GAP = 1e-4
"""Difference between the scores of the last expert that is selected and of the next: rounding changes no selection."""


def save_random(folder: Path, variant: str, seed: int | None = None, **changes) -> torch.nn.Module:
    """Save a sharded random checkpoint and return its transformers model. Norms and biases are random too."""
    seed = SEEDS.get(variant, 0) if seed is None else seed
    import transformers  # Takes seconds, so not at module level, where test collection would wait for it.

    family, options = VARIANTS[variant]
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = model_class.config_class(**{**SHAPE, **options, **changes})
    torch.manual_seed(seed)
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
        for router in _routers(model):
            router.weight.normal_(std=0.3)  # Some configs begin with zeros.
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(0, 0.2)
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


@torch.no_grad()
def reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """logits_TV of the whole sequence in one call."""
    return model(torch.tensor([tokens])).logits[0].float()


@torch.no_grad()
def router_gap(model: torch.nn.Module, tokens: list[int]) -> float:
    """Return the least difference, over tokens and layers, between the scores of the last group or expert that is
    selected and the next; infinity for models without experts."""
    routers = _routers(model)
    logits: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda module, given, got: logits.append(got[0])) for router in routers]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    least = float("inf")
    for router, logits_TE in zip(routers, logits, strict=True):
        bias_E = getattr(router, "e_score_correction_bias", None)
        # Softmax keeps the order of logits, and rounding changes those.
        scores_TE = logits_TE if bias_E is None else logits_TE.sigmoid() + bias_E
        groups, method = getattr(router, "num_group", 1), getattr(router, "topk_method", None)
        if groups and groups > 1 and method != "greedy":
            grouped_TGE = scores_TE.unflatten(1, (groups, -1))
            best_TG = grouped_TGE.topk(1 if method else 2, dim=2).values.sum(2)
            least = min(least, _gap(best_TG, router.topk_group))
            kept_TG = best_TG >= best_TG.topk(router.topk_group, dim=1).values[:, -1:]
            scores_TE = grouped_TGE.masked_fill(~kept_TG[:, :, None], -9.0).flatten(1)
        least = min(least, _gap(scores_TE, router.top_k))
    return least


def _routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def _gap(scores_TN: torch.Tensor, kept: int) -> float:
    ordered_TN = scores_TN.sort(dim=1, descending=True).values
    return float((ordered_TN[:, kept - 1] - ordered_TN[:, kept]).min())


def random_tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(SHAPE["vocab_size"]), k=count)


def in_blocks(weight_OI: torch.Tensor, outputs: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (E4M3 weight, scale of each block of 64 or `outputs` outputs and 128 inputs, product). Last blocks are
    smaller."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    blocks = [rows.split(128, dim=1) for rows in weight_OI.split(outputs)]
    scale = torch.stack([torch.stack([block.abs().max() / largest for block in row]) for row in blocks])
    spread = scale.repeat_interleave(outputs, 0)[: len(weight_OI)].repeat_interleave(128, 1)[:, : weight_OI.shape[1]]
    values = (weight_OI / spread).to(torch.float8_e4m3fn)
    return values, scale, values.float() * spread
