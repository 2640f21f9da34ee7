"""Kinds of layers, with a window or without one, and what differs between them. Imports no torch."""

from __future__ import annotations

from dovetail.core.config_json import ConfigJson
from dovetail.core.rope import RopeConfig, has_kinds, read_rope

LAYER_TYPES = ("full_attention", "sliding_attention")
LARGEST_PATTERN = 2**10


def windows(config: ConfigJson, layers: int, window: int, full: int) -> tuple[int, ...]:
    """Return the window of each layer; 0 = none. Without layer_types the last of each `full` layers has none."""
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if (layer + 1) % full else 0 for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not set(LAYER_TYPES).issuperset(map(str, kinds)):
        raise config.wrong("layer_types", f"it must be a list of {layers} of {', '.join(LAYER_TYPES)}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def pattern(config: ConfigJson, default: int) -> int:
    """Read the number of layers of which one is full."""
    return config.count("sliding_window_pattern", default, at_most=LARGEST_PATTERN)


def ropes(
    config: ConfigJson, head_dim: int, max_len: int, theta: float, local_key: str, local_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary settings of full layers and of those with a window. Files of transformers 4 state rope_theta and
    rope_scaling for full layers, and the base of the others, which are not scaled, under `local_key`."""
    by_kind = has_kinds(config.section("rope_parameters"))
    if by_kind and config.get("rope_scaling"):
        raise config.wrong("rope_scaling", "rope_parameters has settings for each kind of layer; remove one of the two")
    full = read_rope(config, head_dim, max_len, layer_type="full_attention", theta=theta)
    if not by_kind:
        return full, RopeConfig(head_dim, config.number(local_key, local_theta))
    return full, read_rope(
        config, head_dim, max_len, layer_type="sliding_attention", theta_key=local_key, theta=local_theta
    )
