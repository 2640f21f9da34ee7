"""The pages are complete: components, kinds, methods, hooks, suites, settings. The site builds."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dovetail
from dovetail.core import interfaces, testing
from dovetail.core.compose import KINDS, EngineConfig, discover, hookspecs, installed
from dovetail.core.compose.component import Component
from dovetail.core.compose.sources import open_sources
from dovetail.core.errors import PluginError
from dovetail.core.interfaces import SamplingParams

from .commands import DOCS, ROOT, blocks, commands, pages

CONTRACTS = {kind: getattr(interfaces, k.interface.partition(":")[2]) for kind, k in KINDS.items()}
BUILT_IN = [r.component for r in installed().registered.values() if r.package.is_builtin]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))  # as mkdocs does
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hooks() -> Any:
    return load(DOCS / "hooks.py")


@pytest.mark.parametrize("kind", CONTRACTS)
def test_a_kind_has_a_page_that_names_its_contract(kind: str) -> None:
    text = pages()[f"kinds/{kind}.md"]
    contract = CONTRACTS[kind]
    assert f"dovetail.core.interfaces.{contract.__name__}" in text
    methods = [n for n, v in vars(contract).items() if not n.startswith("_") and (inspect.isroutine(v) or is_data(v))]
    missing = [name for name in methods if not re.search(rf"`{name}\b", text)]
    assert not missing, f"docs/kinds/{kind}.md does not say what {', '.join(missing)} of {contract.__name__} does"


@pytest.mark.parametrize("kind", CONTRACTS)
def test_a_contract_tells_itself_in_docstrings(kind: str) -> None:
    contract = CONTRACTS[kind]
    methods = {n: getattr(v, "__func__", v) for n, v in vars(contract).items() if not n.startswith("_")}
    bare = [n for n, v in methods.items() if (inspect.isfunction(v) or isinstance(v, property)) and not v.__doc__]
    assert contract.__doc__ and not bare, f"{contract.__name__}: {', '.join(bare)} have no docstring"


def is_data(value: object) -> bool:
    return isinstance(value, property | bool | str | tuple | classmethod)


@pytest.mark.parametrize("component", BUILT_IN, ids=lambda c: f"{c.kind}={c.name}")
def test_a_component_is_described_on_the_page_of_its_kind(component: Component) -> None:
    text = pages()[f"kinds/{component.kind}.md"]
    assert f"\n- `{component.name}`: " in text, (
        f"docs/kinds/{component.kind}.md has no line `- `{component.name}`: what it is for` under `Built in`"
    )


def test_no_page_describes_what_is_not_there() -> None:
    for kind in CONTRACTS:
        told = re.findall(r"^- `(\w+)`: ", pages()[f"kinds/{kind}.md"].partition("## Write one")[0], re.M)
        assert set(told) == {c.name for c in BUILT_IN if c.kind == kind}


def test_policy_methods_are_described() -> None:
    source = inspect.getsource(dovetail.PolicyScheduler)
    policy = re.findall(r"    def (\w+)\(", source.partition("# Policy")[2].partition("# Contract.")[0])
    assert len(policy) > 5
    missing = [name for name in policy if f"`{name}(" not in pages()["kinds/scheduler.md"]]
    assert not missing


def test_components_of_pages_have_names_of_their_own() -> None:
    """All pages are run in one environment, and each component that two packages register is refused."""
    owners: dict[tuple[str, str], str] = {}
    for block in blocks():
        stated = re.findall(r'kind="(\w+)",\s*name="(\w+)"', block.text) if block.language == "python" else []
        for kind, name in (*stated, *re.findall(r"new\.component=(\w+)/(\w+)", block.text)):
            assert owners.setdefault((kind, name), block.page) == block.page, (
                f"{kind}={name} is on {block.page} as well"
            )
    assert len(owners) > 10


def test_every_hook_is_described() -> None:
    names = [name for name in vars(hookspecs) if name.startswith("dovetail_")]
    assert names and all(f"`{name}`" in pages()["publishing-a-plugin.md"] for name in names)


def test_every_public_name_is_somewhere() -> None:
    text = "\n".join(pages().values())
    missing = [name for name in dovetail.__all__ if not re.search(rf"\b{name}\b", text)]
    assert not missing


def test_every_field_of_a_component_is_described() -> None:
    text = pages()["kinds/index.md"].partition("field of `Component`")[2]
    assert all(f"`{name}`" in text for name in Component.__dataclass_fields__)


def suites() -> dict[str, str]:
    found = {}
    for module in pkgutil.iter_modules(testing.__path__):
        source = (Path(testing.__path__[0]) / f"{module.name}.py").read_text(encoding="utf-8")
        for name in re.findall(r"^class (\w+Contract)\b", source, re.M):
            found[name] = f"dovetail.core.testing.{module.name}"
    return found


def test_every_suite_is_named_and_every_name_is_a_suite() -> None:
    text = "\n".join(pages().values())
    named = set(re.findall(r"\b(\w+Contract)\b", text))
    assert named == set(suites())
    for name, module in suites().items():
        assert f"{module}.{name}" in pages()["kinds/index.md"]
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("kind", CONTRACTS)
def test_what_a_suite_can_be_told_stands_on_the_page_of_its_kind(kind: str, hooks: Any) -> None:
    table = hooks.suite(kind)
    place = f"<!-- dovetail: suite {kind} -->"
    assert (place in pages()[f"kinds/{kind}.md"]) == (table.count("\n") > 1)
    settings = re.findall(r'^    (\w+)[^(\n]* = .*\n    """', inspect.getsource(suite_of(kind)), re.M)
    assert all(f"| `{setting}` |" in table for setting in settings)


