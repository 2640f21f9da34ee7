"""Recognition of GGUF files with blocks, and their usual mixtures. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader

BITS = {
    "Q4_0": (32, 18, 4.5),
    "Q8_0": (32, 34, 8.5),
    "Q4_K": (256, 144, 5),
    "Q5_K": (256, 176, 9),
    "Q6_K": (256, 210, 9),
}
"""GGUF type -> (values of a block, its bytes, bits of a weight in memory: codes have 4 or 8, scales and zeros 16)."""
MIXES = {
    "Q4_0": ("Q4_0", "Q4_0", "Q6_K"),
    "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q6_K", "Q6_K"),
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0"),
}
"""Mixture -> type of most matrices, of those for values and down in half of the layers, and of logits. llama.cpp's tool
for quantization chooses the same types, and other layers for the second one."""
WIDER_SHARE = 0.15
"""Share of a model's weights that the second type has, about."""


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is a GGUF file with blocks."""
    config = hf.get("quantization_config")
    return isinstance(config, Mapping) and config.get("quant_method") == "gguf"


def stored(hf: Mapping[str, Any], prefix: str, tensors: Mapping[str, TensorHeader]) -> StoredMatrix | None:
    """Return the weights and bits of a matrix; None = it is plain."""
    codes = tensors.get("weight")
    if codes is None or codes.blocks not in BITS:
        return None
    values, size, bits = BITS[codes.blocks]
    return StoredMatrix(codes.shape[0] * codes.shape[1] // size * values, bits)


def bits_of_mix(mix: str) -> dict[str, float]:
    """Return the bits of random weights, as Capabilities.provides names them."""
    most, wider, head = (BITS[kind][2] for kind in MIXES[mix])
    return {"weight_bits": most + WIDER_SHARE * (wider - most), "embedding_bits": most, "head_bits": head}
