"""Checkpoints of compressed-tensors with several `config_groups`, each of which another quantizer reads. Imports no
torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import ValidationError

from dovetail.core.compose.capabilities import Host
from dovetail.core.compose.choice import readers
from dovetail.core.compose.discovery import installed
from dovetail.core.compose.registry import Registered
from dovetail.core.compose.selected import Selected
from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader
from dovetail.plugins.quant.auto import reader_of
from dovetail.plugins.quant.compressed import unlike_layers
from dovetail.plugins.quant.parsing import WAYS, read_ignored, wrong

MIXED = "mixed-precision"
"""Format of a checkpoint whose groups have unlike ones."""
Group = TypeVar("Group")


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether layers have unlike formats."""
    config = hf.get("quantization_config")
    if not isinstance(config, Mapping) or config.get("quant_method") != "compressed-tensors":
        return False
    return unlike_layers(config) or config.get("format") == MIXED


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """A group of a checkpoint, and the quantizer that reads it."""

    name: str
    targets: tuple[str, ...]
    """Names of layers, "re:" patterns, or "Linear" for all that no other target matches."""
    hf: dict[str, Any]
    """config.json with this group alone."""
    registered: Registered
    """The quantizer."""

    def selected(self, given: Mapping[str, Any]) -> tuple[Selected, set[str]]:
        """Return the quantizer with those of the options `given` that it has, and the names of these."""
        config, taken = self.registered.component.config, {}
        for key, value in given.items():
            if key in config.model_fields:
                with suppress(ValidationError):
                    config(**{key: value})
                    taken[key] = value
        return Selected(self.registered, config(**taken)), set(taken)


def config_groups(hf: Mapping[str, Any]) -> list[ConfigGroup]:
    """Return the groups of a checkpoint that `reads` recognizes."""
    registry, found = installed(), []
    config = hf["quantization_config"]
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise wrong("config_groups", groups, "it must be an object with a group for each format of layers")
    for name, group in groups.items():
        targets = read_ignored(group, "targets") if isinstance(group, Mapping) else ()
        if not targets:
            raise wrong(f"config_groups.{name}", group, "it must have a list of targets")
        form = group.get("format") or config.get("format")
        if form == MIXED:
            form = inferred(group)
        alone = {**config, "format": form, "config_groups": {name: {**group, "targets": ["Linear"]}}}
        one = {**hf, "quantization_config": alone}
        found.append(ConfigGroup(name, targets, one, registry.get("quant", reader_of(one, readers("quant", registry)))))
    return found


def inferred(group: Mapping[str, Any]) -> str:
    """Return the format of a group that states none, which compressed-tensors infers from its numbers."""
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise wrong("config_groups.weights", weights, "it must be an object, for a group without a format")
    integers = weights.get("type", "int") == "int"
    bits, size = weights.get("num_bits", 8), weights.get("group_size")
    for key, value in (("num_bits", bits), ("group_size", size)):
        if not isinstance(value, int | None):
            raise wrong(f"config_groups.weights.{key}", value, "it must be a whole number")
    if not integers and bits in _FLOATS.get(size, {}):
        return _FLOATS[size][bits]
    if not integers and (bits, size, weights.get("scale_dtype")) == (8, 32, "torch.uint8"):
        return "mxfp8-quantized"
    if inputs is None:
        return "pack-quantized" if integers else "naive-quantized"
    return "int-quantized" if integers else "float-quantized"


_FLOATS = {32: {4: "mxfp4-pack-quantized", 6: "mxfp6-pack-quantized"}, 16: {4: "nvfp4-pack-quantized"}}
"""Inputs that share a scale -> bits of floats -> format."""


def group_of(name: str, groups: Iterable[tuple[tuple[str, ...], Group]], ignored: Iterable[str] = ()) -> Group | None:
    """Return what belongs to a matrix; None = it is plain. As in compressed-tensors, `ignored` comes first, then a
    target that is its name, then patterns in alphabetical order, then "Linear"; of equal targets, the last."""
    if any(WAYS["names"](name, entry) for entry in ignored):
        return None
    found = {target: group for targets, group in groups for target in targets}
    for target in sorted(found, key=lambda target: (target.startswith("re:"), target)):
        if WAYS["names"](name, target):
            return found[target]
    return found.get("Linear")


def stored(hf: Mapping[str, Any], prefix: str, tensors: Mapping[str, TensorHeader]) -> StoredMatrix | None:
    """Return the weights and bits of a matrix; None = it is plain."""
    if not reads(hf):
        return None
    ignored = read_ignored(hf["quantization_config"], "ignore")
    group = group_of(prefix, [(group.targets, group) for group in config_groups(hf)], ignored)
    if group is None or (reference := group.registered.component.stored) is None:
        return None
    found: StoredMatrix | None = group.registered.load(reference)(group.hf, prefix, tensors)
    if found is None or found.product is not None:
        return found
    quantizer, _ = group.selected({})
    return replace(found, product=str(quantizer.capabilities(Host(device="cuda")).provides["product"]))
