"""`python run.py app=check check.package=acme`: a report card of the components of a package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dovetail.core.compose import KINDS, Composition, Registered, Registry
from dovetail.core.compose.wording import did_you_mean, listing
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces.app import App
from dovetail.plugins.app.ablate.stats import CONFIDENCE
from dovetail.plugins.app.bench.app import check_writable
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
        found = of_package(registry, config.package) if config.package else [one(registry, config.component or "")]
        _check_beside(registry, config.beside, found)
        package = str(found[0].package) if config.package else None
        card: dict[str, Any] = {
            "schema": SCHEMA,
            "checked": package or config.component,
            "dovetail": version("dovetail"),
            "packages": sorted({str(registered.package) for registered in found}),
            "confidence": CONFIDENCE,
            "benchmarks": [],
        }
        console = line_console()
        with bar(console, "tests"), phases_in_lines(console, "check") as progress:
            progress("tests", None)
            chosen = groups(found[0].package.name if config.package else None, found, engine=config.engine)
            card["groups"] = run(chosen, config.timeout)
            if config.rounds and not failed(card):
                progress("benchmark", None)
                card["benchmarks"] = [measure(each, composition, config.rounds, config.beside) for each in found]
        if config.format == "json":
            print(json.dumps(card, indent=1))
        else:
            print_card(card)
        for path, text in ((config.out, json.dumps(card, indent=1) + "\n"), (config.html, html(card))):
            if path is not None:
                Path(path).write_text(text, encoding="utf-8")
        return 1 if failed(card) else 0


def of_package(registry: Registry, package: str) -> list[Registered]:
    """Return the components of a package, in the order of the kinds. Raises ConfigError if it has none."""
    found = [r for r in registry.registered.values() if r.package.name == package]
    _refuse_builtin(found, f"check.package={package}")
    if not found:
        reasons = [p.reason for p in registry.problems if p.package.partition(" ")[0] == package]
        if reasons:
            raise ConfigError(f"check.package={package}: it registers no component that works: {'; '.join(reasons)}")
        there = sorted({r.package.name for r in registry.registered.values() if not r.package.is_builtin})
        raise ConfigError(
            f"check.package={package}: no such package registers a component.{did_you_mean(package, there)} "
            f"Packages: {listing(there)}."
        )
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
    _refuse_builtin([found], f"check.component={component}")
    return found


def _refuse_builtin(found: Sequence[Registered], what: str) -> None:
    if found and found[0].package.is_builtin:
        raise ConfigError(f"{what} is built in: its own tests are in tests/contract")


def _check_beside(registry: Registry, beside: Sequence[str], found: Sequence[Registered]) -> None:
    options = sorted({name for r in found for name in registry.options(r.component.kind)})
    for name in beside:
        if name not in options:
            raise ConfigError(f"check.beside: no checked kind has `{name}`.{did_you_mean(name, options)}")
