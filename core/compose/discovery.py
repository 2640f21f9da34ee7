"""Loads the packages in entry-point group `dovetail`, built-in ones included, independently of each other.

A package that fails does not stop the others. `app=plugins` lists each fault, a `Problem`; only selecting
the faulty component raises it.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pluggy
from pydantic_core import PydanticSerializationError

from dovetail.core.compose import hookspecs
from dovetail.core.compose.component import Component
from dovetail.core.compose.config import AppConfig, Config, part_fields
from dovetail.core.compose.exits import no_exit
from dovetail.core.compose.former import former
from dovetail.core.compose.kinds import KINDS
from dovetail.core.compose.nodes import plain_defaults
from dovetail.core.compose.registry import Package, Problem, Registered, Registry, Source
from dovetail.core.compose.wording import did_you_mean, listing
from dovetail.core.errors import ConfigError, DovetailError

SWITCH = "DOVETAIL_PLUGINS"
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_REFERENCE = re.compile(r"[\w.]+:\w+")
_TABLE = re.compile(r"pkg://[\w.]+(/[\w-][\w.-]*)+\.json")


@functools.cache
def installed() -> Registry:
    """Return the registry of this environment, loaded once per process."""
    return discover(os.environ.get(SWITCH, ""))


def discover(
    switch: str = "",
    sources: Iterable[Source] | None = None,
    loading: Callable[[Source], object] = lambda entry: None,
) -> Registry:
    """Load what packages register. `sources` are the entry points of another process's registry (`Registry.sources`);
    None = those that are installed. What was installed since is then not part of the registry. `loading`: called before
    each entry point is imported."""
    blocked = _parse_switch(switch)
    registered: list[Registered] = []
    problems: list[Problem] = []
    config_dirs: list[tuple[Package, str]] = []
    tuning_tables: list[tuple[Package, str]] = []
    checkpoint_readers: list[tuple[Package, str]] = []
    used: list[Source] = []
    if sources is None:
        sources = list(_installed_sources())
        _check_installed(switch, blocked, {normal(entry.package.name) for entry in sources})
    for entry in sorted(sources):
        package = entry.package
        if normal(package.name) in blocked:
            problems.append(Problem(str(package), f"blocked by {SWITCH}=-{package.name}", unnamed=True))
            continue
        used.append(entry)
        loading(entry)
        try:
            # Output that a package prints while loading must not mix with the run's output.
            with redirect_stdout(sys.stderr), no_exit():
                components, folders, tables, readers = _load(entry, f"{package.name}:{entry.name}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # third-party code may raise anything, pytest.skip at import too; list it
            what = str(error) if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
            problems.append(Problem(str(package), f"entry point {entry.name}: {what}", unnamed=True))
            continue
        config_dirs += [(package, folder) for folder in folders]
        tuning_tables += [(package, table) for table in tables]
        checkpoint_readers += [(package, reader) for reader in readers]
        for component in components:
            try:
                reason = _fault(component)
            except Exception as error:  # a component with invalid field types is the package's problem too
                reason = f"the component cannot be read: {type(error).__name__}: {error}"
            if reason:
                kind, name = getattr(component, "kind", ""), getattr(component, "name", "")
                known = isinstance(component, Component) and kind in KINDS
                named = {"kind": kind, "name": name} if known else {"unnamed": True}
                problems.append(Problem(str(package), reason, **named))
            else:
                registered.append(Registered(component, package))
    unique = list(_without_duplicates(registered, problems))
    return Registry(
        unique,
        problems,
        config_dirs,
        sources=used,
        tuning_tables=tuning_tables,
        checkpoint_readers=checkpoint_readers,
    )


def _installed_sources() -> Iterator[Source]:
    for entry in entry_points(group=hookspecs.PROJECT):
        yield Source(_package(entry), entry.name, entry.value)


def _check_installed(switch: str, blocked: set[str], found: set[str]) -> None:
    """Raise ConfigError if Dovetail's own entry points are missing, or if a blocked package is not installed."""
    if hookspecs.PROJECT not in found:
        raise ConfigError(not_installed())
    for name in sorted(blocked - found):
        there = sorted(found - {hookspecs.PROJECT})
        none = f"{SWITCH}={switch}: no installed plugin package is called `{name}`.{did_you_mean(name, there)}"
        raise ConfigError(f"{none} Packages: {listing(there)}.")


