"""Parser of a checkpoint's `quantization_config` for FP8 weights. Imports no torch.

Supported: "compressed-tensors" with formats "float-quantized" and "naive-quantized" (scales per tensor, output channel,
group of inputs or block) and "mxfp8-quantized"; "fp8" (per tensor or block); "modelopt" with FP8 (per tensor), MXFP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader
from dovetail.plugins.quant.compressed import flat_type, has_format, linear_group
from dovetail.plugins.quant.parsing import Way, modelopt, one_of, read_ignored, skips, stored_config, wrong

READS = (
    "quant=fp8 reads compressed-tensors with formats float-quantized, naive-quantized (floats) and mxfp8-quantized, "
    "fp8, and modelopt with FP8 and MXFP8"
)
MX_FORMAT = "mxfp8-quantized"
BLOCKS = (64, 128, 256)
GROUPS = (32, *BLOCKS)
MATRIX, ROW, MXFP8 = (0, 0), (1, 0), (1, 32)


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint whose linear layers are in E4M3."""

    block: tuple[int, int] = MATRIX
    """Outputs and inputs that share a scale; 0 = all."""
    scale: str = "weight_scale"
    """Name of the scales below a layer's prefix."""
    input_scales: bool = False
    """Whether layers also have an `input_scale`."""
    plain_inputs: bool = False
    """Whether inputs keep the model's dtype."""
    exponents: bool = False
    """Whether scales are E8M0 (Open Compute Project 2023, microscaling formats)."""
    ignored: tuple[str, ...] = ()
    """Layers left in the model's dtype."""
    way: Way = "names"
    """How entries of `ignored` match."""

    @property
    def blocks(self) -> bool:
        return self.block[1] != 0

    def skips(self, names: tuple[str, ...], path: str) -> bool:
        return skips(self.ignored, names, path, self.way)


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether the method, and for some methods the format, are those of FP8 weights."""
    config = hf.get("quantization_config")
    if not isinstance(config, Mapping):
        return False
    if config.get("quant_method") == "modelopt":
        return modelopt(config).get("quant_algo") in ("FP8", "MXFP8")
    return config.get("quant_method") == "fp8" or has_format(config, MX_FORMAT) or flat_type(config) == "float"


def read_stored(hf: Mapping[str, Any]) -> Stored | None:
    """Return None if the weights are plain. Raises ConfigError naming a value that is not supported."""
    if (config := stored_config(hf)) is None:
        return None
    readers = {"compressed-tensors": _compressed_tensors, "fp8": _fp8, "modelopt": _modelopt}
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in readers:
        raise wrong("quant_method", method, READS)
    return readers[method](config)


def _compressed_tensors(config: Mapping[str, Any]) -> Stored:
    group = linear_group(config)
    if not reads({"quantization_config": config}):
        raise wrong("format", config.get("format"), READS)
    if config["format"] == MX_FORMAT:
        return _mxfp8(config, group)
    weights = _eight_bits(group, "weights", ("tensor", "channel", "group", "block"))
    plain = group.get("input_activations") is None
    inputs = {} if plain else _eight_bits(group, "input_activations", ("tensor", "token", "group"))
    blocks = {
        "tensor": lambda: MATRIX,
        "channel": lambda: ROW,
        "group": lambda: (1, one_of(weights, "group_size", GROUPS, below="weights")),
        "block": lambda: _block(weights, "block_structure"),
    }
    return Stored(
        block=blocks[weights["strategy"]](),
        input_scales=not plain and inputs.get("dynamic") is not True,
        plain_inputs=plain,
        ignored=read_ignored(config, "ignore"),
    )


def _mxfp8(config: Mapping[str, Any], group: Mapping[str, Any]) -> Stored:
    plain = group.get("input_activations") is None
    for key in ("weights",) if plain else ("weights", "input_activations"):
        scheme = _eight_bits(group, key, ("group",))
        one_of(scheme, "group_size", (MXFP8[1],), below=key)
    return Stored(MXFP8, plain_inputs=plain, exponents=True, ignored=read_ignored(config, "ignore"))


def _fp8(config: Mapping[str, Any]) -> Stored:
    scheme = config.get("activation_scheme")
    if scheme not in ("static", "dynamic"):
        raise wrong("activation_scheme", scheme, "there are static, dynamic")
    blocks = config.get("weight_block_size") is not None
    # AutoFP8 lists names, transformers modules.
    key = "modules_to_not_convert" if config.get("ignored_layers") is None else "ignored_layers"
    return Stored(
        block=_block(config, "weight_block_size") if blocks else MATRIX,
        scale="weight_scale_inv" if blocks else "weight_scale",
        input_scales=scheme == "static",
        ignored=read_ignored(config, key),
        way="names" if key == "ignored_layers" else "modules",
    )


def _modelopt(config: Mapping[str, Any]) -> Stored:
    config = modelopt(config)
    if (algorithm := config.get("quant_algo")) not in ("FP8", "MXFP8"):
        raise wrong("quant_algo", algorithm, READS)
    if algorithm == "MXFP8" and (size := config.get("group_size", MXFP8[1])) != MXFP8[1]:
        raise wrong("group_size", size, f"MXFP8 has {MXFP8[1]}")
    return Stored(
        block=MXFP8 if algorithm == "MXFP8" else MATRIX,
        exponents=algorithm == "MXFP8",
        input_scales=algorithm == "FP8",
        ignored=read_ignored(config, "exclude_modules" if "exclude_modules" in config else "ignore"),
        way="wildcards",
    )


def _block(config: Mapping[str, Any], key: str) -> tuple[int, int]:
    value = config.get(key)
    if not isinstance(value, list) or len(value) != 2 or not all(type(x) is int and x in BLOCKS for x in value):
        raise wrong(key, value, f"it must be two of {', '.join(map(str, BLOCKS))}")
    return value[0], value[1]


def _eight_bits(config: Mapping[str, Any], key: str, strategies: tuple[str, ...]) -> Mapping[str, Any]:
    scheme = config.get(key)
    if not isinstance(scheme, Mapping):
        raise wrong(key, scheme, "weights and activations must have 8 bits")
    wanted = {"num_bits": (8,), "type": ("float",), "strategy": strategies}
    for name, options in wanted.items():
        one_of(scheme, name, options, below=key)
    one_of(scheme, "symmetric", (True,), default=True, below=key)
    return scheme


def stored(hf: Mapping[str, Any], prefix: str, tensors: Mapping[str, TensorHeader]) -> StoredMatrix | None:
    """Return the weights and bits of a matrix; None = it is plain."""
    codes, found = tensors.get("weight"), read_stored(hf)
    if codes is None or found is None or codes.dtype != "F8_E4M3":
        return None
    scale = 16 if found.exponents else 32
    product = "model" if found.plain_inputs else None
    return StoredMatrix(prod(codes.shape), 8 + (scale / found.block[1] if found.blocks else 0), product)
