"""Generate the parts of the pages that come from the registry: `python docs/hooks.py` rewrites them.

The text between `<!-- dovetail: components scheduler -->` and `<!-- /dovetail -->` is the options of every built-in
scheduler. It is committed, so that the pages read on any host; a test compares it with what is generated. The pages
reference/components.md and reference/compatibility.md exist only in the built site, which is generated anew.
"""

from __future__ import annotations

import ast
import itertools
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from result_tables import results, simulator, table

from dovetail.core import testing
from dovetail.core.compose import KINDS, Capabilities, Host, Requires, Selected, compose, installed
from dovetail.core.compose.compatibility import stated_by_default
from dovetail.core.compose.config import part_fields
from dovetail.core.compose.engine_config import EngineConfig
from dovetail.core.compose.registry import Registered
from dovetail.core.compose.wording import show
from dovetail.core.errors import DovetailError
from dovetail.core.interfaces import SamplingParams
from dovetail.plugins.app.plugins.listing import type_name
from dovetail.plugins.model.llama.families import FAMILIES

CONF = Path(__file__).parent.parent / "conf"
HOSTS = {
    "CPU": Host(device="cpu", memory_bytes=64 << 30),
    "GPU": Host(device="cuda", device_count=8, compute_capability=(9, 0), memory_bytes=141 << 30),
}
"""Machines for the matrix. The GPU is Hopper; the matrix shows which parts require a newer one."""


