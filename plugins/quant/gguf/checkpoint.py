"""Recognition of GGUF files with blocks. Imports no torch."""

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
