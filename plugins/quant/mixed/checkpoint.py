"""Checkpoints of compressed-tensors with several `config_groups`, each of which another quantizer reads. Imports no
torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from dovetail.core.compose.capabilities import Host
from dovetail.core.compose.choice import readers
from dovetail.core.compose.discovery import installed
from dovetail.core.compose.selected import Selected
from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader
from dovetail.plugins.quant.auto import reader_of
from dovetail.plugins.quant.parsing import WAYS, read_ignored, unlike_layers, wrong

Group = TypeVar("Group")


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether layers have unlike formats."""
    config = hf.get("quantization_config")
    if not isinstance(config, Mapping) or config.get("quant_method") != "compressed-tensors":
        return False
    return unlike_layers(config)


def split_groups(config: Mapping[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Return (targets, a `quantization_config` of this group alone) of each group. Targets are names of layers, "re:"
    patterns, or "Linear" for all that no other target matches."""
    found = []
    for name, group in config["config_groups"].items():
        targets = read_ignored(group, "targets") if isinstance(group, Mapping) else ()
        if not targets:
            raise wrong(f"config_groups.{name}", group, "it must have a list of targets")
        alone = {name: {**group, "targets": ["Linear"]}}
        form = group.get("format") or config.get("format")
        found.append((targets, {**config, "format": form, "config_groups": alone}))
    return found


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
    groups = split_groups(hf["quantization_config"]) if reads(hf) else []
    ignored = read_ignored(hf["quantization_config"], "ignore") if groups else ()
    config = group_of(prefix, groups, ignored)
    if config is None:
        return None
    alone, registry = {**hf, "quantization_config": config}, installed()
    registered = registry.get("quant", reader_of(alone, readers("quant", registry)))
    if registered.component.stored is None:
        return None
    found: StoredMatrix | None = registered.load(registered.component.stored)(alone, prefix, tensors)
    provides = Selected(registered, registered.component.config()).capabilities(Host(device="cuda")).provides
    return None if found is None else replace(found, product=str(provides["product"]))
