"""Components that choose another one of their kind, such as quant=auto, which reads the checkpoint's config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from dovetail.core.compose.config import Config, part_fields
from dovetail.core.compose.registry import Registry
from dovetail.core.compose.selected import Selected
from dovetail.core.compose.wording import listing, naming_place, show
from dovetail.core.errors import ConfigError

Reader = Callable[[Mapping[str, Any]], bool]
"""Whether a component reads a checkpoint with this config.json."""


def chosen(part: Selected, facts: object, registry: Registry) -> Selected:
    """Return the component that `part` chooses, with the options that were set for `part`."""
    kind, reference = part.component.kind, part.component.chooses
    assert reference is not None
    name = part.registered.load(reference)(part.config, facts, readers(kind, registry))
    registered = registry.get(kind, name)
    return Selected(registered, _options(kind, part, registered.component.config, name, registry), part.name)


def with_nested_choices(part: Selected, registry: Registry) -> Selected:
    """Return a component with a model inside it, such as a drafter, whose nested parts are those that they choose: the
    model first, the others by its facts. If these cannot be read, the others stay, and the part itself reports the
    error."""
    inner: dict[str, Selected] = {key: value for key, value in part.config if isinstance(value, Selected)}
    model = next((key for key, one in inner.items() if one.component.kind == "model"), None)
    if model is None or not any(one.component.chooses for one in inner.values()):
        return part
    changed: dict[str, Selected] = {}
    for key in sorted(inner, key=lambda key: key != model):
        if inner[key].component.chooses:
            try:
                facts = None if key == model else changed.get(model, inner[model]).facts()
            except ConfigError:
                break
            options = inner[key].component.config.model_fields
            with naming_place(inner[key].component.kind, f"{part.component.kind}.{key}", options):
                changed[key] = chosen(inner[key], facts, registry)
    return replace(part, config=part.config.model_copy(update=changed))


def readers(kind: str, registry: Registry) -> dict[str, Reader]:
    """Return the function of each component of the kind that states what it reads, by name."""
    found = {name: registry.registered[kind, name] for name in registry.options(kind)}
    return {name: one.load(one.component.reads) for name, one in found.items() if one.component.reads is not None}


def _options(kind: str, part: Selected, config: type[Config], name: str, registry: Registry) -> Config:
    """Return the options of the chosen component. Each option that was set must be one of its own."""
    given = {key: value for key, value in part.config if value != type(part.config).model_fields[key].default}
    if unknown := sorted(given.keys() - config.model_fields.keys()):
        texts = ", ".join(f"{kind}.{key}={show(given[key])}" for key in unknown)
        raise ConfigError(
            f"{texts}: {kind}={part.name} chose {kind}={name}, which has no such option. Options of {name}: "
            f"{listing(config.model_fields)}"
        )
    try:
        return _default(config, registry, **given)
    except ValidationError as error:
        # An option of the choosing component has the values of any that it may choose.
        faults = [
            f"{kind}.{'.'.join(map(str, each['loc']))}={show(each['input'])}: {kind}={part.name} chose {kind}={name}, "
            f"where it {each['msg'].removeprefix('Input ')}"
            for each in error.errors(include_url=False)
        ]
        raise ConfigError("\n".join(faults)) from None


def _default(config: type[Config], registry: Registry, **given: Any) -> Config:
    return config(**_default_parts(config, registry), **given)


def _default_parts(config: type[Config], registry: Registry) -> dict[str, Any]:
    """Return the default of each field that holds another component."""
    parts: dict[str, Any] = {}
    for field, (kind, default) in part_fields(config).items():
        names = [default] if isinstance(default, str) else default
        found = {name: registry.get(kind, name) for name in names}
        made = {name: Selected(one, _default(one.component.config, registry)) for name, one in found.items()}
        parts[field] = made[default] if isinstance(default, str) else made
    return parts
