"""Random checkpoints as transformers saves them, and transformers' own logits for them."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

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
VARIANTS: dict[str, tuple[type, type, dict]] = {
    "gqa": (LlamaConfig, LlamaForCausalLM, {}),
    "mha": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 8}),
    "mqa": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
    "tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "biases": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "head_dim": (LlamaConfig, LlamaForCausalLM, {"head_dim": 24}),
    "linear_rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR_ROPE}),
    "llama3_rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "mistral_window": (MistralConfig, MistralForCausalLM, {"sliding_window": 37}),
}


def save_random(folder: Path, variant: str, seed: int = 0, **changes) -> torch.nn.Module:
    """A sharded checkpoint in the folder, and the transformers model it holds. Norms and biases are random too."""
    config_class, model_class, options = VARIANTS[variant]
    torch.manual_seed(seed)
    model = model_class._from_config(
        config_class(**{**SHAPE, **options, **changes}), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.save_pretrained(folder, max_shard_size="100KB")
    return model


@torch.no_grad()
def reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """logits_TV, the whole sequence at once."""
    return model(torch.tensor([tokens])).logits[0].float()


def random_tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(SHAPE["vocab_size"]), k=count)
