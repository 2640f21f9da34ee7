"""Rotary table: cos and sin of every position, with the scalings that extend a model's context. Shapes: L
positions, R rotary dim."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from dovetail.core.interfaces import Rope
from dovetail.core.rope import RopeConfig
from dovetail.core.startup_notes import note


def build_rope(rope: RopeConfig, max_len: int, device: torch.device, longest: int | None = None) -> Rope:
    """Return cos | sin of positions [0, max_len). With LongRoPE, the length of the `longest` sequence selects one of
    two sets of frequencies for all, because keys in the cache keep theirs; None = max_len."""
    if rope.kind == "longrope" and (max_len if longest is None else longest) <= rope.trained_len:
        rope = replace(rope, divisors=rope.short_divisors)
    elif rope.kind == "longrope":
        note(
            f"rotary frequencies are those for more than {rope.trained_len} positions, also in shorter sequences. "
            f"engine.max_len={rope.trained_len} selects those for up to {rope.trained_len}"
        )
    if device.type == "meta":
        # The shape alone counts, and torch.arange on this device would import torch._dynamo, which takes a second.
        return Rope(torch.empty(max_len, 2 * len(range(0, rope.dim, 2)), device=device))
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device=device) / rope.dim
    frequencies = SCALINGS[rope.kind](1.0 / rope.theta**exponents, rope)
    angles = torch.arange(max_len, dtype=torch.float32, device=device)[:, None] * frequencies
    return Rope(torch.cat((angles.cos(), angles.sin()), dim=-1) * rope.attention_factor)


def _linear(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Position interpolation (Chen et al. 2023)."""
    return frequencies / rope.factor


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1: divide low frequencies by the factor, keep high ones, and blend by wavelength in between."""
    wavelengths = 2 * math.pi / frequencies
    keep = ((rope.trained_len / wavelengths - rope.low) / (rope.high - rope.low)).clamp(0.0, 1.0)
    # Same order of operations as transformers, since a rounding difference here grows with the position.
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """YaRN (Peng et al. 2023): like Llama 3.1, but blended by the dimension's index."""

    def dimension(rotations: float) -> float:
        """Dimension that makes this many rotations within the trained length."""
        return rope.dim * math.log(rope.trained_len / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(rope.high), dimension(rope.low)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    last += 0.001 if first == last else 0.0
    index = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    keep = 1 - ((index - first) / (last - first)).clamp(0.0, 1.0)
    return frequencies / rope.factor * (1 - keep) + frequencies * keep


def _longrope(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """LongRoPE (Ding et al. 2024): divide each frequency by its own number."""
    return frequencies / torch.tensor(rope.divisors, device=frequencies.device)


SCALINGS: dict[str, Callable[[torch.Tensor, RopeConfig], torch.Tensor]] = {
    "default": lambda frequencies, rope: frequencies,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""RopeConfig.kind -> (unscaled frequencies, config) -> frequencies"""
