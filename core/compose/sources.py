"""Config sources for Hydra: the registry, Dovetail's conf/, folders of packages, folders of the user. Hydra's own
`ConfigStore` is process-wide and belongs to the user's program, so nothing is stored there."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import version as hydra_version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.default_element import GroupDefault
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from dovetail.core.compose.engine_config import EngineConfig
from dovetail.core.compose.kinds import KINDS, PRESET
from dovetail.core.compose.nodes import component_node, plain_defaults
from dovetail.core.compose.registry import ConfigFile, Problem, Registry
from dovetail.core.compose.wording import did_you_mean, show
from dovetail.core.errors import ConfigError
from dovetail.core.files import path_kind

_lock = threading.Lock()


@contextmanager
def hydra_1_3() -> Iterator[None]:
    """Select Hydra 1.3 behaviour, a process-wide setting, for which the user's own app may need another version."""
    base = hydra_version.VersionBase.instance()
    with _lock:
        previous = base.getbase()
        base.setbase(hydra_version.Version("1.3"))
        try:
            yield
        finally:
            base.version_base = previous


class RegistrySource(ConfigSource):
    """Components as configs. Broken components are found here too; selecting one then reports why it is broken."""

    def __init__(self, registry: Registry) -> None:
        super().__init__("components", "dovetail://")
        self._registry = registry
        broken = {(p.kind, p.name) for p in registry.problems if p.kind in KINDS}
        self._keys = set(registry.registered) | broken

    @staticmethod
    def scheme() -> str:
        return "dovetail"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return any(kind == config_path.strip("/") for kind, _ in self._keys)

    def is_config(self, config_path: str) -> bool:
        kind, _, name = config_path.strip("/").removesuffix(".yaml").rpartition("/")
        return (kind, name) in self._keys or (kind, name) == ("", "engine")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return sorted({kind for kind, _ in self._keys}) if results_filter != ObjectType.CONFIG else []
        return list(self._registry.options(config_path.strip("/")))

    def load_config(self, config_path: str) -> ConfigResult:
        kind, _, name = config_path.removesuffix(".yaml").rpartition("/")
        registered = self._registry.registered.get((kind, name))
        node: dict[str, Any]
        if kind == "":
            node = {"engine": plain_defaults(EngineConfig)}
        elif registered is not None:
            node = component_node(registered.component)
        else:
            node = {"app": name} if kind == "app" else {}
        package = "_global_" if kind in ("", "app") else None
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(node), {"package": package})


