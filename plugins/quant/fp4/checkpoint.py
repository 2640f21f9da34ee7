"""Parser of `quantization_config` for FP4 weights. Imports no torch.

Supported: "compressed-tensors" with formats "nvfp4-pack-quantized" and "mxfp4-pack-quantized", "modelopt" with NVFP4,
"mxfp4" of gpt-oss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader
from dovetail.plugins.quant.compressed import Inputs, has_format, inputs_of, linear_group
from dovetail.plugins.quant.parsing import Way, modelopt, read_ignored, skips, stored_config, wrong

READS = (
    "quant=fp4 reads compressed-tensors with formats nvfp4-pack-quantized, mxfp4-pack-quantized; modelopt with NVFP4; "
    "mxfp4"
)
FORMATS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
"""Format of compressed-tensors -> inputs that share a scale."""
MXFP4 = 32
"""Inputs that share a scale in MXFP4."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of the tensors of a matrix."""

    codes: str
    scale: str
    whole: str
    """Scale of a matrix in NVFP4."""
    input: str
    divides: bool = False
    """Whether `whole` divides weights; otherwise it multiplies them."""


NAMES = {
    "compressed-tensors": TensorNames(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", divides=True
    ),
    "modelopt": TensorNames("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "mxfp4": TensorNames("blocks", "scales", "", "input_scale"),
}
EXPERT_BITS = 4.25
"""Bits of a weight of experts in MXFP4."""
EXPERTS = ".experts."
"""Part of the names of experts' matrices."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint whose linear layers, or in the layout mxfp4 those of experts, are in E2M1."""

    layout: Literal["compressed-tensors", "modelopt", "mxfp4"]
    block: int
    """16: NVFP4, scales in E4M3 and one for the matrix. 32: MXFP4, scales are powers of two."""
    ignored: tuple[str, ...] = ()
    way: Way = "names"
    inputs: Inputs | None = None
    """How the checkpoint quantizes inputs; None = not at all."""

    @property
    def names(self) -> TensorNames:
        return NAMES[self.layout]

    def skips(self, names: tuple[str, ...], path: str) -> bool:
        if self.layout == "mxfp4" and not any(EXPERTS in name for name in names):
            return True
        return skips(self.ignored, names, path, self.way)


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether the method and the format are those of FP4 weights."""
    config = hf.get("quantization_config")
    if not isinstance(config, Mapping):
        return False
    if config.get("quant_method") == "mxfp4":
        return True
    if config.get("quant_method") == "modelopt":
        return modelopt(config).get("quant_algo") == "NVFP4"
    return has_format(config, *FORMATS)


def read_stored(hf: Mapping[str, Any]) -> Stored | None:
    """Return None if the weights are plain. Raises ConfigError naming a value that is not supported."""
    if (config := stored_config(hf)) is None:
        return None
    if not reads(hf):
        raise wrong("quant_method", config.get("quant_method"), READS)
    if config["quant_method"] == "mxfp4":
        return Stored("mxfp4", MXFP4, read_ignored(config, "modules_to_not_convert"), "wildcards")
    if config["quant_method"] == "modelopt":
        return _modelopt(modelopt(config))
    group = linear_group(config)
    weights, block = group.get("weights"), FORMATS[config["format"]]
    wanted = {"num_bits": 4, "type": "float", "group_size": block}
    for key, value in wanted.items():
        found = weights.get(key) if isinstance(weights, Mapping) else None
        if found != value or type(found) is not type(value):
            raise wrong(f"weights.{key}", found, f"{config['format']} has {value}")
    inputs = inputs_of(group, bits=(4, 8))
    return Stored("compressed-tensors", block, read_ignored(config, "ignore"), inputs=inputs)


def _modelopt(config: Mapping[str, Any]) -> Stored:
    size = config.get("group_size", 16)
    if size != 16:
        raise wrong("group_size", size, "NVFP4 has 16")
    ignored = read_ignored(config, "exclude_modules" if "exclude_modules" in config else "ignore")
    return Stored("modelopt", 16, ignored, "wildcards", Inputs(4, "float", "tensor_group", static=False))


def stored(hf: Mapping[str, Any], prefix: str, tensors: Mapping[str, TensorHeader]) -> StoredMatrix | None:
    """Return the weights and bits of a matrix, or of all experts of a layer in one tensor; None = it is plain."""
    stacked = [header for name, header in tensors.items() if name.endswith("_blocks") and header.dtype == "U8"]
    if stacked:
        return StoredMatrix(sum(2 * prod(header.shape) for header in stacked), EXPERT_BITS)
    codes = tensors.get("weight_packed") or tensors.get("weight")
    if codes is None or codes.dtype != "U8":
        return None
    # Scales of NVFP4 have 8 bits. Those of MXFP4 have 8 in experts, and 16 in other matrices.
    found = read_stored(hf)
    packed = found is not None and found.block == MXFP4 and EXPERTS in f"{prefix}."
    inputs = None if found is None else found.inputs
    product = "fp8" if inputs is not None and inputs.is_fp8 else None
    return StoredMatrix(2 * prod(codes.shape), EXPERT_BITS if packed else 4.5, product)
