"""Turns overrides into a composition with Hydra's defaults list and merging, but no globals, run folders or logging."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dovetail.core.compose.choice import chosen, with_nested_choices
from dovetail.core.compose.composition import Composition
from dovetail.core.compose.discovery import installed
from dovetail.core.compose.kinds import KINDS, PRESET
from dovetail.core.compose.overrides import CheckedOverrides, check_overrides
from dovetail.core.compose.registry import Registry
from dovetail.core.compose.selected import Placement, Selected
from dovetail.core.compose.sources import Repository, hydra_1_3, open_sources
from dovetail.core.compose.validation import ComposedConfig, Path, validate
from dovetail.core.compose.wording import words
from dovetail.core.errors import ConfigError

PRIMARY = "config"
_APPENDED = re.compile("Could not append to config. An item is already at '([^']+)'")
_NO_PLACE = re.compile("Could not override '([^'@]+)@([^']+)'")


def compose(
    overrides: Sequence[str] = (),
    app: str | None = None,
    *,
    registry: Registry | None = None,
    config_dirs: Sequence[str] = (),
) -> Composition:
    """Select and validate the parts of a run.

    `overrides` are words of the command line (`scheduler=static`, `engine.tp=2`, `+preset=tiny_cpu`), in any order.
    `app` fixes the app regardless of presets. `config_dirs` are folders with the user's own presets and variants.
    Raises ConfigError listing every mistake, or PluginError if a selected component cannot be used.
    """
    texts = words(overrides)
    if app is not None:
        for text in texts:
            if text.startswith("app=") and text != f"app={app}":
                raise ConfigError(f"`{text}`: the app is {app} here")
        texts.append(f"app={app}")
    with hydra_1_3():
        full, sources = open_sources(registry or installed(), tuple(config_dirs))
        repository = Repository(sources, full)
        checked = check_overrides(texts, repository, full)
        if checked.faults and {"app", PRESET} & checked.unsettled:
            # An invalid app or preset hides further mistakes.
            raise ConfigError("\n".join(checked.faults))
        try:
            composed = _compose(repository, checked, full)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError(_without_hints(error)) from error
    nodes = _with_choices(validate(composed, full), full)
    return Composition(
        registry=full,
        overrides=tuple(texts),
        app_part=nodes[composed.app],
        parts={kind: nodes[kind] for kind in KINDS if kind in nodes and kind != composed.app},
        engine_config=nodes.get("engine"),
        config_dirs=tuple(map(os.path.abspath, config_dirs)),
        choices=composed.choices,
    )


def _with_choices(nodes: dict[str, Any], registry: Registry) -> dict[str, Any]:
    """Replace components that choose another one, the model first: others choose by its facts. If these cannot be
    read, the others stay: an app that needs the model reports the error."""
    choosing = [kind for kind, part in nodes.items() if isinstance(part, Selected) and part.component.chooses]
    for kind in sorted(choosing, key=lambda kind: kind != "model"):
        model, facts = nodes.get("model"), None
        try:
            if kind != "model" and isinstance(model, Selected):
                facts = model.facts()
        except ConfigError:
            return nodes
        nodes = nodes | {kind: chosen(nodes[kind], facts, registry)}
    parts = {kind: part for kind, part in nodes.items() if isinstance(part, Selected)}
    return nodes | {kind: with_nested_choices(part, registry) for kind, part in parts.items()}


def _without_hints(error: Exception) -> str:
    """Return Hydra's message without its advice, which mentions flags and folders that do not exist here."""
    if found := _APPENDED.match(str(error)):
        return f"`{found[1]}` has a value already: write {found[1]}=... without `+`"
    if found := _NO_PLACE.match(str(error)):
        return f"`{found[1]}@{found[2]}`: with these choices nothing at `{found[2]}` takes a {found[1]}"
    lines = []
    for line in (str(error) or type(error).__name__).splitlines():
        if line.startswith(("To append", "Config search path", "Set the environment")):
            break
        lines.append(line.strip())
    if isinstance(error.__cause__, OmegaConfBaseException):
        reason = str(error.__cause__).splitlines()[0]
        override = " ".join(lines).removeprefix("Error merging override ")
        if reason == "Cannot merge DictConfig with ListConfig":
            is_list = override.partition("=")[2].startswith("[")
            wanted = "an object, as in {key: value}" if is_list else "a list, as in [value]"
            return f"{override}: should be {wanted}."
        lines.append(reason)
    return " ".join(line for line in lines if line)


