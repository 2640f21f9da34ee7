"""Tiny models of every kind that the suite needs, with checkpoints."""

from __future__ import annotations

from typing import Any

import torch

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "eos_token_id": 2,
}
BIASES = {**LLAMA, "attention_bias": True, "mlp_bias": True}
TIED = {**LLAMA, "tie_word_embeddings": True}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 9}


def checkpoint(hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return tensors with transformers' names and shapes."""
    random = torch.Generator().manual_seed(3)
    hidden, inner, vocab = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    kv = hidden // hf["num_attention_heads"] * hf["num_key_value_heads"]
    made: dict[str, torch.Tensor] = {}

    def linear(name: str, out: int, inp: int, bias: bool = False) -> None:
        made[f"{name}.weight"] = torch.randn(out, inp, generator=random) * inp**-0.5
        if bias:
            made[f"{name}.bias"] = torch.randn(out, generator=random) * 0.2

    def norm(name: str) -> None:
        made[f"{name}.weight"] = torch.rand(hidden, generator=random) + 0.5

    made["model.embed_tokens.weight"] = torch.randn(vocab, hidden, generator=random)
    for index in range(hf["num_hidden_layers"]):
        layer, bias = f"model.layers.{index}", bool(hf.get("attention_bias"))
        norm(f"{layer}.input_layernorm")
        norm(f"{layer}.post_attention_layernorm")
        for name, out in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            linear(f"{layer}.self_attn.{name}_proj", out, hidden, bias)
        for name, out, inp in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            linear(f"{layer}.mlp.{name}_proj", out, inp, bool(hf.get("mlp_bias")))
    norm("model.norm")
    if not hf.get("tie_word_embeddings"):
        linear("lm_head", vocab, hidden)
    return made
