"""Contract suite for a package as a whole. Authors subclass:

class TestMine(PackageContract):
    package = "acme-dovetail"
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from importlib.metadata import distribution

from dovetail.core.compose import (
    KINDS,
    AppConfig,
    EngineConfig,
    Host,
    Package,
    Registered,
    Registry,
    compose,
    installed,
)
from dovetail.core.compose.compatibility import stated_by_default
from dovetail.core.compose.kinds import PRESET
from dovetail.core.compose.registry import ConfigFile
from dovetail.core.errors import ConfigError

__all__ = ["PackageContract"]

HOSTS = (
    Host(device="cpu", memory_bytes=64 << 30),
    Host(device="cuda", device_count=8, compute_capability=(9, 0), memory_bytes=141 << 30),
)
HEAVY = ("torch", "triton", "transformers")
"""Modules that listing and validating components must not import."""


class PackageContract:
    """Tests of an installed package: components, options, capabilities, presets and variants."""

    package = ""
    """Distribution name, as in pip."""
    component = ""
    """Kind and name of the only component that is tested, with its variants, such as "scheduler/mine"; "" = the whole
    package."""

    def test_it_has_no_problems(self) -> None:
        """No component, preset or variant is listed as unusable."""
        ours = [problem for problem in self._registry().problems if problem.package == str(self._package())]
        if self.component:
            ours = [problem for problem in ours if f"{problem.kind}/{problem.name}" == self.component]
        assert not ours, "\n".join(f"{problem.kind} {problem.name}: {problem.reason}" for problem in ours)
        provided = (*installed().tuning_tables, *installed().checkpoint_readers)
        others = [reference for package, reference in provided if package == self._package() and not self.component]
        what = "component, config file, tuning table or checkpoint reader"
        found = self._components() or self._files() or others
        assert found, f"{self.package} has no {what}: is its entry point `dovetail` missing?"

    def test_listing_it_imports_nothing_heavy(self) -> None:
        """Every command imports the modules named by entry points."""
        entries = [entry.value for entry in distribution(self.package).entry_points.select(group="dovetail")]
        load = f"from importlib.metadata import EntryPoint as E; [E('', v, '').load() for v in {entries}]"
        tell = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", f"{load}; {tell}"], capture_output=True, text=True, check=True)
        heavy = done.stdout.strip()
        assert heavy.endswith("[]"), f"every command imports {', '.join(entries)}, which must not import {heavy}"

    def test_options_are_described(self) -> None:
        """app=plugins prints the docstring of a config and the one under each field."""
        for registered in self._components():
            config = registered.component.config
            assert (config.__doc__ or "").strip(), f"config class {config.__name__} needs a docstring"
            bare = [name for name, field in config.model_fields.items() if not (field.description or "").strip()]
            assert not bare, f"fields of {config.__name__} need a docstring: {', '.join(bare)}"

    def test_classes_are_complete(self) -> None:
        for registered in self._components():
            target = registered.target()
            missing = sorted(getattr(target, "__abstractmethods__", ()))
            assert not missing, f"{registered.component.target} must implement {', '.join(missing)}"

    def test_capabilities_are_stated_for_any_machine(self) -> None:
        """Capabilities are stated with and without a GPU, and name existing kinds and keys."""
        known = {"engine": set(EngineConfig.model_fields), "host": {field.name for field in fields(Host)}}
        for registered in self._components():
            stated = [stated_by_default(registered, host) for host in HOSTS]
            for demand in (demand for each in stated if each is not None for demand in each.requires):
                asked = f"{registered.component.kind}={registered.component.name} requires {demand.kind}.{demand.key}"
                assert demand.kind in {*KINDS, *known}, f"{asked}, but there is no kind `{demand.kind}`"
                assert demand.key in known.get(demand.kind, {demand.key}), f"{asked}, but there is no `{demand.key}`"

    def test_tuning_tables_can_be_used(self) -> None:
        """Every entry is valid, and those of the core's operations can be launched."""
        from dovetail.core.tuning.cache import CHECKS
        from dovetail.core.tuning.packages import read_packaged

        for package, reference in installed().tuning_tables:
            if package == self._package() and not self.component:
                table = read_packaged(reference, package.name, CHECKS)
                assert len(table), f"{reference} has no entries: return it from dovetail_tuning_tables() once it has"

    def test_checkpoint_readers_load(self) -> None:
        """Every reader is a complete subclass of Checkpoint. CheckpointContract tests what it does."""
        from dovetail.core.checkpoint import load_reader

        for package, reference in installed().checkpoint_readers:
            if package == self._package() and not self.component:
                missing = sorted(load_reader(package, reference).__abstractmethods__)
                assert not missing, f"{reference} must implement {', '.join(missing)}"

    def test_presets_and_variants_compose(self) -> None:
        """Each one composes alone, except that options such as a path may still be required."""
        for file in self._files():
            word = f"+preset={file.name}" if file.group == PRESET else f"{file.group}={file.name}"
            try:
                compose([word], app=None if file.group in (PRESET, "app") else self._reader(file.group))
            except ConfigError as error:
                faults = [line for line in str(error).splitlines() if " is required" not in line]
                assert not faults, f"{word} does not compose: {faults}"

    # Helpers

    def _registry(self) -> Registry:
        return compose(app="plugins").registry

    def _package(self) -> Package:
        assert self.package, "set `package` to the name of your distribution"
        found = distribution(self.package)
        return Package(found.name, found.version)

    def _components(self) -> list[Registered]:
        found = [r for r in installed().registered.values() if r.package == self._package()]
        return [r for r in found if self.component in ("", f"{r.component.kind}/{r.component.name}")]

    def _files(self) -> list[ConfigFile]:
        found = [file for file in self._registry().files if file.package == str(self._package())]
        return [file for file in found if self.component in ("", *(f"{file.group}/{base}" for base in file.chooses))]

    def _reader(self, kind: str) -> str:
        """Return an app that uses a kind; others reject a choice of it."""
        apps = {name: r.component.config for (k, name), r in installed().registered.items() if k == "app"}
        return next(name for name, config in apps.items() if issubclass(config, AppConfig) and kind in config.needs)
