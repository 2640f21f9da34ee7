"""gpt-oss (2025): sinks, a window in every other layer, and experts with biases and a clamped activation. Imports no
torch."""

from __future__ import annotations

from dovetail.core.config_json import ConfigJson
from dovetail.core.rope import RopeConfig, read_rope
from dovetail.plugins.model.llama import layer_types
from dovetail.plugins.model.llama.family import Family
from dovetail.plugins.model.llama.moe import read_gpt_oss

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _windows(config: ConfigJson, layers: int) -> tuple[int, ...]:
    """The first layer of two has a window, unless layer_types states the kind of each."""
    return layer_types.windows(config, layers, config.count("sliding_window", 128), 2)


def _ropes(config: ConfigJson, head_dim: int, max_len: int) -> tuple[RopeConfig, RopeConfig]:
    rope = read_rope(config, head_dim, max_len, theta=150000.0)
    return rope, rope


def _bias(config: ConfigJson) -> bool:
    return config.flag("attention_bias", True)


FAMILIES = {
    "GptOssForCausalLM": Family(
        defaults={"rope_parameters": YARN, "intermediate_size": 2880},
        eps=1e-5,
        max_len=131072,
        head_dim=64,
        windows=_windows,
        ropes=_ropes,
        qkv_bias=_bias,
        o_bias=_bias,
        sinks=True,
        experts=read_gpt_oss,
    )
}
