"""Public signatures and options, and the copy of them in surface.json that CI compares.

`python tests/api/surface.py` writes the copy anew. It refuses if a contract changed and its version did not, or if
CHANGELOG.md does not name what changed (docs/versions.md).
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

import dovetail
from dovetail.core import interfaces
from dovetail.core.compose import KINDS, EngineConfig, hookspecs, installed
from dovetail.core.compose.config import part_fields
from dovetail.plugins.app.plugins.listing import type_name

ROOT = Path(__file__).parents[2]
COPY = Path(__file__).with_name("surface.json")
CHANGELOG = ROOT / "CHANGELOG.md"

SUBCLASSED = {"PolicyScheduler": "scheduler", "EvictionPolicy": "kv_cache"}
"""Names of `dovetail` that components subclass -> module of the contract whose version a change of them raises."""

Surface = dict[str, Any]


def surface() -> Surface:
    """Return contracts (by module: versions and names), other public names, hooks, and options (by component)."""
    found, others = contracts(), package()
    for name, module in SUBCLASSED.items():
        found[module]["names"][name] = others.pop(name)
    return {"contracts": found, "package": others, "hooks": hooks(), "options": options()}


# Signatures, read from the source: the text does not depend on what is installed.


def contracts() -> dict[str, Any]:
    folder = Path(interfaces.__path__[0])
    found: dict[str, Any] = {}
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            module = str(node.module).rpartition(".")[2]
            exported = {alias.name for alias in node.names}
            names = dict(public((folder / f"{module}.py").read_text(encoding="utf-8"), exported))
            found[module] = {"api": [], "names": names}
    for kind in KINDS.values():
        name = kind.interface.partition(":")[2]
        next(one for one in found.values() if name in one["names"])["api"].append(kind.api)
    return found


def package() -> dict[str, list[str]]:
    """Return the names of `dovetail` that are neither part of `core.interfaces` nor listed with the options."""
    found: dict[str, list[str]] = {}
    for file, names in _homes(Path(str(dovetail.__file__)), set(dovetail.__all__) - {"EngineConfig", "__version__"}):
        if file.parent.name != "interfaces":
            found |= dict(public(file.read_text(encoding="utf-8"), names))
    return found


def _homes(file: Path, names: set[str]) -> Iterator[tuple[Path, set[str]]]:
    """Yield the modules that define names which a module imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dovetail."):
            here = names & {alias.name for alias in node.names}
            home = Path(str(dovetail.__file__)).parent.joinpath(*str(node.module).split(".")[1:])
            if here and home.is_dir():
                yield from _homes(home / "__init__.py", here)
            elif here:
                yield home.with_suffix(".py"), here


def hooks() -> dict[str, list[str]]:
    source = Path(str(hookspecs.__file__)).read_text(encoding="utf-8")
    return dict(public(source, {name for name in vars(hookspecs) if name.startswith("dovetail_")}))


