"""Checkpoints of compressed-tensors with several `config_groups`, each of which another quantizer reads. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.plugins.quant.parsing import WAYS, read_ignored, wrong


def reads(hf: Mapping[str, Any]) -> bool:
    """Whether layers have unlike formats."""
    config = hf.get("quantization_config")
    if not isinstance(config, Mapping) or config.get("quant_method") != "compressed-tensors":
        return False
    groups = config.get("config_groups")
    return isinstance(groups, Mapping) and len(groups) > 1


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


def matches(name: str, targets: tuple[str, ...]) -> bool:
    """Whether a target other than "Linear" matches a matrix."""
    return any(WAYS["names"](name, target) for target in targets)
