"""Gemma 2 and 3 (2024, 2025): norms of what a block adds, windows and rotary positions by kind of layer. Imports no
torch."""

from __future__ import annotations

from dataclasses import replace

from dovetail.core.config_json import ConfigJson
from dovetail.core.rope import RopeConfig
from dovetail.plugins.model.llama import layer_types
from dovetail.plugins.model.llama.family import BlockLayout, ConfigKeys, Family, attention_bias


def _gemma_scale(config: ConfigJson, head_dim: int) -> float:
    """Factor of scores: query_pre_attn_scalar takes the place of the head dim."""
    return config.number("query_pre_attn_scalar", 256.0) ** -0.5


def _gemma2_windows(config: ConfigJson, layers: int) -> tuple[int, ...]:
    """Every second layer is full."""
    return _windows(config, layers, 2)


def _gemma3_windows(config: ConfigJson, layers: int) -> tuple[int, ...]:
    """Every sixth layer is full, unless sliding_window_pattern states another number."""
    return _windows(config, layers, layer_types.pattern(config, 6))


def _windows(config: ConfigJson, layers: int, pattern: int) -> tuple[int, ...]:
    if config.flag("use_bidirectional_attention"):
        raise config.wrong("use_bidirectional_attention", "attention to later tokens is not supported")
    return layer_types.windows(config, layers, config.count("sliding_window", 4096), pattern)


def _gemma3_ropes(config: ConfigJson, head_dim: int, max_len: int) -> tuple[RopeConfig, RopeConfig]:
    return layer_types.ropes(config, head_dim, max_len, 1e6, "rope_local_base_freq", 10000.0)


def _cap(config: ConfigJson, key: str, default: float) -> float:
    """Read a cap of scores or logits; null = 0, none."""
    if key in config.values and config.get(key) is None:
        return 0.0
    return config.number(key, default) if default or config.get(key) is not None else 0.0


_GEMMA = Family(
    keys=ConfigKeys(activation="hidden_activation"),
    block=lambda config: BlockLayout(
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    embed_scaled=True,
    score_scale=_gemma_scale,
    norm_offset=1.0,
    activations={"gelu_pytorch_tanh": "gelu_and_mul"},
    tied=True,
    head_dim=256,
    qkv_bias=attention_bias,
    o_bias=attention_bias,
)
_GEMMA3 = replace(
    _GEMMA,
    defaults={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
    max_len=131072,
    windows=_gemma3_windows,
    ropes=_gemma3_ropes,
    caps=lambda config: (0.0, _cap(config, "final_logit_softcapping", 0.0)),
    qk_norm=lambda config: True,
)
FAMILIES: dict[str, Family] = {
    "Gemma2ForCausalLM": replace(
        _GEMMA,
        max_len=8192,
        windows=_gemma2_windows,
        caps=lambda config: (
            _cap(config, "attn_logit_softcapping", 50.0),
            _cap(config, "final_logit_softcapping", 30.0),
        ),
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    # Its images are left out. Published files and those of transformers 4.52 and later differ in names.
    "Gemma3ForConditionalGeneration": replace(
        _GEMMA3,
        text="text_config",
        renames=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            ("model.language_model.", "model."),
        ),
        left_out=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
}
