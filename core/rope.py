"""Reads rotary position settings (Su et al. 2021) and context-extension scalings from a config.json.

Importing this module loads no torch; dovetail.core.layers.build_rope builds the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.config_json import ConfigJson
from dovetail.core.errors import ConfigError, shown
from dovetail.core.startup_notes import note

KINDS = ("default", "linear", "llama3", "yarn")
CHANGING = ("dynamic", "longrope")
"""Kinds whose frequencies change with the length of a sequence."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    dim: int
    """Number of leading head dimensions that are rotated."""
    theta: float = 10000.0
    kind: str = "default"
    """One of KINDS, or "longrope". It determines which of the fields below are used."""
    factor: float = 1.0
    """Ratio of the extended to the trained context length."""
    trained_len: int = 0
    """Number of positions seen in training."""
    low: float = 1.0
    high: float = 1.0
    """Bounds, in rotations within trained_len: frequencies below low are scaled, above high kept, between blended."""
    truncate: bool = True
    """yarn: widen the blended range to whole dimensions."""
    attention_factor: float = 1.0
    """Multiplies cos and sin."""
    score_factor: float = 1.0
    """Multiplies scores in models with compressed attention (DeepSeek-V2, 2024); the others leave it out."""
    divisors: tuple[float, ...] = ()
    """longrope: divisor of each frequency, for lengths beyond trained_len."""
    short_divisors: tuple[float, ...] = ()
    """longrope: the same for lengths up to trained_len."""

    @property
    def max_len(self) -> int:
        """Number of positions that the scaling covers; 0 = unknown."""
        return int(self.factor * self.trained_len) if self.kind == "yarn" else 0


