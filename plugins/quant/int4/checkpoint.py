"""Parser of `quantization_config` for integer weights of 4 or 8 bits. Imports no torch.

Supported: "compressed-tensors" with format "pack-quantized", "awq" (AutoAWQ, version gemm), "gptq" (v1 and v2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader
from dovetail.plugins.quant.parsing import has_format, linear_group, read_ignored, skips, stored_config, wrong

READS = "quant=int4 reads compressed-tensors with format pack-quantized, awq with version gemm, and gptq"
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint with packed integer weights."""

    layout: Literal["compressed-tensors", "awq", "gptq"]
    bits: int
    group: int
    """Inputs per scale; 0 = whole rows."""
    zeros: bool
    """Whether groups have zero points; False = the codes are signed."""
    act_order: bool = False
    """`g_idx` (or `weight_g_idx`) states each input's group."""
    zero_offset: int = 0
    """Added to stored zero points: 1 in GPTQ v1."""
    ignored: tuple[str, ...] = ()

    @property
    def scale_name(self) -> str:
        return "weight_scale" if self.layout == "compressed-tensors" else "scales"

    @property
    def order_name(self) -> str:
        return "weight_g_idx" if self.layout == "compressed-tensors" else "g_idx"

    def skips(self, names: tuple[str, ...], path: str) -> bool:
        return skips(self.ignored, names, path, "substrings" if self.layout == "awq" else "names")


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether the method, and for compressed-tensors the format, are those of packed integers."""
    config = hf.get("quantization_config")
    if not isinstance(config, Mapping):
        return False
    return config.get("quant_method") in ("awq", "gptq") or has_format(config, "pack-quantized")


def read_stored(hf: Mapping[str, Any]) -> Stored | None:
    """Return None if the weights are plain. Raises ConfigError naming a value that is not supported."""
    if (config := stored_config(hf)) is None:
        return None
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method == "awq":
        return _awq(config)
    if method == "gptq":
        return _gptq(config)
    raise wrong("quant_method", method, READS)


def _compressed_tensors(config: Mapping[str, Any]) -> Stored:
    if (form := config.get("format")) != "pack-quantized":
        raise wrong("format", form, READS)
    group = linear_group(config)
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise wrong("weights", weights, "it must be an object")
    _one_of(weights, "type", ("int",))
    strategy = _one_of(weights, "strategy", ("group", "channel"))
    order = _one_of(weights, "actorder", (None, "weight", "static", "group", "dynamic"))
    return Stored(
        "compressed-tensors",
        bits=_one_of(weights, "num_bits", (4, 8)),
        group=_one_of(weights, "group_size", GROUPS) if strategy == "group" else 0,
        zeros=not _one_of(weights, "symmetric", (True, False), default=True),
        # With "weight", columns were quantized in another order, but groups are consecutive.
        act_order=order in ("group", "dynamic"),
        ignored=read_ignored(config, "ignore"),
    )


def _awq(config: Mapping[str, Any]) -> Stored:
    _one_of(config, "version", ("gemm", "GEMM"), default="gemm")
    _one_of(config, "bits", (4,))
    return Stored(
        "awq",
        bits=4,
        group=_group(config),
        zeros=_one_of(config, "zero_point", (True,), default=True),
        ignored=read_ignored(config, "modules_to_not_convert"),
    )


def _gptq(config: Mapping[str, Any]) -> Stored:
    if config.get("dynamic"):
        raise wrong("dynamic", config["dynamic"], "layers must have the same bits and group")
    version = _one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    return Stored(
        "gptq",
        bits=_one_of(config, "bits", (4, 8)),
        group=_group(config),
        zeros=True,
        act_order=_one_of(config, "desc_act", (True, False), default=False),
        zero_offset=1 if version == "gptq" else 0,
    )


def _group(config: Mapping[str, Any]) -> int:
    group = _one_of(config, "group_size", (*GROUPS, -1))
    return 0 if group == -1 else group


def _one_of(config: Mapping[str, Any], key: str, options: tuple[Any, ...], default: Any = None) -> Any:
    value = config.get(key, default)
    if not any(value is option or (value == option and type(value) is type(option)) for option in options):
        raise wrong(key, value, f"there are {', '.join(map(str, options))}")
    return value


def stored(hf: Mapping[str, Any], prefix: str, tensors: Mapping[str, TensorHeader]) -> StoredMatrix | None:
    """Return the weights and bits of a matrix; None = it is plain."""
    words, found = tensors.get("weight_packed") or tensors.get("qweight"), read_stored(hf)
    if words is None or found is None:
        return None
    # Scales have 16 bits, zeros 8.
    scale = (24 if found.zeros else 16) / found.group if found.group else 0
    return StoredMatrix(prod(words.shape) * 32 // found.bits, found.bits + scale)
