"""`python run.py app=check check.package=acme`: a report card of the components of a package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dovetail.core.compose import KINDS, Composition, Package, Registered, Registry
from dovetail.core.compose.discovery import normal
from dovetail.core.compose.wording import did_you_mean, listing
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces.app import App
from dovetail.plugins.app.ablate.stats import CONFIDENCE
from dovetail.plugins.app.bench.app import check_apart, check_writable
from dovetail.plugins.app.check.beside import measure
from dovetail.plugins.app.check.card import SCHEMA, failed, html, print_card
from dovetail.plugins.app.check.config import CheckConfig
from dovetail.plugins.app.check.suites import groups, run
from dovetail.plugins.app.waiting import bar, line_console, phases_in_lines


class CheckApp(App):
    config: CheckConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        config, registry = self.config, composition.registry
        check_writable(config.out, "check.out")
        check_writable(config.html, "check.html")
        check_apart({"check.out": config.out, "check.html": config.html})
        package = of_name(registry, config.package) if config.package else None
        found = components(registry, package) if package else [one(registry, config.component or "")]
        _check_beside(registry, config.beside, found)
        card: dict[str, Any] = {
            "schema": SCHEMA,
            "checked": str(package) if package else config.component,
            "dovetail": version("dovetail"),
            "package": str(package or found[0].package),
            "confidence": CONFIDENCE,
            "benchmarks": [],
        }
        console = line_console()
        with bar(console, "tests"), phases_in_lines(console, "check") as progress:
            progress("tests", None)
            owner = package or found[0].package
            chosen = groups(owner.name, found, whole=package is not None, engine=config.engine)
            card["groups"] = run(chosen, config.timeout, progress)
            if config.rounds and not failed(card):
                progress("benchmark", None)
                card["benchmarks"] = [measure(each, composition, config.rounds, config.beside) for each in found]
        if config.format == "json":
            print(json.dumps(card, indent=1))
        else:
            print_card(card)
        if config.out is not None:
            Path(config.out).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        if config.html is not None:
            Path(config.html).write_text(html(card), encoding="utf-8")
        return 1 if failed(card) else 0


def of_name(registry: Registry, name: str) -> Package:
    """Return the package of this name, in any of the spellings that pip accepts. Raises ConfigError if it provides
    nothing that works."""
    provided = (*registry.config_dirs, *registry.tuning_tables, *registry.checkpoint_readers)
    found = {package.name: package for package, _ in provided}
    found |= {r.package.name: r.package for r in registry.registered.values()}
    if (package := next((found[other] for other in found if normal(other) == normal(name)), None)) is not None:
        if package.is_builtin:
            raise _builtin(f"check.package={name}")
        return package
    problems = [(problem.package.partition(" ")[0], problem.reason) for problem in registry.problems]
    if reasons := [reason for package_name, reason in problems if normal(package_name) == normal(name)]:
        raise ConfigError(f"check.package={name}: it provides nothing that works: {'; '.join(reasons)}")
    if any(normal(entry.package.name) == normal(name) for entry in registry.sources):
        raise ConfigError(
            f"check.package={name}: it registers nothing: its hooks return no component, configuration folder, tuning "
            "table or checkpoint reader"
        )
    there = sorted(other for other, package in found.items() if not package.is_builtin)
    raise ConfigError(
        f"check.package={name}: no such package provides anything.{did_you_mean(name, there)} "
        f"Packages: {listing(there)}."
    )


def components(registry: Registry, package: Package) -> list[Registered]:
    """Return what a package registers, in the order of the kinds."""
    found = [r for r in registry.registered.values() if r.package == package]
    return sorted(found, key=lambda r: list(KINDS).index(r.component.kind))


def one(registry: Registry, component: str) -> Registered:
    """Return the component "kind/name"."""
    kind, slash, name = component.partition("/")
    if not slash or kind not in KINDS:
        raise ConfigError(
            f"check.component={component} is not of the form <kind>/<name>, such as scheduler/mine. "
            f"Kinds: {listing(KINDS)}."
        )
    found = registry.get(kind, name)
    if found.package.is_builtin:
        raise _builtin(f"check.component={component}")
    return found


def _builtin(what: str) -> ConfigError:
    return ConfigError(f"{what} is built in: its own tests are in tests/contract")


def _check_beside(registry: Registry, beside: Sequence[str], found: Sequence[Registered]) -> None:
    options = sorted({name for r in found for name in registry.options(r.component.kind)})
    for name in beside:
        if name not in options:
            raise ConfigError(f"check.beside: no checked kind has `{name}`.{did_you_mean(name, options)}")
