"""Parser of a checkpoint's `quantization_config` for FP8 weights. Imports no torch.

Supported: "compressed-tensors" with format "float-quantized" (scales per tensor or output channel), "fp8" (per tensor).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.plugins.quant.ignored import read_ignored, skips, wrong

READS = 'quant=fp8 reads compressed-tensors with format "float-quantized", and fp8 without blocks'
KV_TENSORS = ("k_scale", "v_scale")


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint whose linear layers are in E4M3, with a `weight_scale` for each weight."""

    input_scales: bool = False
    """Whether layers also have an `input_scale`."""
    row_scales: bool = False
    """One `weight_scale` per output channel; False = one per matrix."""
    kv_scales: bool = False
    """Whether attention layers have a k_scale and a v_scale."""
    ignored: tuple[str, ...] = ()
    """Layers left in the model's dtype: checkpoint names, or "re:" and a pattern that matches from the start."""

    def skips(self, names: tuple[str, ...], path: str) -> bool:
        return skips(self.ignored, names, path)


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether the method, and for compressed-tensors the format, are those of FP8 weights."""
    config = hf.get("quantization_config")
    if not isinstance(config, Mapping):
        return False
    method, form = config.get("quant_method"), config.get("format")
    return method == "fp8" or (method == "compressed-tensors" and form == "float-quantized")


def read_stored(hf: Mapping[str, Any]) -> Stored | None:
    """Return None if the weights are plain. Raises ConfigError naming a value that is not supported."""
    config = hf.get("quantization_config")
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise wrong("", config, "it must be an object")
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method == "fp8":
        return _fp8(config)
    raise wrong("quant_method", method, READS)


def _compressed_tensors(config: Mapping[str, Any]) -> Stored:
    if (form := config.get("format")) != "float-quantized":
        raise wrong("format", form, READS)
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise wrong("config_groups", groups, "it must have one group for all linear layers")
    (group,) = groups.values()
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise wrong("config_groups", groups, 'its targets must be ["Linear"]')
    weights = _eight_bits(group, "weights", ("tensor", "channel"))
    inputs = _eight_bits(group, "input_activations", ("tensor", "token"))
    scheme = config.get("kv_cache_scheme")
    if scheme is not None:
        _eight_bits(config, "kv_cache_scheme", ("tensor", "attn_head"))
    return Stored(
        input_scales=inputs.get("dynamic") is not True,
        row_scales=weights["strategy"] == "channel",
        kv_scales=scheme is not None,
        ignored=read_ignored(config, "ignore"),
    )


def _fp8(config: Mapping[str, Any]) -> Stored:
    if (block := config.get("weight_block_size")) is not None:
        raise wrong("weight_block_size", block, "block scales are not supported, only one scale per matrix")
    scheme = config.get("activation_scheme")
    if scheme not in ("static", "dynamic"):
        raise wrong("activation_scheme", scheme, "there are static, dynamic")
    kv = config.get("kv_cache_scheme")
    if kv not in (None, "static"):
        raise wrong("kv_cache_scheme", kv, "there are null, static")
    return Stored(
        input_scales=scheme == "static", kv_scales=kv == "static", ignored=read_ignored(config, "ignored_layers")
    )


def _eight_bits(config: Mapping[str, Any], key: str, strategies: tuple[str, ...]) -> Mapping[str, Any]:
    scheme = config.get(key)
    if not isinstance(scheme, Mapping):
        raise wrong(key, scheme, "weights and activations must have 8 bits")
    wanted = {"num_bits": (8,), "type": ("float",), "strategy": strategies, "symmetric": (True,)}
    for name, options in wanted.items():
        value = scheme.get(name, True if name == "symmetric" else None)
        if value not in options:
            raise wrong(f"{key}.{name}", value, f"there are {', '.join(map(str, options))}")
    return scheme
