"""app=check over components with faults: each is a line of the report card, not a crash of the app."""

from __future__ import annotations

import json

import pytest

from dovetail.plugins.app.check.card import print_card

from .conftest import refusal, words
from .test_new import stub

pytestmark = pytest.mark.nightly

MODULE = '''
import os, signal
from dovetail import Component, Config, hookimpl
from dovetail.core.interfaces import Router


class Options(Config):
    """A router."""


class Needs(Config):
    """A router with an option."""

    port: int
    """Port."""


class Random(Router):
    def route(self, arrival, loads):
        return loads[os.urandom(1)[0] % len(loads)].replica


class Dies(Router):
    def route(self, arrival, loads):
        os.kill(os.getpid(), signal.SIGKILL)


@hookimpl
def dovetail_components():
    kind = dict(kind="router", api="router/0.1")
    return [
        Component(name="a_random", config=Options, target="faulty:Random", **kind),
        Component(name="b_required", config=Needs, target="faulty:Random", **kind),
        Component(name="c_dies", config=Options, target="faulty:Dies", **kind),
    ]
'''


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    stub(folder, "faulty", ["faulty"])
    (folder / "faulty.py").write_text(MODULE)
    stub(folder, "broken", ["broken"])
    (folder / "broken.py").write_text("import nowhere_at_all")
    stub(folder, "empty", ["empty"])
    (folder / "empty.py").write_text(
        "from dovetail import hookimpl\n@hookimpl\ndef dovetail_components():\n    return []"
    )
    return folder


def test_faults_are_in_the_report_card(dovetail, site, tmp_path):
    check = words("app=check", "check.package=faulty", "check.rounds=0", "check.out=card.json", "check.html=card.html")
    refused = {
        "check.package=broken": "it provides nothing that works: entry point broken: ModuleNotFoundError",
        "check.package=empty": "it registers nothing: its hooks return no component",
        "check.package=faulti": "Did you mean `faulty`?",
        "check.package=dovetail": "is built in",
        "check.component=scheduler/fcfs": "is built in",
        "check.component=fcfs": "not of the form <kind>/<name>",
        "check.component=router/d": "no such router",
        "check.package=FAULTY check.beside=[fcf]": "check.beside: no checked kind has `fcf`",
        "check.package=faulty check.out=site": "cannot be written",
        "": "give either package or component",
    }
    hangs = words("app=check", "check.component=router/c_dies", "check.rounds=0", "check.timeout=0.1")
    (code, out), (late, slow), *results = dovetail(
        check, hangs, *(words("app=check", *line.split()) for line in refused), path=(site,)
    )
    for result, reason in zip(results, refused.values(), strict=True):
        assert reason in refusal(result)
    assert code == 1 and out.rstrip().endswith("failed"), out
    card = json.loads((tmp_path / "card.json").read_text())
    package, random, required, dies = card["groups"]
    assert {test["outcome"] for test in package["tests"]} == {"passed"}
    failures = {test["test"]: test["reason"] for test in random["tests"] if test["outcome"] == "failed"}
    assert "test_equal_calls_give_equal_choices" in failures and len(failures) < len(random["tests"])
    assert ["port is required" in test["reason"] for test in required["tests"]] == [True]
    (died,) = (test for test in dies["tests"] if test["outcome"] == "failed")
    assert "the process was killed by SIGKILL" in died["reason"] and "router=c_dies: contract: it chooses an" in out
    assert late == 1 and "the process was ended after check.timeout=0.1 s" in slow
    assert "killed by SIGKILL" in (tmp_path / "card.html").read_text()


def test_a_reason_of_many_tests_is_printed_once(capsys):
    faults = [{"test": f"test_{n}", "outcome": "failed", "seconds": 0.0, "reason": "no such class"} for n in range(3)]
    other = {"test": "test_it_counts", "outcome": "failed", "seconds": 0.0, "reason": "it does not"}
    group = {"title": "router=mine: contract", "tests": [*faults, other]}
    print_card({"checked": "mine", "groups": [group], "benchmarks": [], "confidence": 0.95})
    out = capsys.readouterr().out
    assert out.count("no such class") == 1 and "router=mine: contract: 0, and 2 others for the same reason" in out
    assert "router=mine: contract: it counts\n  it does not" in out
