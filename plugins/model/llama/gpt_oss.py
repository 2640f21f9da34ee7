"""gpt-oss (2025): sinks, a window in every other layer, and experts with biases and a clamped activation. Imports no
torch."""

from __future__ import annotations

from dovetail.core.config_json import ConfigJson
from dovetail.core.rope import RopeConfig, read_rope
from dovetail.plugins.model.llama.family import Family
from dovetail.plugins.model.llama.moe import read_gpt_oss

KINDS = ("full_attention", "sliding_attention")
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
    window = config.count("sliding_window", 128)
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(0 if layer % 2 else window for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(KINDS).issuperset(map(str, kinds)):
        raise config.wrong("layer_types", f"it must be a list of {layers} of {', '.join(KINDS)}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


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
