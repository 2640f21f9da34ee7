"""OLMo 2 and 3 (2025): norms of what a block adds, none of what it reads, and norms over all heads of q and of k.
Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from dovetail.core.config_json import ConfigJson
from dovetail.core.rope import RopeConfig
from dovetail.plugins.model.llama import layer_types
from dovetail.plugins.model.llama.family import BlockLayout, Family, attention_bias

THETA = 500000.0
"""Default base of OLMo 3."""


def _windows(config: ConfigJson, layers: int) -> tuple[int, ...]:
    """Every fourth layer is full, unless layer_types states the kind of each."""
    return layer_types.windows(config, layers, config.count("sliding_window", 4096), 4)


def _ropes(config: ConfigJson, head_dim: int, max_len: int) -> tuple[RopeConfig, RopeConfig]:
    return layer_types.ropes(config, head_dim, max_len, THETA, "rope_theta", THETA)


_OLMO2 = Family(
    block=lambda config: BlockLayout(norms=(), after=("post_attention_layernorm", "post_feedforward_layernorm")),
    eps=1e-5,
    norm_fp32=True,
    max_len=2048,
    qkv_bias=attention_bias,
    o_bias=attention_bias,
    wide_qk_norm=True,
)
FAMILIES: dict[str, Family] = {
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(_OLMO2, windows=_windows, ropes=_ropes),
}