class Repository(ConfigRepository):
    """Hydra's repository over Dovetail's sources. Loads each config once and serves one composition."""

    def __init__(self, sources: Sequence[ConfigSource], registry: Registry | None = None) -> None:
        """registry: what cannot be used is no option of a group."""
        self.sources = list(sources)
        self._registry = registry or Registry()
        self._loaded: dict[str, ConfigResult | None] = {}
        self.added: dict[str, list[str]] = {}
        """List kind -> items that the loaded presets add to it."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self._loaded:
            result = super().load_config(config_path)
            if result is not None:
                # Otherwise Hydra would look for a schema of that name in its ConfigStore.
                result.is_schema_source = True
                if config_path.startswith(f"{PRESET}/"):
                    self._take_additions(result)
            self._loaded[config_path] = result
        return self._loaded[config_path]

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        options = super().get_group_options(group_name, results_filter)
        return [name for name in options if not self._registry.problems_of(group_name, name)]

    def _take_additions(self, preset: ConfigResult) -> None:
        """Collect entries such as `/logits: mine` for the composer; for Hydra they would be a second selection."""
        entries, preset.defaults_list = preset.defaults_list or [], []
        for entry in entries:
            if isinstance(entry, GroupDefault) and not entry.override and entry.group is not None:
                names = entry.value if isinstance(entry.value, list) else [entry.value]
                self.added.setdefault(entry.group.removeprefix("/"), []).extend(map(str, names))
            else:
                preset.defaults_list.append(entry)


Opened = tuple[Registry, tuple[ConfigSource, ...]]


def open_sources(registry: Registry, folders: tuple[str, ...]) -> Opened:
    """Return all sources, and the registry extended by their presets, variants and problems."""
    # The user's own files may change between two compositions; those of packages do not.
    return _open(registry, folders) if folders else _open_packages(registry)


@functools.lru_cache(maxsize=16)
def _open_packages(registry: Registry) -> Opened:
    return _open(registry, ())


def _open(registry: Registry, folders: tuple[str, ...]) -> Opened:
    files: list[tuple[str, ConfigSource]] = []
    problems: list[Problem] = []
    for package, folder in registry.config_dirs:
        path = _folder_of(folder)
        if path is None:
            problems.append(Problem(str(package), f"its config folder {folder} does not exist"))
        else:
            files.append((str(package), FileConfigSource(package.name, str(path))))
    for folder in folders:
        if path_kind(folder) != "folder":
            raise ConfigError(f"--config-dir {folder}: no such folder")
        files.append((folder, FileConfigSource(folder, str(Path(folder).absolute()))))
    components = RegistrySource(registry)
    found, faults = _read_files(components, files)
    return registry.with_files(found, [*problems, *faults]), (components, *(source for _, source in files))


def _folder_of(reference: str) -> Path | None:
    """Return the path of "pkg://package.folder". The folder needs no __init__.py."""
    try:
        spec = importlib.util.find_spec(reference.removeprefix("pkg://").replace("/", "."))
    except ModuleNotFoundError:
        return None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return Path(locations[0]) if locations else None


def _read_files(
    components: ConfigSource, files: Sequence[tuple[str, ConfigSource]]
) -> tuple[list[ConfigFile], list[Problem]]:
    """Return the usable presets and variants, and the problems of the others."""
    problems: list[Problem] = []
    owners: dict[tuple[str, str], str] = {}
    found: dict[tuple[str, str], ConfigFile] = {}
    known = Repository([components, *(source for _, source in files)])
    for owner, source in files:
        for name in source.list("", ObjectType.CONFIG):
            if source is not files[0][1]:
                reason = f"{name}.yaml is outside the folders; a file belongs in preset/ or in a kind's folder"
                problems.append(Problem(owner, reason))
        for group in source.list("", ObjectType.GROUP):
            if group not in KINDS and group != PRESET:
                reason = f"its config folder `{group}` is not a kind.{did_you_mean(group, [*KINDS, PRESET])}"
                problems.append(Problem(owner, reason))
                continue
            for name in source.list(group, ObjectType.CONFIG):
                path = f"{group}/{name}"
                if components.is_config(path):
                    problems.append(Problem(owner, f"{path}.yaml has the name of a component", group, name))
                elif (group, name) in owners:
                    first = owners[group, name]
                    reason = f"{path}.yaml is in {first} and in {owner}"
                    problems += [Problem(first, reason, group, name), Problem(owner, reason, group, name)]
                    found.pop((group, name), None)
                else:
                    owners[group, name] = owner
                    try:
                        found[group, name] = _read(known, source, owner, group, name)
                    except ConfigError as error:
                        problems.append(Problem(owner, str(error), group, name))
    return list(found.values()), problems


def _read(known: Repository, source: ConfigSource, owner: str, group: str, name: str) -> ConfigFile:
    """Read a preset or variant. Raises ConfigError if it cannot be used."""
    path = f"{group}/{name}"
    try:
        result = source.load_config(path)
    except Exception as error:  # YAML errors have many types; report each with the file's name
        raise ConfigError(f"{path}.yaml cannot be read: {error}") from error
    if not isinstance(result.config, DictConfig):
        raise ConfigError(f"{path}.yaml is not a mapping")
    body = OmegaConf.to_container(result.config, resolve=False)
    assert isinstance(body, dict)
    defaults = body.pop("defaults", None) or []
    if group != PRESET:
        if not defaults:
            raise ConfigError(f"{path}.yaml names no base: a variant begins with `defaults: [<base>, _self_]`")
        return ConfigFile(group, name, owner, tuple(str(d) for d in defaults if d != "_self_"), _about(source, path))
    if result.header.get("package") != "_global_":
        raise ConfigError(f"{path}.yaml must begin with `# @package _global_`")
    if kept := [str(key) for key in body if key != "engine"]:
        keys = ", ".join(kept)
        raise ConfigError(f"{path}.yaml sets {keys}: a preset only chooses; put options into a variant of the part")
    for entry in defaults:
        if reason := _bad_choice(known, entry):
            raise ConfigError(f"{path}.yaml: {reason}")
    chosen = [item for entry in defaults if entry != "_self_" for item in entry.items()]
    words = (f"{_overridden(key)}={_choice(value)}" for key, value in chosen)
    return ConfigFile(group, name, owner, tuple(words), _about(source, path))


def _overridden(key: str) -> str:
    """Return the key as on the command line, to match `_choice`."""
    return f"+{key[1:]}" if key.startswith("/") else key.split()[1].removeprefix("/")


def _choice(value: object) -> str:
    return f"[{','.join(map(show, value))}]" if isinstance(value, list) else show(value)


def _about(source: ConfigSource, path: str) -> str:
    """Return the first comment of the file, which describes its purpose."""
    lines = (Path(source.path) / f"{path}.yaml").read_text(encoding="utf-8").splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line[1:].strip() for line in comments if "@package" not in line).strip()


def _bad_choice(known: Repository, entry: object) -> str:
    if entry == "_self_":
        return ""
    (key, choice), *more = entry.items() if isinstance(entry, dict) and entry else [("", None)]
    *override, where = str(key).split() or [""]
    if more or override not in ([], ["override"]) or not where.startswith("/"):
        return f"the entry `{entry}` does not have the form `override /<kind>: <name>`"
    kind = where[1:].partition("@")[0] if override else where[1:]
    if kind not in KINDS:
        return f"there is no kind `{kind}`.{did_you_mean(kind, KINDS)}"
    if not override and KINDS[kind].cardinality == "one":
        return f"the entry `{entry}` adds one more, and there is one {kind}: write `override {where}`"
    for name in choice if isinstance(choice, list) else [choice]:
        if not known.config_exists(f"{kind}/{name}"):
            return f"there is no {kind} called `{name}`.{did_you_mean(str(name), known.get_group_options(kind))}"
    return ""
