"""`quantization_config` of compressed-tensors: formats, groups, and what quantizers refuse alike. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dovetail.plugins.quant.parsing import one_of, wrong

NumberType = Literal["int", "float"]
_FLAT: dict[str, NumberType | None] = {"int-quantized": "int", "float-quantized": "float", "naive-quantized": None}
"""Formats with one weight per entry -> type of weights; None = the group states it. compressed-tensors 0.20 writes
"naive-quantized" for floats without quantized inputs."""


def has_format(config: Mapping[str, Any], *formats: str) -> bool:
    """Whether a quantization_config is that of compressed-tensors with one of these formats for all layers."""
    named = config.get("quant_method") == "compressed-tensors" and config.get("format") in formats
    return named and not unlike_layers(config)


def flat_type(config: Mapping[str, Any]) -> NumberType | None:
    """Return the type of weights of a quantization_config whose format has one weight per entry; None = others."""
    if not has_format(config, *_FLAT):
        return None
    stated = _FLAT[config["format"]] or _scheme(config, "weights").get("type", "int")
    return "float" if stated == "float" else "int"


def multiplies_integers(config: Mapping[str, Any]) -> bool:
    """Whether weights and inputs of a config with `flat_type` "int" are 8-bit integers without groups (W8A8)."""
    weights, inputs = _scheme(config, "weights"), _scheme(config, "input_activations")
    return weights.get("num_bits") == 8 and weights.get("strategy") != "group" and inputs.get("type") == "int"


def _scheme(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a part of the only group; an empty one if there is none."""
    groups = config.get("config_groups")
    (group,) = groups.values() if isinstance(groups, Mapping) and len(groups) == 1 else ({},)
    found = group.get(key) if isinstance(group, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def unlike_layers(config: Mapping[str, Any]) -> bool:
    """Whether a quantization_config of compressed-tensors has several groups, or one for some of the linear layers."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return isinstance(groups, Mapping) and len(groups) > 1
    (group,) = groups.values()
    targets = group.get("targets") if isinstance(group, Mapping) else None
    return isinstance(targets, list) and len(targets) > 0 and targets != ["Linear"]


def linear_group(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the only entry of `config_groups` of compressed-tensors, which must be for all linear layers."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise wrong("config_groups", groups, "it must have one group for all linear layers")
    (group,) = groups.values()
    if not isinstance(group, Mapping) or group.get("targets") != ["Linear"]:
        raise wrong("config_groups", groups, 'its targets must be ["Linear"]')
    if (outputs := group.get("output_activations")) is not None:
        raise wrong("output_activations", outputs, "outputs of layers are not quantized; there is null")
    _refuse_sparsity(config)
    _refuse_transforms(config)
    return group


@dataclass(frozen=True, slots=True)
class Inputs:
    """Quantized inputs of layers, as a config states them."""

    bits: int
    type: NumberType
    strategy: str
    """Values that share a scale, such as "token"."""
    static: bool
    """Whether layers have an `input_scale`."""

    @property
    def is_fp8(self) -> bool:
        return (self.bits, self.type) == (8, "float")

    def __str__(self) -> str:
        numbers = {"int": "integers", "float": "floats"}[self.type]
        return f"{'static' if self.static else 'dynamic'} {self.bits}-bit {numbers} with a scale per {self.strategy}"


def inputs_of(group: Mapping[str, Any], bits: tuple[int, ...] = (8,)) -> Inputs | None:
    """Return how inputs are quantized; None = they keep the model's dtype. Raise TextError for other `bits`."""
    inputs, key = group.get("input_activations"), "input_activations"
    if inputs is None:
        return None
    if not isinstance(inputs, Mapping):
        raise wrong(key, inputs, "it must be an object or null")
    return Inputs(
        bits=one_of(inputs, "num_bits", bits, below=key),
        type=one_of(inputs, "type", ("int", "float"), below=key),
        strategy=one_of(inputs, "strategy", ("token", "tensor", "group", "tensor_group"), below=key),
        static=inputs.get("dynamic") in (None, False),
    )


def _refuse_sparsity(config: Mapping[str, Any]) -> None:
    """Raise TextError if zeros are left out of the tensors, or experts out of layers. Pruned weights with all their
    zeros have the format "dense"."""
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping):
        raise wrong("sparsity_config", sparsity, "it must be an object or null")
    if (form := sparsity.get("format", "dense")) != "dense":
        raise wrong("sparsity_config.format", form, "compressed zeros are not supported; there is dense")
    if (experts := config.get("moe_sparsity_config")) is not None:
        raise wrong("moe_sparsity_config", experts, "layers with unlike numbers of experts are not supported")


def _refuse_transforms(config: Mapping[str, Any]) -> None:
    """Raise TextError if activations have to be transformed, such as by the Hadamard matrices of QuIP and SpinQuant.
    The weights of the checkpoint contain those of weights."""
    schemes = config.get("transform_config") or {}
    groups = schemes.get("config_groups") or {} if isinstance(schemes, Mapping) else None
    if not isinstance(groups, Mapping):
        raise wrong("transform_config", schemes, "it must be an object with config_groups")
    for name, group in groups.items():
        places = group.get("apply") if isinstance(group, Mapping) else None
        for place in places if isinstance(places, list) else [places]:
            location = place.get("location") if isinstance(place, Mapping) else None
            if location not in ("weight_input", "weight_output"):
                reason = "transforms of activations are not supported; there are weight_input, weight_output"
                raise wrong(f"transform_config.config_groups.{name}.apply.location", location, reason)
