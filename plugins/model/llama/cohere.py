"""Command R and R7B, Command A (Cohere, 2024): parallel blocks with one LayerNorm that has no bias, and a factor of
logits. Cohere 2 has windows, and its full layers have no rotary positions. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from dovetail.core.config_json import ConfigJson
from dovetail.core.rope import RopeConfig, read_rope
from dovetail.plugins.model.llama import layer_types
from dovetail.plugins.model.llama.family import BlockLayout, ConfigKeys, Factors, Family, attention_bias

THETA = 500000.0
"""Default base of Cohere. That of Cohere 2 is the usual one."""


def _ropes(config: ConfigJson, head_dim: int, max_len: int) -> tuple[RopeConfig, RopeConfig]:
    rope = read_rope(config, head_dim, max_len, theta=THETA)
    return rope, rope


def _windows(config: ConfigJson, layers: int) -> tuple[int, ...]:
    return layer_types.windows(config, layers, config.count("sliding_window", 4096), layer_types.pattern(config, 4))


def _qk_norm(config: ConfigJson) -> bool:
    if config.flag("use_qk_norm"):
        raise config.unsupported(
            "use_qk_norm", "model=llama lacks norms with weights of their own for each head; set model=transformers"
        )
    return False


_COHERE = Family(
    keys=ConfigKeys(eps="layer_norm_eps"),
    block=lambda config: BlockLayout(norms=("input_layernorm",), parallel=True),
    qk_norm=_qk_norm,
    norm="layer",
    norm_bias=False,
    eps=1e-5,
    max_len=8192,
    tied=True,
    qkv_bias=attention_bias,
    o_bias=attention_bias,
    interleaved=True,
    ropes=_ropes,
    factors=lambda config: Factors(logits=config.number("logit_scale", 0.0625)),
)
FAMILIES = {
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": replace(_COHERE, windows=_windows, rotates_full=False, ropes=None),
}
