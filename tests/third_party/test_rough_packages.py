"""Packages that break in unusual ways. `app=plugins` must list each problem, and the defaults must still compose."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def source(name='"rough"', target='"rough:Options"', api='"scheduler/0.1"', more=""):
    return COMPONENT.format(name=name, target=target, api=api, more=more)


@pytest.fixture
def rough(tmp_path: Path):
    def install(text: str) -> Path:
        site = tmp_path / "site"
        (site / "rough-1.0.dist-info").mkdir(parents=True)
        (site / "rough.py").write_text(text)
        (site / "rough-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: rough\nVersion: 1.0\n")
        (site / "rough-1.0.dist-info" / "entry_points.txt").write_text("[dovetail]\nmain = rough\n")
        return site

    return install


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("def (", id="syntax_error"),
        pytest.param(
            "from dovetail import hookimpl\n@hookimpl\ndef dovetail_components():\n    return 3", id="no_list"
        ),
        pytest.param("import sys\nsys.exit(3)", id="exits"),
        pytest.param(source(name="3"), id="name_is_a_number"),
        pytest.param(source(api="None"), id="api_is_none"),
        pytest.param(source(more=", renamed=None"), id="renamed_is_none"),
        pytest.param(source(target="None"), id="target_is_none"),
    ],
)
def test_it_is_listed(listed, rough, text):
    assert [p["package"] for p in listed(rough(text))["problems"]] == ["rough 1.0"]


TABLES = """
from dovetail import hookimpl

@hookimpl
def dovetail_tuning_tables():
    return [{table!r}]
"""


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("pkg://rough_tables/cut.json", "not a tuning table: it is not JSON, or was cut off"),
        ("pkg://rough_tables/none.json", "cannot be read"),
        ("pkg://rough_elsewhere/some.json", "cannot be read (ModuleNotFoundError"),
        ("rough_tables/cut.json", "is not of the form pkg://package/folder/file.json"),
    ],
)
def test_a_tuning_table_that_cannot_be_used_is_listed(listed, rough, table, reason):
    site = rough(TABLES.format(table=table))
    (site / "rough_tables").mkdir()
    (site / "rough_tables" / "cut.json").write_text('{"schema": "dovetail.tun')
    (problem,) = listed(site)["problems"]
    assert problem["package"] == "rough 1.0" and reason in problem["reason"], problem


def test_capabilities_that_raise_are_listed_with_the_component(listed, rough):
    found = listed(rough(source(more=', capabilities="rough:capabilities"')))
    (component,) = [c for c in found["components"] if c["name"] == "rough"]
    assert "no idea" in component["broken"]


def test_a_second_fcfs_leaves_the_default_as_it_is(composed, rough):
    assert composed(path=(rough(source(name='"fcfs"')),)) == composed()
