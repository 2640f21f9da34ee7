"""Reads overrides and finds what Hydra would refuse one at a time, or in words of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra._internal.config_repository import IConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from dovetail.core.compose.kinds import PRESET
from dovetail.core.compose.registry import Registry


@dataclass(slots=True)
class Checked:
    """Overrides that Hydra can apply, and sentences about those it cannot."""

    overrides: list[Override] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    unsettled: set[str] = field(default_factory=set)
    """Nodes whose choice failed: what else is wrong with them is unknown, so nothing more is said about them."""


def check_overrides(texts: Sequence[str], repository: IConfigRepository, registry: Registry) -> Checked:
    checked, parser = Checked(), OverridesParser.create()
    for text in texts:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            checked.faults.append(_unreadable(text, error))
            continue
        fault = _fault(override, repository, registry)
        if fault:
            checked.faults.append(fault)
            checked.unsettled.add((override.package or override.key_or_group).split(".")[0])
        else:
            checked.overrides.append(override)
    return checked


def _unreadable(text: str, error: HydraException) -> str:
    if "=" not in text and not text.startswith("~"):
        return f"`{text}` is not key=value. A prompt goes after `--`: python run.py -- {text!r}"
    reason = str(error).splitlines()[0]
    return f"`{text}` cannot be read ({reason}); put the value in quotes inside the shell's: key='\"value\"'"


def _fault(override: Override, repository: IConfigRepository, registry: Registry) -> str:
    text, group = override.input_line or "", override.key_or_group
    if override.is_sweep_override():
        return (
            f"`{text}` gives several values. A list is written {group}=[a,b], a string with commas is quoted, "
            "and app=ablate compares alternatives"
        )
    value = override.value()
    if group == PRESET and not override.is_add() and not override.is_delete():
        return f"a preset is added: write `+{text.lstrip('+')}`"
    if override.is_delete() or isinstance(value, dict) or not repository.group_exists(group):
        return ""
    if override.is_add() and group != PRESET and not override.package:
        return f"`{text}`: every kind has its entry already; write it without `+`"
    options = repository.get_group_options(group)
    names = value if isinstance(value, list) else [value]
    for name in names:
        if name is None:
            continue
        registry.refuse_broken(group, str(name))
        if name not in options:
            return registry.no_such(group, str(name), options)
    return ""
