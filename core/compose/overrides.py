"""Parses overrides and reports the ones that Hydra would refuse one at a time, or with unsuitable messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra._internal.config_repository import IConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from dovetail.core.compose.kinds import KINDS, PRESET
from dovetail.core.compose.registry import Registry
from dovetail.core.compose.wording import listing, program

_SHOWN = 200
"""Characters of an override that cannot be read, and of the reason."""


@dataclass(slots=True)
class CheckedOverrides:
    """Overrides that Hydra can apply, and messages about the others."""

    overrides: list[Override] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    added: dict[str, list[str]] = field(default_factory=dict)
    """List kind -> items that `+<kind>=` adds to the list selected otherwise."""
    unsettled: set[str] = field(default_factory=set)
    """Nodes whose selection failed. Further mistakes in them are unknown and not reported."""


def check_overrides(texts: Sequence[str], repository: IConfigRepository, registry: Registry) -> CheckedOverrides:
    checked, parser = CheckedOverrides(), OverridesParser.create()
    presets = [text for text in texts if text.startswith(f"+{PRESET}=")]
    if len(presets) > 1:
        checked.faults.append(f"`{presets[1]}`: a preset is given already; several are written +{PRESET}=[a,b]")
        checked.unsettled.add(PRESET)
        return checked
    for text in texts:
        try:
            override = parser.parse_override(text)
        except (HydraException, RecursionError) as error:
            checked.faults.append(_unreadable(text, error))
            continue
        fault = _fault(override, repository, registry)
        if fault:
            checked.faults.append(fault)
            checked.unsettled.add((override.package or override.key_or_group).split(".")[0])
        elif _adds(override, repository):
            checked.added.setdefault(override.key_or_group, []).extend(_names(override))
        else:
            checked.overrides.append(override)
    return checked


def _adds(override: Override, repository: IConfigRepository) -> bool:
    """Whether it adds one item to a list kind, such as `+logits=mine`."""
    group = override.key_or_group
    many = group in KINDS and KINDS[group].cardinality != "one"
    return override.is_add() and many and not override.package and repository.group_exists(group)


def _names(override: Override) -> list[str]:
    value = override.value()
    return [str(name) for name in (value if isinstance(value, list) else [value])]


def _unreadable(text: str, error: Exception) -> str:
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    if "=" not in text and not text.startswith("~"):
        return f"`{text}` is not key=value. A prompt goes after `--`: {program()} -- {text!r}"
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0][:_SHOWN]
    return f"`{text}` cannot be read ({reason}); put the value in quotes inside the shell's: key='\"value\"'"


def _fault(override: Override, repository: IConfigRepository, registry: Registry) -> str:
    text, group = override.input_line or "", override.key_or_group
    if override.is_sweep_override():
        return (
            f"`{text}` gives several values. A list is written {group}=[a,b], a string with commas is quoted, "
            "and alternatives need separate runs"
        )
    if not group:
        return f"`{text}` has no key before `=`"
    value = override.value()
    if group == PRESET and not override.is_add() and not override.is_delete():
        return f"a preset is added: write `+{text.lstrip('+')}`"
    if override.is_delete() or isinstance(value, dict) or not repository.group_exists(group):
        return ""
    if override.is_add() and group != PRESET and not override.package and not _adds(override, repository):
        return f"`{text}`: there is one {group}, and it has its entry already; write it without `+`"
    options = repository.get_group_options(group)
    if value is None or (isinstance(value, list) and None in value):
        return _null(text, group, options)
    names = _names(override)
    for name in names:
        registry.refuse_broken(group, name)
        if name not in options:
            return registry.no_such(group, name, options)
    if len(names) > 1 and group in KINDS and KINDS[group].cardinality == "one":
        return f"`{text}`: one {group} is chosen, not {len(names)}. Alternatives need separate runs"
    return ""


def _null(text: str, group: str, options: Sequence[str]) -> str:
    if group in KINDS and KINDS[group].cardinality != "one":
        empty = f"The empty list is {group}=[]."
    else:
        empty = f"The one without function is {group}=none." if "none" in options else ""
    return " ".join(filter(None, (f"`{text}`: null chooses nothing.", empty, f"Options: {listing(options)}.")))