def suite_of(kind: str) -> type[Any]:
    path = re.search(rf"^\| {kind} \| `([\w.]+)\.(\w+)` \|$", pages()["kinds/index.md"], re.M)
    assert path is not None
    suite = getattr(importlib.import_module(path[1]), path[2])
    assert isinstance(suite, type)
    return suite


# Tables that are generated while the site is built.


def test_the_reference_has_every_option(hooks: Any) -> None:
    page = hooks.components_page()
    for component in BUILT_IN:
        prefix = component.name if component.kind == "app" else component.kind
        assert f"**`{component.kind}={component.name}`**" in page
        for option in component.config.model_fields:
            assert f"| `{prefix}.{option}` |" in page
    assert all(f"| `engine.{name}` |" in page for name in EngineConfig.model_fields)


@pytest.mark.nightly  # composes 117 times
def test_the_matrix_has_every_demand(hooks: Any) -> None:
    page = hooks.compatibility_page()
    assert "| `attention=sdpa`" in page and "## model and attention" in page
    for line in page.splitlines():
        if line.startswith("|"):
            assert not re.search(r"\| *\|", line), f"an empty cell: {line}"


def test_places_for_tables_are_filled(hooks: Any) -> None:
    for page, text in pages().items():
        built = hooks.on_page_markdown(text)
        assert "dovetail: " not in re.sub(r"^```.*?^```", "", built, flags=re.M | re.S), page
        for kind in re.findall(r"dovetail: components (\w+)", text):
            assert built.count(f"**`{kind}=") == sum(c.kind == kind for c in BUILT_IN)


def test_generated_text_is_current(hooks: Any) -> None:
    old = [page for page, text in pages().items() if hooks.filled(text) != text]
    assert old == [], "run `python docs/hooks.py`"


def test_sampling_parameters_are_listed(hooks: Any) -> None:
    page = hooks.on_page_markdown(pages()["quick-start.md"])
    assert all(f"| `{name}` |" in page for name in SamplingParams.model_fields)


def test_pictures_are_those_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "img")
    draw = load(DOCS / "img" / "draw.py")
    for name, picture in draw.PICTURES.items():
        drawn = (DOCS / "img" / name).read_text(encoding="utf-8")
        assert picture().svg() == drawn, f"run `python docs/img/draw.py`: {name} is not what it draws"


@pytest.mark.nightly
def test_the_site_builds(tmp_path: Path) -> None:
    """Links, anchors and the list of pages are checked as well."""
    pytest.importorskip("mkdocs", reason="needs the docs extra")
    built = subprocess.run(
        # Not --quiet: warnings that are not shown do not count for --strict.
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    html = (tmp_path / "site" / "reference" / "components" / "index.html").read_text(encoding="utf-8")
    assert "scheduler=fcfs" in html
    elsewhere = re.findall(r'(?:src|href)="(https?://[^"]+)"', html)
    assert not [url for url in elsewhere if "squidfunk" not in url], "the page loads something from elsewhere"


# Broken packages, as the page on publishing describes them.

COMPONENT = """
from dovetail import Component, Config, hookimpl

class C(Config): ...

@hookimpl
def dovetail_components():
    return [Component(kind="scheduler", name="acme", config=C, target="acme_nowhere:Acme", api="scheduler/0.3")]
"""
BROKEN = {
    "module": "import nowhere",
    "hook": COMPONENT.replace("dovetail_components", "dovetail_component"),
    "version": COMPONENT.replace('api="scheduler/0.3"', 'api="scheduler/9.0"'),
    "name": COMPONENT.replace('name="acme"', 'name="fcfs"'),
    "file": """
from dovetail import hookimpl

@hookimpl
def dovetail_config_dirs():
    return ["pkg://acme_conf"]
""",
    "target": COMPONENT,
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_package_is_reported_as_the_page_says(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme.py").write_text(BROKEN[broken])
    info, presets = tmp_path / "acme-1.0.dist-info", tmp_path / "acme_conf" / "preset"
    info.mkdir()
    presets.mkdir(parents=True)
    (presets / "tiny_cpu.yaml").write_text("# @package _global_\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dovetail]\nacme = acme\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme", raising=False)
    registry, _ = open_sources(discover(), ())
    sys.modules.pop("acme", None)
    reasons = [p.reason for p in registry.problems if p.package == "acme 1.0"]
    if not reasons:
        with pytest.raises(PluginError) as caught:
            registry.get("scheduler", "acme").target()
        reasons = [caught.value.reason]
    rows = [row for row in pages()["publishing-a-plugin.md"].splitlines() if row.startswith("| ")]
    told = {row.split(" | ")[-1].strip(" |`") for row in rows}
    assert any(words in reason for words in told for reason in reasons if len(words) > 30), reasons


def test_every_command_of_the_pages_has_a_rule() -> None:
    """The nightly script runs all of them together: one without a rule would end its tests."""
    for command in commands():
        if not (command.why_not_run or command.is_pytest or command.is_shell):
            assert command.argv is not None, "argv raises an error that names the command"
