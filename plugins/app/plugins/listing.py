"""Description of the installed components as plain data."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic_core import to_jsonable_python

from dovetail.core.checkpoint import reader_problems
from dovetail.core.compose import KINDS, Config, Host, Registered, Registry
from dovetail.core.compose.compatibility import stated_by_default
from dovetail.core.compose.config import part_fields
from dovetail.core.compose.kinds import PRESET
from dovetail.core.compose.registry import Problem
from dovetail.core.errors import PluginError
from dovetail.core.tuning.packages import each_table
from dovetail.core.tuning.table import TuningTable


def describe(registry: Registry, kind: str | None, package: str | None, host: Host) -> dict[str, Any]:
    """Describe components, variants, presets, tuning tables and problems. The filter `kind` keeps problems without a
    kind."""

    def shown(of_kind: str, of_package: str) -> bool:
        return kind in (None, of_kind) and package in (None, name_of(of_package))

    tables = list(each_table(registry))
    wanted = [r for r in registry.registered.values() if shown(r.component.kind, str(r.package))]
    faulty = [table for _, _, table in tables if isinstance(table, Problem)]
    files = [f for f in registry.files if shown(f.group, f.package)]
    return {
        "fingerprint": registry.fingerprint(),
        "components": [_component(r, host) for r in sorted(wanted, key=_order)],
        "variants": [
            {"kind": f.group, "name": f.name, "package": f.package, "base": ", ".join(f.chooses), "about": f.about}
            for f in files
            if f.group != PRESET
        ],
        "presets": [
            {"name": f.name, "package": f.package, "chooses": list(f.chooses), "about": f.about}
            for f in files
            if f.group == PRESET
        ],
        "tuning_tables": [
            {"package": str(owner), "table": reference, "entries": _entries(table)}
            for owner, reference, table in tables
            if isinstance(table, TuningTable) and kind is None and shown("", str(owner))
        ],
        "problems": [
            {
                "package": p.package,
                "kind": p.kind or None,
                "name": p.name or None,
                "unnamed": p.unnamed,
                "reason": p.reason,
            }
            for p in (*registry.problems, *faulty, *reader_problems(registry))
            if shown(p.kind or kind or "", p.package)
        ],
    }


def packages(registry: Registry) -> list[str]:
    """Return the names of all packages that provide something, or failed to."""
    found = [str(r.package) for r in registry.registered.values()]
    found += [f.package for f in registry.files]
    found += [p.package for p in registry.problems]
    found += [str(package) for package, _ in (*registry.tuning_tables, *registry.checkpoint_readers)]
    return sorted({name_of(package) for package in found})


def _entries(table: TuningTable) -> dict[str, dict[str, int]]:
    """Return the number of entries by GPU and operation."""
    found: dict[str, dict[str, int]] = {}
    for subject, rows in table.entries.items():
        by_op = found.setdefault(subject.gpu, {})
        by_op[subject.op] = by_op.get(subject.op, 0) + len(rows)
    return found


def name_of(package: str) -> str:
    """Return the name in a "name version" string."""
    return package.partition(" ")[0]


def _order(registered: Registered) -> tuple[int, str]:
    return list(KINDS).index(registered.component.kind), registered.component.name


def _component(registered: Registered, host: Host) -> dict[str, Any]:
    component = registered.component
    return {
        "kind": component.kind,
        "name": component.name,
        "package": registered.package.name,
        "version": registered.package.version,
        "api": component.api,
        "target": component.target,
        "about": inspect.cleandoc(component.config.__doc__ or ""),
        "options": list(_options(component.config)),
        **_capabilities(registered, host),
    }


def _options(config: type[Config]) -> Iterator[dict[str, Any]]:
    parts = part_fields(config)
    for name, info in config.model_fields.items():
        option: dict[str, Any] = {"name": name, "type": type_name(info.annotation), "doc": info.description or ""}
        if name in parts:
            option["type"], option["default"] = parts[name]
        elif not info.is_required():
            option["default"] = to_jsonable_python(info.get_default(call_default_factory=True))
        yield option


def type_name(annotation: Any) -> str:
    """Return a type as users write it: `int | null`, `auto | cpu | cuda`."""
    if annotation is type(None):
        return "null"
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join("null" if a is None else str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_name(a) for a in args)
    if origin is typing.Annotated:
        return type_name(args[0])
    if origin is not None:
        inner = ", ".join("..." if a is Ellipsis else type_name(a) for a in args)
        return f"{origin.__name__}[{inner}]"
    return getattr(annotation, "__name__", str(annotation))


def _capabilities(registered: Registered, host: Host) -> dict[str, Any]:
    """Return the capabilities of a component with default options, or the reason for which its package fails."""
    try:
        stated = stated_by_default(registered, host)
    except PluginError as error:
        return {"provides": None, "requires": None, "broken": error.reason}
    if stated is None:
        return {"provides": None, "requires": None}
    return {
        "provides": to_jsonable_python(dict(stated.provides), fallback=str),
        "requires": [f"{r.kind}: {r.words()} ({r.reason})" for r in stated.requires],
    }
