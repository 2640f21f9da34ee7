"""Packages that break in unusual ways. `app=plugins` must list each problem, and the defaults must still compose."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .conftest import composing, listing, run_all

COMPONENT = """
from dovetail import Component, Config, hookimpl

class Options(Config):
    pass

@hookimpl
def dovetail_components():
    return [Component(kind="scheduler", name={name}, config=Options, target={target}, api={api}{more})]

def capabilities(config, host):
    raise ValueError("no idea")
"""


def source(name='"rough"', target='"rough:Options"', api='"scheduler/0.3"', more=""):
    return COMPONENT.format(name=name, target=target, api=api, more=more)


TABLES = """
from dovetail import hookimpl

@hookimpl
def dovetail_tuning_tables():
    return [{table!r}]
"""
ROUGH = {
    "syntax_error": ("def (", ""),
    "no_list": ("from dovetail import hookimpl\n@hookimpl\ndef dovetail_components():\n    return 3", ""),
    "exits": ("import sys\nsys.exit(3)", ""),
    "ends": ("import os\nos._exit(0)", "entry point main: SystemExit: it called os._exit(0)"),
    "cancels": ("import asyncio\nraise asyncio.CancelledError('now')", "entry point main: CancelledError: now"),
    "name_is_a_number": (source(name="3"), ""),
    "api_is_none": (source(api="None"), ""),
    "renamed_is_none": (source(more=", renamed=None"), ""),
    "target_is_none": (source(target="None"), ""),
    "cut_table": (
        TABLES.format(table="pkg://rough_tables/cut.json"),
        "not a tuning table: it is not JSON, or was cut off",
    ),
    "no_table": (TABLES.format(table="pkg://rough_tables/none.json"), "cannot be read"),
    "no_package": (TABLES.format(table="pkg://rough_elsewhere/some.json"), "cannot be read (ModuleNotFoundError"),
    "no_reference": (TABLES.format(table="rough_tables/cut.json"), "is not of the form pkg://package/folder/file.json"),
}
"""Source of a package by name, and the beginning of the reason why it cannot be used."""


def install(site: Path, name: str, text: str) -> Path:
    """Install a package of one module, whose component has the same name."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text(re.sub(r"\brough\b", name, text))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dovetail]\nmain = {name}\n")
    return site


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """Problems that app=plugins lists, with all packages installed at once."""
    folder = tmp_path_factory.mktemp("rough")
    for name, (text, _) in ROUGH.items():
        install(folder / "site", name, text)
    (folder / "site" / "rough_tables").mkdir()
    (folder / "site" / "rough_tables" / "cut.json").write_text('{"schema": "dovetail.tun')
    ((code, out),) = run_all(folder, listing(), path=(folder / "site",))
    assert code == 0
    return json.loads(out)["problems"]


@pytest.mark.parametrize("name", ROUGH)
def test_it_is_listed(problems, name):
    (problem,) = [p for p in problems if p["package"] == f"{name} 1.0"]
    assert ROUGH[name][1] in problem["reason"], problem


def test_nothing_else_is_listed(problems):
    assert len(problems) == len(ROUGH)


def test_capabilities_that_raise_are_listed_with_the_component(dovetail, tmp_path):
    site = install(tmp_path / "site", "rough", source(more=', capabilities="rough:capabilities"'))
    ((_, out),) = dovetail(listing(), path=(site,))
    (component,) = [c for c in json.loads(out)["components"] if c["name"] == "rough"]
    assert "no idea" in component["broken"]


@pytest.mark.nightly
def test_a_second_fcfs_leaves_the_default_as_it_is(dovetail, bare, tmp_path):
    site = install(tmp_path / "site", "rough", source(name='"fcfs"'))
    assert dovetail(composing(), path=(site,)) == [(0, bare[1])]
