"""The rotary table from config.json: frequencies of every position, with the scalings that stretch a model's context.

Shapes: L positions, R rotary dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Rope


def build_rope(hf: Mapping[str, Any], head_dim: int, max_len: int, device: torch.device) -> Rope:
    """cos | sin of positions [0, max_len), from rope_parameters or, in older files, rope_theta and rope_scaling."""
    options = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = options.get("rope_type", options.get("type", "default"))
    if kind not in SCALINGS:
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported; supported: {', '.join(sorted(SCALINGS))}")
    theta = options.get("rope_theta", hf.get("rope_theta", 10000.0))
    partial = options.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    try:
        frequencies = SCALINGS[kind](1.0 / theta**exponents, options)
    except KeyError as missing:
        raise ConfigError(f"config.json: rope_type {kind!r} needs the key {missing}") from None
    angles = torch.arange(max_len, dtype=torch.float32, device=device)[:, None] * frequencies
    return Rope(torch.cat((angles.cos(), angles.sin()), dim=-1))


def _default(frequencies: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    return frequencies


def _linear(frequencies: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Position interpolation (Chen et al. 2023)."""
    return frequencies / options["factor"]


def _llama3(frequencies: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: slow frequencies are divided by factor, fast ones kept, those between blended."""
    factor, low, high = options["factor"], options["low_freq_factor"], options["high_freq_factor"]
    trained_len = options["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    keep = ((trained_len / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    # In transformers' order of operations: a rounding here grows with the position.
    return (1 - keep) * frequencies / factor + keep * frequencies


SCALINGS: dict[str, Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
}
"""rope_type -> (unscaled frequencies, rope options) -> frequencies"""