def public(source: str, exported: set[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each exported name with the lines of its signature."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in exported:
            yield node.name, [_head(node), *(line for member in node.body for line in _lines(member))]
        elif (name := _name(node)) in exported:
            yield name, _lines(node)


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    if isinstance(node, ast.AnnAssign | ast.Assign):
        return ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
    return ""


def _head(node: ast.ClassDef) -> str:
    bases = ", ".join(map(ast.unparse, [*node.bases, *node.keywords]))
    return "".join(f"@{ast.unparse(mark)} " for mark in node.decorator_list) + f"class {node.name}({bases})"


def _lines(node: ast.stmt) -> list[str]:
    """Return a public member of a class or module as a line, without its body and docstring."""
    name = _name(node)
    if not name or (name.startswith("_") and name != "__init__"):
        return []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        sort = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        marks = "".join(f"@{ast.unparse(mark)} " for mark in node.decorator_list)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return [f"{marks}{sort} {name}({ast.unparse(node.args)}){returns}"]
    return [ast.unparse(node)]


# Options


def options() -> dict[str, dict[str, str]]:
    """Return "kind=name" -> option -> type and default, of built-in components and of the engine."""
    found = {"engine": _fields(EngineConfig), "SamplingParams": _fields(interfaces.SamplingParams)}
    for (kind, name), registered in installed().registered.items():
        if registered.package.is_builtin:
            found[f"{kind}={name}"] = _fields(registered.component.config)
    return found


def _fields(config: type[BaseModel]) -> dict[str, str]:
    parts: Mapping[str, Any] = part_fields(config)  # type: ignore[arg-type]
    found = {}
    for name, info in config.model_fields.items():
        if name in parts:
            found[name] = f"a {parts[name][0]} = {parts[name][1]}"
        elif info.is_required():
            found[name] = type_name(info.annotation)
        else:
            default = json.dumps(to_jsonable_python(info.get_default(call_default_factory=True)))
            found[name] = f"{type_name(info.annotation)} = {default}"
    return found


# Changes


def differences(old: Surface, new: Surface) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (part, name, changed lines with + or -) for each name or option that differs."""
    for module in sorted({*old["contracts"], *new["contracts"]}):
        before, after = (one["contracts"].get(module, {"names": {}})["names"] for one in (old, new))
        for name, lines in _changed(before, after):
            yield module, name, lines
    for part in ("package", "hooks"):
        for name, lines in _changed(old.get(part, {}), new[part]):
            yield part, name, lines
    for component in sorted({*old["options"], *new["options"]}):
        before, after = (
            {name: [f"{name}: {text}"] for name, text in one["options"].get(component, {}).items()}
            for one in (old, new)
        )
        for name, lines in _changed(before, after):
            yield component, name, lines


def _changed(old: Mapping[str, list[str]], new: Mapping[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    for name in sorted({*old, *new}):
        before, after = old.get(name, []), new.get(name, [])
        lines = [f"-{line}" for line in before if line not in after]
        lines += [f"+{line}" for line in after if line not in before]
        if lines or before != after:
            yield name, lines


def breaks(old: Surface, new: Surface, part: str, lines: list[str], name: str) -> bool:
    """Whether components that were written before may not work any more: something is gone or differs, or a name that
    there was asks for something new."""
    before = old["contracts"].get(part, {"names": {}})["names"]
    asks = [line for line in lines if "@abstractmethod" in line or re.fullmatch(r"\+\w+: [^=]*", line)]
    return any(line.startswith("-") for line in lines) or (name in before and bool(asks))


def missing(old: Surface, new: Surface, changelog: str) -> list[str]:
    """Return what the changes lack: a version of a contract, or an entry in the newest section of CHANGELOG.md."""
    newest = changelog.partition("\n## ")[2].partition("\n## ")[0]
    heading = newest.partition("\n")[0]
    found = []
    if heading != f"{dovetail.__version__} (unreleased)":
        found.append(f"CHANGELOG.md has no section `## {dovetail.__version__} (unreleased)` at its top")
    apis = {part: one["api"] for part, one in new["contracts"].items()}
    bumped = {part for part in apis if apis[part] != old["contracts"].get(part, {"api": None})["api"]}
    by_part: dict[str, dict[str, list[str]]] = {}
    for part, name, lines in differences(old, new):
        by_part.setdefault(part, {})[name] = lines
    for part, changed in by_part.items():
        what, names = f"{part}: {', '.join(changed)} changed", list(changed)
        if part == "package" or part in new["options"] or part in old["options"]:
            named = [name for name in names if _names(newest, name) or _names(newest, part)]
            found += [f"{part}: {name} changed, but {_no_entry(heading, name)}" for name in names if name not in named]
            continue
        breaking = any(breaks(old, new, part, lines, name) for name, lines in changed.items())
        if breaking and apis.get(part) and part not in bumped:
            found.append(
                f"{what}, but the version is still {' and '.join(apis[part])}: raise it in core/compose/kinds.py"
            )
        elif breaking and not apis.get(part) and not bumped:
            found.append(f"{what}, which contracts share: raise the version of those that it affects")
        if not any(_names(newest, word) for word in (*names, *(apis[part] if part in bumped else ()))):
            found.append(f"{what}, but {_no_entry(heading, names[0])}")
    return found


def _names(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w/]){re.escape(word)}(?![\w/])", text) is not None


def _no_entry(heading: str, word: str) -> str:
    return f"the section {heading} of CHANGELOG.md does not name `{word}`"


def main() -> int:
    old, new = json.loads(COPY.read_text(encoding="utf-8")), surface()
    for part, name, lines in differences(old, new):
        print(f"{part}: {name}", *(f"    {line}" for line in lines), sep="\n")
    if lacks := missing(old, new, CHANGELOG.read_text(encoding="utf-8")):
        print("surface.json is unchanged:", *(f"- {text}" for text in lacks), sep="\n", file=sys.stderr)
        return 1
    COPY.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
