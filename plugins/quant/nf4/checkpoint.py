"""Parser of `quantization_config` of bitsandbytes. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader
from dovetail.plugins.quant.parsing import read_ignored, skips, stored_config, wrong


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint whose linear layers are in 4 bits of bitsandbytes."""

    kind: Literal["nf4", "fp4"]
    nested: bool
    """Whether scales are quantized, too ("double quantization")."""
    ignored: tuple[str, ...] = ()

    def skips(self, names: tuple[str, ...], path: str) -> bool:
        return skips(self.ignored, names, path, "substrings")


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether the method is that of bitsandbytes, with 4 bits."""
    config = hf.get("quantization_config")
    if not isinstance(config, Mapping):
        return False
    return config.get("quant_method") == "bitsandbytes" and config.get("load_in_4bit") is True


def read_stored(hf: Mapping[str, Any]) -> Stored | None:
    """Return None if the weights are plain. Raises ConfigError naming a value that is not supported."""
    if (config := stored_config(hf)) is None:
        return None
    if not reads(hf):
        raise wrong("quant_method", config.get("quant_method"), "quant=nf4 reads bitsandbytes with load_in_4bit")
    if (kind := config.get("bnb_4bit_quant_type", "fp4")) not in ("nf4", "fp4"):
        raise wrong("bnb_4bit_quant_type", kind, "there are nf4, fp4")
    if (storage := config.get("bnb_4bit_quant_storage", "uint8")) != "uint8":
        raise wrong("bnb_4bit_quant_storage", storage, "there is uint8")
    nested = config.get("bnb_4bit_use_double_quant", False)
    if not isinstance(nested, bool):
        raise wrong("bnb_4bit_use_double_quant", nested, "it must be true or false")
    return Stored(kind, nested, read_ignored(config, "llm_int8_skip_modules"))


def stored(hf: Mapping[str, Any], prefix: str, tensors: Mapping[str, TensorHeader]) -> StoredMatrix | None:
    """Return the weights and bits of a matrix; None = it is plain."""
    codes = tensors.get("weight")
    return None if codes is None or codes.dtype != "U8" else StoredMatrix(2 * prod(codes.shape), 4.5)
