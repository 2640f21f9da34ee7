"""`python run.py app=plugins`: list the components that can be chosen, and those that cannot with the reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from rich.markup import escape
from rich.table import Table

from dovetail.core.compose import KINDS, Composition, Host
from dovetail.core.compose.kinds import PRESET
from dovetail.core.compose.wording import did_you_mean, listing
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces.app import App
from dovetail.plugins.app.plugins.config import PluginsConfig
from dovetail.plugins.app.plugins.listing import describe, packages
from dovetail.plugins.app.tables import console


class PluginsApp(App):
    config: PluginsConfig

    def run(self, composition: Composition, prompts: Sequence[str]) -> int:
        kind, package = self.config.kind, self.config.package
        kinds, known = [*KINDS, PRESET], packages(composition.registry)
        if kind is not None and kind not in kinds:
            raise ConfigError(f"plugins.kind={kind}: no such kind.{did_you_mean(kind, kinds)} Kinds: {listing(kinds)}.")
        if package is not None and package not in known:
            none = f"plugins.package={package}: no such package provides anything.{did_you_mean(package, known)}"
            raise ConfigError(f"{none} Packages: {listing(known)}.")
        # Capabilities are shown for a plain CPU host: a listing loads no device library.
        with redirect_stdout(sys.stderr):  # keep what packages print while loading out of the listing
            found = describe(composition.registry, kind, package, Host())
        if self.config.format == "json":
            print(json.dumps(found, indent=2))
        else:
            _print_tables(found)
        return 0


def _print_tables(found: dict[str, Any]) -> None:
    out = console(140)
    rows = [*found["components"], *found["variants"]]
    for kind in sorted({row["kind"] for row in rows}, key=list(KINDS).index):
        title = f"{kind}: {KINDS[kind].about}"
        table = _Table(title, ("name", "package, api"), {"options": 5, "capabilities": 3})
        for c in found["components"]:
            if c["kind"] == kind:
                package = f"{c['package']} {c['version']}\n{c['api']}"
                table.add(c["name"], package, _options(c), _capabilities(c))
        for v in found["variants"]:
            if v["kind"] == kind:
                about = f"variant of {v['base']}: {v['about']}"
                table.add(v["name"], v["package"], about, "")
        out.print(table)
    if found["presets"]:
        table = _Table("presets: choose several parts at once", ("name", "package"), {"what": 1, "chooses": 1})
        for p in found["presets"]:
            table.add(f"+preset={p['name']}", p["package"], p["about"], "\n".join(p["chooses"]))
        out.print(table)
    if found["tuning_tables"]:
        table = _Table("tuning tables: measured choices of operations", ("package",), {"table": 1, "entries": 1})
        for t in found["tuning_tables"]:
            counts = [
                f"{gpu}: {', '.join(f'{op} {count}' for op, count in ops.items())}" for gpu, ops in t["entries"].items()
            ]
            table.add(t["package"], t["table"], "\n".join(counts) or "none")
        out.print(table)
    if found["problems"]:
        table = _Table("cannot be used", (), dict.fromkeys(("package", "component", "reason")))
        for p in found["problems"]:
            part = f"{p['kind']}={p['name']}" if p["kind"] else "all" if p["unnamed"] else ""
            table.add(p["package"], part, p["reason"])
        out.print(table)


class _Table(Table):
    def __init__(self, title: str, fixed: Sequence[str], folded: Mapping[str, int | None]) -> None:
        """`folded`: column that wraps -> its share of the width."""
        super().__init__(title=title, title_justify="left", show_lines=True, expand=True)
        for column in fixed:
            self.add_column(column, no_wrap=True)
        for column, ratio in folded.items():
            self.add_column(column, ratio=ratio, overflow="fold")

    def add(self, *cells: str) -> None:
        self.add_row(*map(escape, cells))


def _options(component: dict[str, Any]) -> str:
    lines = [" ".join(component["about"].split())] if component["about"] else []
    for o in component["options"]:
        default = f" = {json.dumps(o['default'])}" if "default" in o else ", required"
        lines.append(f"{o['name']}: {o['type']}{default}  {o['doc']}".rstrip())
    return "\n".join(lines)


def _capabilities(component: dict[str, Any]) -> str:
    if "broken" in component:
        return f"cannot be used: {component['broken']}"
    if component["provides"] is None:
        return "depend on its options"
    provides = [f"{key}: {json.dumps(value)}" for key, value in component["provides"].items()]
    return "\n".join([*provides, *(f"requires {r}" for r in component["requires"])])
