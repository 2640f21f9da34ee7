"""Granite 3 (IBM, 2024): Llama with factors of embeddings, scores, blocks' outputs and logits. Imports no torch."""

from __future__ import annotations

from dovetail.core.config_json import ConfigJson
from dovetail.plugins.model.llama.family import Factors, Family, attention_bias


def _factors(config: ConfigJson) -> Factors:
    return Factors(
        embedding=config.number("embedding_multiplier", 1.0),
        block=config.number("residual_multiplier", 1.0),
        logits=1.0 / config.number("logits_scaling", 1.0),
    )


FAMILIES = {
    "GraniteForCausalLM": Family(
        max_len=2048,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=lambda config: config.flag("mlp_bias"),
        score_scale=lambda config, head_dim: config.number("attention_multiplier", 1.0),
        factors=_factors,
    )
}