def not_installed() -> str:
    """Return the message for a source tree on PYTHONPATH whose built-in components are registered nowhere."""
    package = Path(__file__).parents[2]
    root = package.parent.parent
    command = f"pip install -e {root}" if (root / "pyproject.toml").is_file() else "pip install dovetail"
    return (
        f"{package} is imported, but the metadata of the package `dovetail`, which lists its components, is missing: "
        f"{command}"
    )


def _parse_switch(switch: str) -> set[str]:
    words = [w.strip() for w in switch.split(",") if w.strip()]
    for word in words:
        if not word.startswith("-"):
            raise ConfigError(f"{SWITCH}={switch}: `{word}` is not `-package`, the only form there is")
        if normal(word[1:]) == hookspecs.PROJECT:
            raise ConfigError(f"{SWITCH}={switch}: the built-in components cannot be blocked")
    return {normal(word[1:]) for word in words}


def _package(entry: EntryPoint) -> Package:
    return Package(entry.dist.name, entry.dist.version) if entry.dist else Package(entry.value, "")


def normal(distribution: str) -> str:
    """Return the one spelling of a distribution's name under which pip compares names."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _load(entry: Source, key: str) -> tuple[list[Component], list[str], list[str], list[str]]:
    """Load one package with a separate plugin manager, so that an error names the right package."""
    plugin = EntryPoint(entry.name, entry.value, hookspecs.PROJECT).load()
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=key)
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise ConfigError(_misspelt_hook(manager, str(error))) from error
    if not manager.get_hookcallers(plugin):
        raise ConfigError(f"nothing in {entry.value} is marked with @hookimpl")
    components, folders = _returned(manager, "dovetail_components"), _returned(manager, "dovetail_config_dirs")
    tables, readers = _returned(manager, "dovetail_tuning_tables"), _returned(manager, "dovetail_checkpoint_readers")
    for folder in folders:
        if not (isinstance(folder, str) and folder.startswith("pkg://")):
            raise ConfigError(f"config folder {folder!r} is not of the form pkg://package.folder")
    for table in tables:
        if not (isinstance(table, str) and _TABLE.fullmatch(table)):
            raise ConfigError(f"tuning table {table!r} is not of the form pkg://package/folder/file.json")
    for reader in readers:
        if not (isinstance(reader, str) and _REFERENCE.fullmatch(reader)):
            raise ConfigError(f"checkpoint reader {reader!r} is not of the form package.module:Class")
    return components, folders, tables, readers


def _returned(manager: pluggy.PluginManager, hook: str) -> list[Any]:
    """Return the combined results of a package's functions for one hook. Pluggy would ignore a missing `return`."""
    items: list[Any] = []
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        returned = implementation.function()
        if isinstance(returned, str) or not isinstance(returned, Iterable):
            what = "nothing" if returned is None else f"a {type(returned).__name__}"
            raise ConfigError(f"{hook}() returned {what}, not a list")
        items += returned
    return items


def _misspelt_hook(manager: pluggy.PluginManager, fallback: str) -> str:
    hooks = [name for name in vars(hookspecs) if name.startswith("dovetail_")]
    for name, caller in vars(manager.hook).items():
        if not name.startswith("_") and not caller.has_spec():
            return f"there is no hook `{name}`.{did_you_mean(name, hooks)} Hooks: {listing(hooks)}."
    return fallback


def _fault(component: Any) -> str:
    """Return the reason why a component cannot be used, or ""."""
    if not isinstance(component, Component):
        return f"dovetail_components() gave {component!r}, not a Component"
    if component.kind not in KINDS:
        return f"there is no kind `{component.kind}`.{did_you_mean(component.kind, KINDS)} Kinds: {listing(KINDS)}."
    attributes = ("capabilities", "facts", "reads", "stored", "chooses", "contract")
    optional = {what: getattr(component, what) for what in attributes}
    references = {"target": component.target} | {what: text for what, text in optional.items() if text is not None}
    for what, text in ({"name": component.name, "api": component.api} | references).items():
        if not isinstance(text, str):
            return f"its {what} is {text!r}, not text"
    if not _NAME.fullmatch(component.name):
        return f"the name {component.name!r} is not lower case letters, digits and underscores"
    for what, reference in references.items():
        if not _REFERENCE.fullmatch(reference):
            return f"its {what} {reference!r} is not of the form package.module:name"
    return _wrong_api(component) or "; ".join(_config_faults(component))


