"""Registry of components: what can be selected, from which package, and what cannot be and why."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dovetail.core.compose.component import Component
from dovetail.core.compose.exits import no_exit
from dovetail.core.compose.former import adapted
from dovetail.core.compose.kinds import KINDS
from dovetail.core.compose.wording import did_you_mean, listing
from dovetail.core.errors import ConfigError, DovetailError, PluginError
from dovetail.core.heap import rare_collections


@dataclass(frozen=True, slots=True, order=True)
class Package:
    """An installed distribution."""

    name: str
    version: str

    @property
    def is_builtin(self) -> bool:
        return self.name == "dovetail"

    def __str__(self) -> str:
        return f"{self.name} {self.version}".rstrip()


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """An entry point of an installed package, which registers components."""

    package: Package
    name: str
    value: str
    """Reference to what it loads: "module" or "module:object"."""


@dataclass(frozen=True, slots=True)
class Registered:
    """A component and the package that registered it."""

    component: Component
    package: Package

    def load(self, reference: str) -> Any:
        """Import the object at "module:name". A failure names the package."""
        module, _, name = reference.partition(":")
        with self.blamed(f"needs {reference}, which does not load"), no_exit(), rare_collections():
            return getattr(importlib.import_module(module), name)

    @contextmanager
    def blamed(self, what: str) -> Iterator[None]:
        """Turn errors of the block, even SystemExit but not Dovetail's own, into a PluginError naming the package."""
        try:
            yield
        except DovetailError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(
                str(self.package),
                f"{self.component.kind}={self.component.name} {what}: {type(error).__name__}: {error}",
            ) from error

    def target(self) -> type[Any]:
        """Import the component's class and check it against the contract of its kind. One of a former contract is
        adapted."""
        target = self.load(self.component.target)
        module, _, name = KINDS[self.component.kind].interface.partition(":")
        interface = getattr(importlib.import_module(module), name)
        if not (isinstance(target, type) and issubclass(target, interface)):
            raise PluginError(
                str(self.package),
                f"{self.component.kind}={self.component.name}: {self.component.target} is not a subclass of "
                f"{module}.{name}",
            )
        return adapted(self.component.api, target)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in a package that cannot be used."""

    package: str
    reason: str
    kind: str = ""
    name: str = ""
    unnamed: bool = False
    """Components whose kind and name are unknown are missing because of it, usually all of the package."""
    refuses: bool = True
    """Whether choosing `name` of `kind` is an error; False: a built-in component has that name and works."""


@dataclass(frozen=True, slots=True, order=True)
class ConfigFile:
    """A valid preset or variant from a config folder."""

    group: str
    """A kind, or "preset"."""
    name: str
    package: str
    """Owner of the folder: a package with its version, or the path of the user's folder."""
    chooses: tuple[str, ...]
    """For a variant its base; for a preset each "<kind>=<name>" in order."""
    about: str
    """First comment of the file; may be empty."""


class Registry:
    """Immutable. Its order does not depend on the order in which packages were found."""

    def __init__(
        self,
        registered: Iterable[Registered] = (),
        problems: Iterable[Problem] = (),
        config_dirs: Iterable[tuple[Package, str]] = (),
        files: Iterable[ConfigFile] = (),
        sources: Iterable[Source] = (),
        tuning_tables: Iterable[tuple[Package, str]] = (),
        checkpoint_readers: Iterable[tuple[Package, str]] = (),
    ) -> None:
        by_key = {(r.component.kind, r.component.name): r for r in registered}
        self.registered: Mapping[tuple[str, str], Registered] = MappingProxyType(dict(sorted(by_key.items())))
        self.problems = tuple(sorted(set(problems), key=lambda p: (p.package, p.kind, p.name, p.reason)))
        # Dovetail's own folder comes first: it holds the primary config.
        self.config_dirs = tuple(sorted(config_dirs, key=lambda entry: (not entry[0].is_builtin, entry)))

        self.files = tuple(sorted(files))
        """Filled in once the folders are opened, in the registry of a composition."""
        self.sources = tuple(sources)
        """Entry points from which another process makes the same registry; empty for one that was made by hand."""
        self.tuning_tables = tuple(sorted(tuning_tables))
        """References to tables that core.tuning.packages reads."""
        self.checkpoint_readers = tuple(sorted(checkpoint_readers))
        """References to classes that core.checkpoint imports, "module:Class"."""

    def with_files(self, files: Iterable[ConfigFile], problems: Iterable[Problem]) -> Registry:
        """Return a registry with the contents of the config folders and the problems found in them."""
        return Registry(
            self.registered.values(),
            (*self.problems, *problems),
            self.config_dirs,
            files,
            self.sources,
            self.tuning_tables,
            self.checkpoint_readers,
        )

    def options(self, kind: str) -> tuple[str, ...]:
        return tuple(name for k, name in self.registered if k == kind)

    def problems_of(self, kind: str, name: str) -> tuple[Problem, ...]:
        """Return the problems for which the choice is refused."""
        return tuple(p for p in self.problems if (p.kind, p.name) == (kind, name) and p.refuses)

    def get(self, kind: str, name: str) -> Registered:
        """Return the component, or raise the reason why it cannot be selected."""
        self.refuse_broken(kind, name)
        try:
            return self.registered[kind, name]
        except KeyError:
            raise ConfigError(self.no_such(kind, name, self.options(kind))) from None

    def refuse_broken(self, kind: str, name: str) -> None:
        if broken := self.problems_of(kind, name):
            packages = " and ".join(dict.fromkeys(p.package for p in broken))
            reasons = "; ".join(dict.fromkeys(p.reason for p in broken))
            raise PluginError(packages, f"{kind}={name} cannot be used: {reasons}")

    def no_such(self, kind: str, name: str, options: Iterable[str]) -> str:
        """Return the message for a name that is not among the options."""
        options = sorted(options)
        hint = did_you_mean(name, options)
        message = f"{kind}={name}: no such {kind}.{hint} Options: {listing(options)}."
        if kind == "model" and "/" in name:
            message += f" A folder is given as model=auto model.path={name}"
        # The name may be in a package that failed before it registered components.
        packages = [f"{p.package} ({p.reason})" for p in self.problems if p.unnamed and not hint]
        return message + (f" Packages that could not be used: {'; '.join(packages)}." if packages else "")

    def fingerprint(self) -> str:
        """Digest that tells environments apart: equal for the same components of the same versions."""
        lines = [
            f"{kind} {name} {r.package.name} {r.package.version} {r.component.api}"
            for (kind, name), r in self.registered.items()
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
