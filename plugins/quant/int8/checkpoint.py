"""Parser of `quantization_config` for W8A8 integers: compressed-tensors with format int-quantized. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader
from dovetail.plugins.quant.compressed import flat_type, linear_group, multiplies_integers
from dovetail.plugins.quant.parsing import one_of, read_ignored, skips, stored_config, wrong

READS = "quant=int8 reads compressed-tensors with format int-quantized and 8 bits for weights and inputs"


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint whose linear layers are int8, with a `weight_scale`."""

    row_scales: bool
    """One scale per output channel; False = one per matrix."""
    static: bool
    """Whether layers have an `input_scale`."""
    zero_points: bool
    """Whether layers with an `input_scale` have an `input_zero_point`."""
    ignored: tuple[str, ...] = ()

    def skips(self, names: tuple[str, ...], path: str) -> bool:
        return skips(self.ignored, names, path)


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether the method and the format are those of int8 weights and activations. quant=int4 reads others."""
    config = hf.get("quantization_config")
    if not isinstance(config, Mapping):
        return False
    return flat_type(config) == "int" and multiplies_integers(config)


def read_stored(hf: Mapping[str, Any]) -> Stored | None:
    """Return None if the weights are plain. Raises ConfigError naming a value that is not supported."""
    if (config := stored_config(hf)) is None:
        return None
    if not reads(hf):
        raise wrong("quant_method", config.get("quant_method"), READS)
    group = linear_group(config)
    weights = _eight_bits(group, "weights", ("tensor", "channel"))
    if weights.get("symmetric", True) is not True:
        raise wrong("weights.symmetric", weights["symmetric"], "weights must have no zero points")
    inputs = _eight_bits(group, "input_activations", ("tensor", "token"))
    return Stored(
        row_scales=weights["strategy"] == "channel",
        static=inputs.get("dynamic") is not True,
        zero_points=inputs.get("symmetric", True) is not True,
        ignored=read_ignored(config, "ignore"),
    )


def _eight_bits(group: Mapping[str, Any], key: str, strategies: tuple[str, ...]) -> Mapping[str, Any]:
    scheme = group.get(key)
    if not isinstance(scheme, Mapping):
        raise wrong(key, scheme, "weights and activations must have 8 bits")
    for name, options in {"num_bits": (8,), "type": ("int",), "strategy": strategies}.items():
        one_of(scheme, name, options, below=key)
    return scheme


def stored(hf: Mapping[str, Any], prefix: str, tensors: Mapping[str, TensorHeader]) -> StoredMatrix | None:
    """Return the weights and bits of a matrix; None = it is plain."""
    codes = tensors.get("weight")
    return None if codes is None or codes.dtype != "I8" else StoredMatrix(prod(codes.shape), 8)