def _compose(repository: Repository, checked: CheckedOverrides, registry: Registry) -> ComposedConfig:
    defaults = _defaults_list(repository, checked.overrides)
    if added := _added(repository, checked):
        longer = [_lengthened(kind, names, defaults) for kind, names in added.items()]
        kept = [o for o in checked.overrides if o.key_or_group not in added]
        defaults = _defaults_list(repository, [*kept, *OverridesParser.create().parse_overrides(longer)])
    loader = ConfigLoaderImpl(ConfigSearchPathImpl())
    config = loader._compose_config_from_defaults_list(defaults=defaults.defaults, repo=repository)
    # The config stays open: validation reports unknown keys together with all other mistakes.
    loader._apply_overrides_to_config(defaults.config_overrides, config)
    placements, broken = _placements(defaults, registry)
    if not isinstance(app := config.get("app"), str):
        raise ConfigError("no app is chosen: write app=<name>, such as app=generate")
    return ComposedConfig(
        app=app,
        nodes=_plain(config),
        placements=placements,
        broken=broken,
        options=repository.get_group_options,
        touched={o.input_line or o.key_or_group: o.key_or_group.split(".")[0] for o in defaults.config_overrides},
        faults=tuple(checked.faults),
        unsettled=frozenset(checked.unsettled),
        choices=_choices(defaults),
    )


def _defaults_list(repository: Repository, overrides: list[Override]) -> DefaultsList:
    return create_defaults_list(
        repo=repository, config_name=PRIMARY, overrides_list=overrides, prepend_hydra=False, skip_missing=False
    )


def _added(repository: Repository, checked: CheckedOverrides) -> dict[str, list[str]]:
    """Map each list kind to the items added by presets, unless overrides select the list, and by `+<kind>=` words."""
    chosen = {override.key_or_group for override in checked.overrides}
    kinds = [*(kind for kind in repository.added if kind not in chosen), *checked.added]
    return {
        kind: [*(repository.added.get(kind, []) if kind not in chosen else []), *checked.added.get(kind, [])]
        for kind in dict.fromkeys(kinds)
    }


def _lengthened(kind: str, names: Sequence[str], defaults: DefaultsList) -> str:
    """Return the override that selects the items of a kind in `defaults`, followed by `names`."""
    # Entries with another parent are bases of variants or nested parts.
    paths = [str(entry.config_path) for entry in defaults.defaults if entry.parent == PRIMARY]
    chosen = [path.removeprefix(f"{kind}/") for path in paths if path.startswith(f"{kind}/")]
    for name in names:
        if name in chosen:
            raise ConfigError(f"+{kind}={name}: already chosen: {kind}=[{','.join(chosen)}]")
        chosen.append(name)
    return f"{kind}=[{','.join(chosen)}]"


def _choices(defaults: DefaultsList) -> dict[str, str]:
    chosen = (str(entry.config_path).rpartition("/") for entry in defaults.defaults if entry.parent == PRIMARY)
    return {kind: name for kind, _, name in chosen if kind in KINDS and KINDS[kind].cardinality == "one"}


def _placements(defaults: DefaultsList, registry: Registry) -> tuple[dict[Path, Placement], dict[Placement, str]]:
    """Return the component that the defaults list puts at each node, and the root node of each broken choice."""
    placements: dict[Path, Placement] = {}
    broken: dict[Placement, str] = {}
    for entry in defaults.defaults:
        kind, _, name = (entry.config_path or "").rpartition("/")
        choice = Placement(kind, name)
        base = tuple((entry.package or "").split(".")) if entry.package else ()
        path = base if kind in KINDS and kind != "app" and KINDS[kind].cardinality == "one" else (*base, name)
        if registry.problems_of(kind, name):
            broken[choice] = path[0]
        elif (kind, name) in registry.registered:
            if placements.setdefault(path, choice) != choice:
                first = placements[path].name
                raise ConfigError(
                    f"{'.'.join(path)} is given two components, {first} and {name}; a variant has one base"
                )
    return placements, broken


def _plain(config: DictConfig) -> dict[str, Any]:
    resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    assert isinstance(resolved, dict)
    return {str(key): _drop_missing(value) for key, value in resolved.items()}


def _drop_missing(value: Any) -> Any:
    """Remove missing values, so that validation reports them as required."""
    if isinstance(value, dict):
        return {str(key): _drop_missing(item) for key, item in value.items() if item != "???"}
    if isinstance(value, list):
        return [_drop_missing(item) for item in value]
    return value
