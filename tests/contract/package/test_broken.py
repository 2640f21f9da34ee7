"""Packages with one fault each; the suite must reject each by the named test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dovetail.core.compose import discovery
from dovetail.core.compose.cli import main
from dovetail.core.testing.package import PackageContract
from dovetail.core.testing.suite import failures

pytestmark = pytest.mark.nightly

SOUND = '''
from dovetail import Capabilities, Component, Config, Requires, hookimpl
from dovetail.core.interfaces import Router


class C(Config):
    """One router."""

    factor: float = 2.0
    """Times."""


class Mine(Router):
    def route(self, arrival, loads):
        return loads[0].replica


def capabilities(config, host):
    demand = Requires(kind="engine", key="tp", at_most=8, reason="it counts to eight")
    return Capabilities(requires=(demand,))


@hookimpl
def dovetail_components():
    where = dict(target="acme:Mine", capabilities="acme:capabilities")
    return [Component(kind="router", name="acme", config=C, api="router/0.1", **where)]


@hookimpl
def dovetail_config_dirs():
    return ["pkg://acme_conf"]


@hookimpl
def dovetail_tuning_tables():
    return ["pkg://acme_conf/tiles.json"]


@hookimpl
def dovetail_checkpoint_readers():
    return ["acme_reader:Scroll"]
'''
READER = """
from dovetail.core.checkpoint import Checkpoint, FolderCheckpoint


class Scroll(FolderCheckpoint):
    @classmethod
    def recognizes(cls, path):
        return path.suffix == ".scroll"
"""
TABLE = """{"schema": "dovetail.tuning/1", "entries": [{"op": "matmul", "gpu": "X", "key": {"weight": "fp8",
"outputs": 64, "inputs": 64}, "rows": {"1": {"tokens": 16, "outputs": 64, "inputs": 64}}}]}"""
TABLES = "test_tuning_tables_can_be_used"
READERS = "test_checkpoint_readers_load"
VARIANT = "defaults:\n  - acme\n  - _self_\n\nfactor: 3.0\n"
BROKEN: dict[str, tuple[tuple[str, str], str]] = {
    "another contract's version": (("router/0.1", "router/9.0"), "test_it_has_no_problems"),
    "no components, no folders": (
        (SOUND[SOUND.index("@hookimpl") :], "@hookimpl\ndef dovetail_components():\n    return []\n"),
        "test_it_has_no_problems",
    ),
    "torch where components are listed": (
        ("from dovetail import", "import torch\nfrom dovetail import"),
        "test_listing_it_imports_nothing_heavy",
    ),
    "a config without words": (('    """One router."""\n', ""), "test_options_are_described"),
    "an option without words": (('    """Times."""\n', ""), "test_options_are_described"),
    "an abstract class": (("def route(", "def root("), "test_classes_are_complete"),
    "a class of another kind": (("class Mine(Router)", "class Mine"), "test_classes_are_complete"),
    "a setting that does not exist": (('key="tp"', 'key="ranks"'), "test_capabilities_are_stated_for_any_machine"),
    "a kind that does not exist": (('"engine"', '"engines"'), "test_capabilities_are_stated_for_any_machine"),
    "capabilities that need a GPU": (
        ("    demand =", "    1 / host.device_count\n    demand ="),
        "test_capabilities_are_stated_for_any_machine",
    ),
    "a tuning table with a field that is not there": (("pkg://acme_conf/tiles", "pkg://acme_conf/wrong"), TABLES),
    "a tuning table without entries": (("pkg://acme_conf/tiles", "pkg://acme_conf/empty"), TABLES),
    "a checkpoint reader that is not there": ((":Scroll", ":Folder"), READERS),
    "an abstract checkpoint reader": ((":Scroll", ":Checkpoint"), READERS),
    "a variant with an option that is not there": (("factor: 3.0", "factr: 3.0"), "test_presets_and_variants_compose"),
}

Installed = Callable[[str, str], PackageContract]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    """installed(module, variant): return the suite of a package as pip would install it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def install(module: str, variant: str) -> PackageContract:
        (tmp_path / "acme.py").write_text(module)
        (tmp_path / "acme_reader.py").write_text(READER)
        info, variants = tmp_path / "acme-1.0.dist-info", tmp_path / "acme_conf" / "router"
        variants.mkdir(parents=True)
        (variants / "acme_wide.yaml").write_text(variant)
        (variants.parent / "tiles.json").write_text(TABLE)
        (variants.parent / "wrong.json").write_text(TABLE.replace('"tokens"', '"rows"'))
        (variants.parent / "empty.json").write_text('{"schema": "dovetail.tuning/1", "entries": []}')
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[dovetail]\nacme = acme\n")
        discovery.installed.cache_clear()
        suite = PackageContract()
        suite.package = "acme"
        return suite

    yield install
    for name in ("acme", "acme_reader"):
        sys.modules.pop(name, None)
    discovery.installed.cache_clear()


@pytest.mark.parametrize("name", BROKEN)
def test_the_suite_rejects(name: str, installed: Installed) -> None:
    change, test = BROKEN[name]
    module, variant = SOUND.replace(*change), VARIANT.replace(*change)
    assert (module, variant) != (SOUND, VARIANT)
    imports = "test_listing_it_imports_nothing_heavy"
    skip = () if test == imports else (imports,)  # starting a process for each is expensive
    assert test in failures(installed(module, variant), skip=skip)


def test_the_unbroken_one_passes(installed: Installed) -> None:
    assert failures(installed(SOUND, VARIANT)) == {}


def test_a_package_of_a_table_alone_passes_and_is_listed(installed: Installed, capsys) -> None:
    hook = SOUND[
        SOUND.index("@hookimpl\ndef dovetail_tuning_tables") : SOUND.index("@hookimpl\ndef dovetail_checkpoint")
    ]
    assert failures(installed(f"from dovetail import hookimpl\n\n\n{hook}", VARIANT)) == {}
    assert main(["app=plugins", "plugins.package=acme", "plugins.format=json"]) == 0
    found = json.loads(capsys.readouterr().out)
    entries = {"X": {"matmul": 1}}
    assert found["tuning_tables"] == [
        {"package": "acme 1.0", "table": "pkg://acme_conf/tiles.json", "entries": entries}
    ]
    assert not found["components"] and not found["presets"] and not found["problems"]
    assert main(["app=plugins", "plugins.package=acme"]) == 0 and "X: matmul 1" in capsys.readouterr().out


def test_one_component_is_tested_without_the_rest_of_its_package(installed: Installed) -> None:
    rest = 'Component(kind="router", name="rest", config=Bare, target="acme:Mine", api="router/0.1")'
    bare = 'class Bare(Config):\n    """An option without words."""\n\n    factor: float = 1.0\n\n\n'
    module = SOUND.replace("return [Component", f"return [{rest}, Component")
    module = module.replace("@hookimpl\ndef dovetail_comp", f"{bare}@hookimpl\ndef dovetail_comp")
    suite = installed(module.replace("pkg://acme_conf/tiles", "pkg://acme_conf/wrong"), VARIANT)
    imports = ("test_listing_it_imports_nothing_heavy",)
    assert set(failures(suite, skip=imports)) == {"test_options_are_described", TABLES}
    suite.component = "router/acme"
    assert failures(suite, skip=imports) == {}
    suite.component = "router/rest"
    assert set(failures(suite, skip=imports)) == {"test_options_are_described"}
