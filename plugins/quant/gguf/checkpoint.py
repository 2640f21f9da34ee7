"""Recognition of GGUF files with blocks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is a GGUF file with blocks."""
    config = hf.get("quantization_config")
    return isinstance(config, Mapping) and config.get("quant_method") == "gguf"
