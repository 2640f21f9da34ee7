"""Parser of `quantization_config` for integer weights of 4 or 8 bits. Imports no torch.

Supported: "compressed-tensors" with format "pack-quantized", and with one weight per entry ("int-quantized",
"naive-quantized") unless weights and inputs are 8-bit integers without groups; "awq" (AutoAWQ, version gemm); "gptq"
(v1 and v2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader
from dovetail.plugins.quant.compressed import (
    Inputs,
    flat_type,
    has_format,
    inputs_of,
    linear_group,
    multiplies_integers,
)
from dovetail.plugins.quant.parsing import one_of, read_ignored, skips, stored_config, wrong

READS = (
    "quant=int4 reads compressed-tensors with format pack-quantized, and with int-quantized for 4 bits or groups; awq "
    "with version gemm; gptq"
)
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint with integer weights."""

    layout: Literal["packed", "flat", "awq", "gptq"]
    """The first two are those of compressed-tensors."""
    bits: int
    group: int
    """Inputs per scale; 0 = whole rows."""
    zeros: bool
    """Whether groups have zero points; False = the codes are signed."""
    act_order: bool = False
    """`g_idx` (or `weight_g_idx`) states each input's group."""
    zero_offset: int = 0
    """Added to stored zero points: 1 in GPTQ v1."""
    whole: bool = False
    """Whether a matrix has one scale; then `group` is 0."""
    inputs: Inputs | None = None
    """How the checkpoint quantizes inputs; None = not at all."""
    ignored: tuple[str, ...] = ()

    @property
    def scale_name(self) -> str:
        return "weight_scale" if self.compressed else "scales"

    @property
    def order_name(self) -> str:
        return "weight_g_idx" if self.compressed else "g_idx"

    @property
    def compressed(self) -> bool:
        """Whether tensors have the names of compressed-tensors."""
        return self.layout in ("packed", "flat")

    def skips(self, names: tuple[str, ...], path: str) -> bool:
        return skips(self.ignored, names, path, "substrings" if self.layout == "awq" else "names")


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether the method, and for compressed-tensors the format, are those of integers in groups."""
    config = hf.get("quantization_config")
    if not isinstance(config, Mapping):
        return False
    if config.get("quant_method") in ("awq", "gptq") or has_format(config, "pack-quantized"):
        return True
    return flat_type(config) == "int" and not multiplies_integers(config)


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
    group = linear_group(config)
    if not reads({"quantization_config": config}):
        raise wrong("format", config.get("format"), READS)
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise wrong("weights", weights, "it must be an object")
    one_of(weights, "type", ("int",), below="weights")
    strategy = one_of(weights, "strategy", ("group", "channel", "tensor"), below="weights")
    order = one_of(weights, "actorder", (None, False, "weight", "static", "group", "dynamic"), below="weights")
    return Stored(
        "packed" if config["format"] == "pack-quantized" else "flat",
        bits=one_of(weights, "num_bits", (4, 8), below="weights"),
        group=one_of(weights, "group_size", GROUPS, below="weights") if strategy == "group" else 0,
        zeros=not one_of(weights, "symmetric", (True, False), default=True, below="weights"),
        # With "weight", columns were quantized in another order, but groups are consecutive.
        act_order=order in ("group", "dynamic"),
        ignored=read_ignored(config, "ignore"),
        whole=strategy == "tensor",
        inputs=inputs_of(group),
    )


def _awq(config: Mapping[str, Any]) -> Stored:
    one_of(config, "version", ("gemm", "GEMM"), default="gemm")
    one_of(config, "bits", (4,))
    return Stored(
        "awq",
        bits=4,
        group=_group(config),
        zeros=one_of(config, "zero_point", (True,), default=True),
        ignored=read_ignored(config, "modules_to_not_convert"),
    )


def _gptq(config: Mapping[str, Any]) -> Stored:
    if config.get("is_marlin_format"):
        raise wrong("is_marlin_format", True, "tensors in the layout of the Marlin kernels are not supported")
    if config.get("dynamic"):
        raise wrong("dynamic", config["dynamic"], "layers must have the same bits and group")
    version = one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    return Stored(
        "gptq",
        bits=one_of(config, "bits", (4, 8)),
        group=_group(config),
        zeros=True,
        act_order=one_of(config, "desc_act", (True, False), default=False),
        zero_offset=1 if version == "gptq" else 0,
    )


def _group(config: Mapping[str, Any]) -> int:
    group = one_of(config, "group_size", (*GROUPS, -1))
    return 0 if group == -1 else group


def stored(hf: Mapping[str, Any], prefix: str, tensors: Mapping[str, TensorHeader]) -> StoredMatrix | None:
    """Return the weights and bits of a matrix; None = it is plain."""
    found = read_stored(hf)
    if found is None:
        return None
    entries, each = _codes(found, tensors)
    if entries is None:
        return None
    # Scales have 16 bits, zeros 8.
    scale = (24 if found.zeros else 16) / found.group if found.group else 0
    product = "fp8" if found.inputs is not None and found.inputs.is_fp8 else None
    return StoredMatrix(prod(entries.shape) * each, found.bits + scale, product)


def _codes(found: Stored, tensors: Mapping[str, TensorHeader]) -> tuple[TensorHeader | None, int]:
    """Return the header of the tensor with the codes, and how many each entry has; None = the matrix is plain."""
    if found.layout == "flat":
        codes = tensors.get("weight")
        return codes if codes is not None and codes.dtype == "I8" else None, 1
    return tensors.get("weight_packed" if found.compressed else "qweight"), 32 // found.bits