def _wrong_api(component: Component) -> str:
    ours = KINDS[component.kind].api
    kind, _, version = component.api.partition("/")
    if kind != component.kind or not re.fullmatch(r"\d+\.\d+", version):
        return f"its api {component.api!r} is not of the form {component.kind}/<major>.<minor>, such as {ours}"
    (major, minor), (our_major, our_minor) = (map(int, v.split(".")) for v in (version, ours.partition("/")[2]))
    # Below 1.0 a minor version may change anything; from 1.0 on it only adds.
    fits = major == our_major and (minor == our_minor if major == 0 else minor <= our_minor)
    if fits or former(component.api):
        return ""
    return f"it is made for {component.api}, and this Dovetail implements {ours}"


def _config_faults(component: Component) -> Iterator[str]:
    config = component.config
    base = AppConfig if component.kind == "app" else Config
    if not (isinstance(config, type) and issubclass(config, base)):
        yield f"its config {config!r} is not a subclass of dovetail.{base.__name__}"
        return
    if config.model_config.get("extra") != "forbid" or not config.model_config.get("frozen"):
        yield f"its config {config.__name__} must stay frozen, with extra='forbid'"
    if "name" in config.model_fields:
        yield f"its config {config.__name__} has a field `name`, a reserved name in composed configs"
    if issubclass(config, AppConfig):
        nodes = ("engine", *KINDS)
        if component.name in nodes:
            yield f"an app cannot be called `{component.name}`: its options would be under that part's node"
        for need in config.needs:
            if need not in nodes:
                yield f"{config.__name__}.needs names `{need}`, which is not a node.{did_you_mean(need, nodes)}"
    for field, (kind, default) in part_fields(config).items():
        if kind not in KINDS:
            yield f"its part `{field}` names the unknown kind `{kind}`.{did_you_mean(kind, KINDS)}"
        elif isinstance(default, str) != (KINDS[kind].cardinality == "one"):
            yield f"its field `{field}` holds a {kind}: Part is for kinds with one component, Parts for the others"
    required = [name for name, info in config.model_fields.items() if info.is_required()]
    if KINDS[component.kind].cardinality == "per_request" and required:
        yield f"a {component.kind} is always available, so its options {listing(required)} must have defaults"
    try:
        plain_defaults(config)
    except PydanticSerializationError as error:
        yield f"its config {config.__name__} has a default that is not a plain value: {error}"
    for old, new in component.renamed.items():
        if old in config.model_fields or new not in config.model_fields:
            yield f"it renames `{old}` to `{new}`, but its options are {listing(config.model_fields)}"


def _without_duplicates(registered: list[Registered], problems: list[Problem]) -> Iterator[Registered]:
    """Refuse both of two third-party components with the same name: the choice would be ambiguous and must not depend
    on order. A built-in component keeps its name, and others with that name are refused. Refusals go to `problems`."""
    by_key: dict[tuple[str, str], list[Registered]] = defaultdict(list)
    for one in registered:
        by_key[one.component.kind, one.component.name].append(one)
    for (kind, name), group in by_key.items():
        builtin = next((one for one in group if one.package.is_builtin), None)
        if builtin is not None or len(group) == 1:
            kept = builtin or group[0]
            yield kept
            taken = f"{kind}={name} is built in: give the component another name"
            problems += [
                Problem(str(one.package), taken, kind, name, refuses=False) for one in group if one is not kept
            ]
        else:
            packages = [str(one.package) for one in group]
            reason = f"{kind}={name} comes from {' and '.join(packages)}; {SWITCH}=-{group[0].package.name} leaves one"
            problems += [Problem(package, reason, kind, name) for package in packages]