# mkdocs


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, page in PAGES.items():
        files.append(File.generated(config, path, content=page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return PLACE.sub(_generated, markdown)


PLACE = re.compile(r"^<!-- dovetail: (\w+) ?(\w*) -->\n(?:(?!<!-- dovetail: ).*\n)*?<!-- /dovetail -->$", re.M)


def _generated(match: re.Match[str]) -> str:
    return TABLES[match[1]](*([match[2]] if match[2] else []))


def filled(page: str) -> str:
    """Return a page with the generated text of today between its marks."""

    def place(match: re.Match[str]) -> str:
        head = match[0].partition("\n")[0]
        return f"{head}\n\n{_generated(match)}\n\n<!-- /dovetail -->"

    return PLACE.sub(place, page)


# Components and their options


def built_in(kind: str) -> list[Registered]:
    return [r for (k, _), r in installed().registered.items() if k == kind and r.package.is_builtin]


def components(kind: str) -> str:
    """Return every component of a kind with its options, then the variants."""
    parts = [_component(registered) for registered in built_in(kind)]
    if found := list(variants(kind)):
        rows = [[f"`{name}`", f"`{base}`", about] for name, base, about in found]
        parts += [f"**Variants of {kind}**: a component with other defaults.", table(("name", "base", "what"), rows)]
    return "\n\n".join(parts) or "No component of this kind is built in."


def _component(registered: Registered) -> str:
    component = registered.component
    about = (component.config.__doc__ or "").strip()
    head = f"**`{component.kind}={component.name}`** (api `{component.api}`)" + (f": {_prose(about)}" if about else "")
    options = option_rows(component.config, component.name if component.kind == "app" else component.kind)
    return head + "\n\n" + (table(("option", "type", "default", "meaning"), options) if options else "No options.")


def option_rows(config: type[BaseModel], prefix: str) -> list[list[str]]:
    parts = part_fields(config)  # type: ignore[arg-type]
    rows = []
    for name, info in config.model_fields.items():
        kind = type_name(info.annotation).replace(" | ", "` or `")
        if name in parts:
            kind, default = f"a {parts[name][0]}", _value(parts[name][1])
        elif info.is_required():
            default = "required"
        else:
            default = _value(to_jsonable_python(info.get_default(call_default_factory=True)))
        rows.append([f"`{prefix}.{name}`" if prefix else f"`{name}`", f"`{kind}`", default, _prose(info.description)])
    return rows


def variants(kind: str) -> Iterator[tuple[str, str, str]]:
    """Yield (name, base, first comment line) of each YAML file of a kind, or of the presets."""
    for file in sorted((CONF / kind).glob("*.yaml")):
        lines = file.read_text(encoding="utf-8").splitlines()
        comment = [line.removeprefix("#").strip() for line in lines if line.startswith("# ") and "@package" not in line]
        base = next((line.split("- ")[1].strip() for line in lines if line.strip().startswith("- ")), "")
        yield file.stem, base, _prose(comment[0] if comment else "")


def engine() -> str:
    return table(("setting", "type", "default", "meaning"), option_rows(EngineConfig, "engine"))


def sampling() -> str:
    return table(("field", "type", "default", "meaning"), option_rows(SamplingParams, ""))


def presets() -> str:
    return table(("preset", "what"), [[f"`+preset={name}`", about] for name, _, about in variants("preset")])


def kinds() -> str:
    """Return the table of kinds with their built-in components."""
    rows = []
    for kind in KINDS.values():
        names = ", ".join(f"`{r.component.name}`" for r in built_in(kind.name)) or "-"
        page = f"[`{kind.name}`]({kind.name}.md)" if (Path(__file__).parent / f"kinds/{kind.name}.md").is_file() else ""
        how = {"one": "one", "many": "a list", "per_request": "by request"}[kind.cardinality]
        rows.append([page or f"`{kind.name}`", kind.about, how, f"`{kind.api}`", names])
    return table(("kind", "what it does", "chosen", "api", "built in"), rows)


def suite(kind: str) -> str:
    """Return the table of settings of a kind's contract suite: attributes with a docstring. Parsed, not imported."""
    index = (Path(__file__).parent / "kinds" / "index.md").read_text(encoding="utf-8")
    found = re.search(rf"^\| {kind} \| `dovetail\.core\.testing\.(\w+)\.(\w+)` \|$", index, re.M)
    assert found is not None, f"kinds/index.md names no suite of {kind}"
    source = (Path(testing.__file__).parent / f"{found[1]}.py").read_text(encoding="utf-8")
    (body,) = (n.body for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == found[2])
    rows = []
    for setting, text in itertools.pairwise(body):
        match setting, text:
            case (
                ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value)
                | ast.Assign(targets=[ast.Name(name)], value=value),
                ast.Expr(ast.Constant(str(about))),
            ):
                rows.append([f"`{name}`", f"`{ast.unparse(value)}`", _prose(about)])
    return table((f"attribute of `{found[2]}`", "default", "meaning"), rows)


def components_page() -> str:
    about = "Generated from the registry when the site is built. `python run.py app=plugins` prints the same list."
    sections = [f"## {kind}\n\n{KINDS[kind].about}.\n\n{components(kind)}" for kind in KINDS if built_in(kind)]
    return (
        "\n\n".join(
            ["# Every component", about, "## engine", "Settings that several components read.", engine(), *sections]
        )
        + "\n"
    )


# Compatibility


class Choice:
    """A component with its default options, or a variant. Without `part`, it is left out of the matrix."""

    def __init__(self, kind: str, name: str, part: Selected | None) -> None:
        self.kind, self.name, self.part = kind, name, part
        self._stated: dict[str, Capabilities] = {}
        self.facts: dict[str, object] = {}
        if part is not None and kind == "model":
            from dovetail.core.host import model_facts

            self.facts = dict(model_facts(part.target().spec(part.config)))

    def stated(self, host: str) -> Capabilities:
        if host not in self._stated:
            self._stated[host] = self.part.capabilities(HOSTS[host]) if self.part else Capabilities()
        return self._stated[host]

    def refuses(self, other: Choice, host: str) -> list[str]:
        """Return the requirements on the other's kind that the other does not meet."""
        provides = {**other.stated(host).provides, **other.facts}
        return [
            f"{self.kind}={self.name} requires {other.kind} with {demand.words()} ({demand.reason})"
            for demand in self.stated(host).requires
            if demand.kind == other.kind and not (demand.key in provides and demand.admits(provides[demand.key]))
        ]


def choices(kind: str) -> list[Choice]:
    found = []
    runs = [name for name, _, about in variants(kind) if "cannot run" not in about]
    for name in [*(r.component.name for r in built_in(kind)), *runs]:
        try:
            composition = compose([f"{kind}={name}"], app="generate")
            chosen = composition.parts[kind]
            found.append(Choice(kind, name, chosen if isinstance(chosen, Selected) else chosen[name]))
        except DovetailError:
            # It has required options, and its capabilities depend on them.
            found.append(Choice(kind, name, None))
    return found


def compatibility_page() -> str:
    """Return a matrix for each pair of kinds with requirements, then requirements on settings, then capabilities."""
    needs = compose(app="generate").app_part.config.needs  # type: ignore[attr-defined]
    found = {kind: choices(kind) for kind in KINDS if kind in needs and built_in(kind)}
    lines = [
        "# Compatibility",
        "This page is generated from the capabilities of the components when the site is built. The engine checks the "
        "same data before it loads anything and reports every conflict at once. "
        "[Capabilities](../kinds/index.md#capabilities) explains how a component states them.",
        "Components with required options, such as `model=llama` without a folder, are left out, because their "
        "capabilities depend on the options. Shapes that can be planned but not run are left out, too.",
    ]
    for one, other in _pairs(found):
        lines += _matrix(found[one], found[other])
    lines += [
        "## Requirements on settings and machine",
        _demands(found),
        "## Capabilities of each part",
        "For components with their default options, on a GPU. Components that are not listed state no capabilities.",
        _provided(found),
    ]
    return "\n\n".join(lines) + "\n"


def _pairs(found: dict[str, list[Choice]]) -> Iterator[tuple[str, str]]:
    """Yield each pair of kinds with a requirement once; the kind with more choices is first and gives the rows."""
    seen = set()
    for kind, of_kind in found.items():
        for other in {d.kind: 0 for c in of_kind for host in HOSTS for d in c.stated(host).requires}:
            pair = tuple(sorted((kind, other), key=lambda k: -len(found.get(k, ()))))
            if other in found and pair not in seen:
                seen.add(pair)
                yield pair  # type: ignore[misc]


def _matrix(rows: list[Choice], columns: list[Choice]) -> list[str]:
    rows, columns = ([c for c in side if c.part is not None] for side in (rows, columns))
    reasons: dict[str, int] = {}

    def cell(row: Choice, column: Choice) -> str:
        refusals = {host: [*row.refuses(column, host), *column.refuses(row, host)] for host in HOSTS}
        if not any(refusals.values()):
            return "yes"
        notes = dict.fromkeys(reasons.setdefault(r, len(reasons) + 1) for found in refusals.values() for r in found)
        where = [host for host, found in refusals.items() if not found]
        return (f"on a {' or '.join(where)}" if where else "no") + f" ({', '.join(map(str, notes))})"

    cells = [[f"`{row.name}`", *(cell(row, column) for column in columns)] for row in rows]
    head = (rows[0].kind, *(f"`{column.name}`" for column in columns))
    lines = [f"## {rows[0].kind} and {columns[0].kind}", table(head, cells)]
    if reasons:
        lines.append("\n".join(f"{number}. {_prose(reason)}" for reason, number in reasons.items()))
    return lines


def _demands(found: dict[str, list[Choice]]) -> str:
    parts: dict[tuple[str, str], list[str]] = {}
    for choice in (c for of_kind in found.values() for c in of_kind if c.part is not None):
        for demand in {d: 0 for host in HOSTS for d in choice.stated(host).requires}:
            if demand.kind in ("engine", "host"):
                parts.setdefault((_asked(demand), _prose(demand.reason)), []).append(f"`{choice.kind}={choice.name}`")
    rows = [[", ".join(names), asked, reason] for (asked, reason), names in parts.items()]
    return table(("part", "requires", "because"), rows)


def _asked(demand: Requires) -> str:
    words = demand.words().removeprefix(demand.key).strip()
    if demand.allowed is not None and len(demand.allowed) > 8:
        words = f"one of {len(demand.allowed)} values from {show(demand.allowed[0])} to {show(demand.allowed[-1])}"
    return f"`{demand.kind}.{demand.key}` {words}"


def _provided(found: dict[str, list[Choice]]) -> str:
    rows = []
    for registered in (r for kind in found for r in built_in(kind)):
        stated = stated_by_default(registered, HOSTS["GPU"])
        if stated is None:
            facts = "depends on its options"
        elif stated.provides:
            facts = "<br>".join(f"`{key}`: {_value(to_jsonable_python(v))}" for key, v in stated.provides.items())
        else:
            continue
        rows.append([f"`{registered.component.kind}={registered.component.name}`", facts])
    return table(("part", "provides"), rows)


# Words


def architectures() -> str:
    """Return how each architecture runs that the registry or the tests name, and the variants that have its shapes."""
    kinds = runpy.run_path(str(CONF.parent / "tests" / "numerics" / "decoders.py"))["DECODERS"]
    native = {name.lower() for name in FAMILIES}
    others = [
        kind for kind in sorted(kinds) if f"{kind.removesuffix('_text').replace('_', '')}forcausallm" not in native
    ]
    variants: dict[str, list[str]] = {}
    for file in sorted((CONF / "model").glob("*.yaml")):
        for name in re.findall(r"architectures: \[(\w+)\]", file.read_text(encoding="utf-8")):
            variants.setdefault(name, []).append(f"`{file.stem}`")
    rows = [[f"`{name}`", "native", ", ".join(variants.get(name, []))] for name in FAMILIES]
    names = ", ".join(f"`{kind}`" for kind in others)
    head = "in config.json", "runs as", "variants with its shapes"
    return table(head, [*rows, [f"`model_type` {names}", "any decoder", ""]])


def _value(value: object) -> str:
    text = ", ".join(map(show, value)) if isinstance(value, list) and value else show(value)
    return f"`{text}`" if text else '`""`'


def _prose(text: str | None) -> str:
    """Return the text on one line, with characters escaped that Markdown or HTML would interpret."""
    words = " ".join((text or "").split())
    for char in "|*_<":
        words = words.replace(char, {"<": "&lt;", "|": "&#124;"}.get(char, f"\\{char}"))
    return re.sub(r"`([^`]*)`", lambda m: "`" + m[1].replace("\\", "").replace("&lt;", "<") + "`", words)


TABLES: dict[str, Callable[..., str]] = {
    "architectures": architectures,
    "components": components,
    "engine": engine,
    "sampling": sampling,
    "presets": presets,
    "kinds": kinds,
    "results": results,
    "simulator": simulator,
    "suite": suite,
}
PAGES: dict[str, Callable[[], str]] = {
    "reference/components.md": components_page,
    "reference/compatibility.md": compatibility_page,
}

if __name__ == "__main__":
    for file in Path(__file__).parent.rglob("*.md"):
        text = file.read_text(encoding="utf-8")
        if filled(text) != text:
            file.write_text(filled(text), encoding="utf-8")
            print(f"rewrote {file}")