def read_rope(
    config: ConfigJson,
    head_dim: int,
    max_len: int,
    dim: int | None = None,
    *,
    layer_type: str | None = None,
    theta_key: str = "rope_theta",
    theta: float = 10000.0,
) -> RopeConfig:
    """Read the settings from any place where files have them, with the precedence of transformers 5: rope_scaling
    replaces rope_parameters; rope_theta and partial_rotary_factor at the top level are defaults for what the section
    lacks; original_max_position_embeddings at the top level replaces the section's. `dim` is set if the model fixes it.

    `layer_type`: a kind of layer, whose settings are read where the file has some for each kind (rope_parameters of
    Gemma 3). `theta_key`, `theta`: key at the top level and default of rope_theta.
    """
    options = config.section("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    if layer_type is not None and has_kinds(options):
        options = options.section(layer_type)
    for key, value in options.values.items():
        if isinstance(value, Mapping):
            raise options.wrong(key, "this model's rotary positions do not differ by kind of layer")
    key = "type" if options.get("rope_type") is None else "rope_type"
    if options.get(key) in CHANGING:
        raise options.unsupported(key, f"the options are {', '.join(KINDS)}; model=transformers has this one, too")
    kind = options.choice(key, KINDS, "default")
    theta = options.number("rope_theta", config.number(theta_key, theta))
    _note_dropped_theta(config, options, theta)
    partial = config.number("partial_rotary_factor", 1.0, at_most=1.0)
    partial = options.number("partial_rotary_factor", partial, at_most=1.0)
    dim = int(head_dim * partial) if dim is None else dim
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ConfigError(
            f"{config.where}: rotary positions take {dim} of {head_dim} dimensions of a head; they can take an even "
            "number of them, at least 2"
        )
    rope: dict[str, Any] = {"dim": dim, "theta": theta, "kind": kind}
    if kind == "default":
        return RopeConfig(**rope)
    whole = config if config.get("original_max_position_embeddings") is not None else options
    trained_len = whole.count("original_max_position_embeddings", max_len)
    if kind == "yarn":
        factor, low, high = (
            options.number(key, default)
            for key, default in (("factor", max_len / trained_len), ("beta_slow", 1.0), ("beta_fast", 32.0))
        )
        # Equal in files of Kimi-K2: the blend is a step.
        if low > high:
            raise options.wrong("beta_slow", f"it must be at most beta_fast, which is {high}")
        if theta <= 1:
            stated = options.get("rope_theta") is not None
            raise (options if stated else config).wrong("rope_theta" if stated else theta_key, "yarn needs one above 1")
        return RopeConfig(
            **rope,
            factor=factor,
            trained_len=trained_len,
            low=low,
            high=high,
            truncate=options.flag("truncate", True),
            attention_factor=options.number("attention_factor", _yarn_attention(options, factor)),
            score_factor=_score_factor(options, factor),
        )
    rope["factor"] = options.number("factor")
    rope["score_factor"] = _score_factor(options, rope["factor"])
    if kind == "linear":
        return RopeConfig(**rope)
    low, high = options.number("low_freq_factor"), options.number("high_freq_factor")
    if low >= high:
        raise options.wrong("low_freq_factor", f"it must be below high_freq_factor, which is {high}")
    return RopeConfig(**rope, trained_len=trained_len, low=low, high=high)


def read_longrope(config: ConfigJson, head_dim: int, max_len: int) -> RopeConfig:
    """Read the settings of LongRoPE (Ding et al. 2024) from the places where `read_rope` reads others. rope_type is not
    read: Phi-3 also calls it su and yarn."""
    options = config.section("rope_scaling" if config.get("rope_scaling") else "rope_parameters")
    theta = options.number("rope_theta", config.number("rope_theta", 10000.0))
    partial = config.number("partial_rotary_factor", 1.0, at_most=1.0)
    dim = int(head_dim * options.number("partial_rotary_factor", partial, at_most=1.0))
    if dim < 2 or dim % 2:
        raise ConfigError(
            f"{config.where}: rotary positions take {dim} dimensions of a head; they can take an even number"
        )
    whole = config if config.get("original_max_position_embeddings") is not None else options
    trained_len = whole.count("original_max_position_embeddings", max_len, at_least=2)
    factor = options.number("factor", max_len / trained_len)
    suggested = math.sqrt(1 + math.log(factor) / math.log(trained_len)) if factor > 1 else 1.0
    return RopeConfig(
        dim,
        theta,
        "longrope",
        factor,
        trained_len,
        attention_factor=options.number("attention_factor", suggested),
        divisors=_divisors(options, "long_factor", dim // 2),
        short_divisors=_divisors(options, "short_factor", dim // 2),
    )


def _divisors(options: ConfigJson, key: str, count: int) -> tuple[float, ...]:
    values = options.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise options.wrong(key, f"it must be a list of {count} numbers, one for two dimensions of a head")
    each = (ConfigJson({key: value}, options.where) for value in values)
    return tuple(one.number(key) for one in each)


def has_kinds(options: ConfigJson) -> bool:
    """Whether the section has settings for each kind of layer."""
    return bool(options.values) and all(isinstance(value, Mapping) for value in options.values.values())


def _note_dropped_theta(config: ConfigJson, options: ConfigJson, theta: float) -> None:
    """Report a theta in rope_parameters that is lost because rope_scaling replaces the section."""
    replaced = config.get("rope_parameters")
    if options.values is replaced or not isinstance(replaced, Mapping):
        return
    if (dropped := replaced.get("rope_theta")) is not None and dropped != theta:
        note(
            f"{config.where}: rope_scaling replaces rope_parameters, as in transformers, so rope_theta is {theta:g}, "
            f"not {shown(dropped)}. Write rope_theta into rope_scaling to change that"
        )


def _yarn_attention(options: ConfigJson, factor: float) -> float:
    """Default factor of YaRN (Peng et al. 2023) and DeepSeek's variant, since longer contexts flatten the softmax."""
    if options.get("mscale") and options.get("mscale_all_dim"):
        return _mscale(factor, options.number("mscale")) / _mscale(factor, options.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _score_factor(options: ConfigJson, factor: float) -> float:
    return _mscale(factor, options.number("mscale_all_dim")) ** 2 if options.get("mscale_all_dim") else 1.0


def _mscale(factor: float, strength: float) -> float:
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0
