"""app=new and app=check: a package of every kind is generated, installed and checked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.core.compose import KINDS

from .conftest import pip_install, refusal, run_all, words

ALL = os.environ.get("DOVETAIL_KINDS") == "all"
"""The nightly script also runs every kind in engines. CI generates and loads every kind; the suites are nightly."""
LONGEST = 40
"""Lines of a generated file."""


def stub(site: Path, name: str, modules: list[str]) -> None:
    """Make modules an installed package, as pip would."""
    info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    lines = "".join(f"{module} = {module}\n" for module in modules)
    (info / "entry_points.txt").write_text(f"[dovetail]\n{lines}")


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """A folder of each kind's generated package, by kind."""
    work = tmp_path_factory.mktemp("generated")
    results = run_all(work, *(words("app=new", f"new.component={kind}/acme_{kind}") for kind in KINDS))
    assert [code for code, _ in results] == [0] * len(KINDS), results
    return {kind: work / f"dovetail-acme-{kind.replace('_', '-')}" for kind in KINDS}


@pytest.fixture(scope="module")
def site(generated, tmp_path_factory):
    """All of them, installed as one package, so that one process checks it."""
    site = tmp_path_factory.mktemp("site")
    for folder in generated.values():
        (source,) = (folder / "src").iterdir()
        shutil.copytree(source, site / source.name)
    stub(site, "acme", sorted(module.name for module in site.iterdir()))
    return site


@pytest.fixture(scope="module")
def card(site, tmp_path_factory):
    """The report card of all kinds."""
    work = tmp_path_factory.mktemp("card")
    engine = f"check.engine={str(ALL).lower()}"
    check = words(
        "app=check", "check.package=acme", engine, "check.rounds=0", "check.out=card.json", "check.html=a.html"
    )
    ((code, out),) = run_all(work, check, path=(site,), timeout=1000 if ALL else 220)
    assert code == 0, out
    assert "report card of acme 0.1.0" in out and out.rstrip().endswith("passed")
    assert "<h1>Report card of acme 0.1.0</h1>" in (work / "a.html").read_text()
    return json.loads((work / "card.json").read_text())


def test_files_are_short_and_sound(generated):
    for folder in generated.values():
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert {"pyproject.toml", "README.md", "__init__.py", "config.py", "test_contract.py"} <= {
            f.name for f in files
        }
        for path in files:
            text = path.read_text()
            assert len(text.splitlines()) <= LONGEST, path
            assert "mine" not in text.lower().replace("determine", "") and "KIND" not in text, path
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select=E,F,W,B,UP", "--quiet"]
    done = subprocess.run([*ruff, *map(str, generated.values())], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_passes_as_generated(card, kind):
    (group,) = (group for group in card["groups"] if group["title"] == f"{kind}=acme_{kind}: contract")
    outcomes = [test["outcome"] for test in group["tests"]]
    assert "failed" not in outcomes and outcomes.count("passed") > 4


@pytest.mark.nightly
def test_one_installs_with_pip_and_runs(generated, tmp_path):
    site, small = pip_install(generated["scheduler"], tmp_path / "site"), ("engine.device=cpu", "engine.kv_pages=128")
    run = words("scheduler=acme_scheduler_variant", "generate.max_tokens=2", *small)
    check = words("app=check", "check.package=dovetail-acme-scheduler", "check.rounds=2", "check.out=a.json", *small)
    (ran, out), *checked = run_all(tmp_path, run, *([check] if ALL else []), path=(site,), timeout=600)
    assert ran == 0, out
    for code, out in checked:
        assert code == 0, out
        card = json.loads((tmp_path / "a.json").read_text())
        ((row, again),) = (benchmark["rows"] for benchmark in card["benchmarks"])
        assert again["variant"] == "scheduler=fcfs, again"  # the noise
        assert (row["variant"], row["greedy_tokens_equal"]) == ("scheduler=acme_scheduler", 1.0)
        assert row["changes"]["output_tokens_per_s"]["low"] > 0


def test_every_kind_loads(python, site):
    code = """if True:
        from dovetail.core.compose import KINDS, installed
        from dovetail.core.testing.suites import suite_of
        assert not installed().problems, installed().problems
        for kind in KINDS:
            target = installed().get(kind, f"acme_{kind}").target()
            print(target.__module__, suite_of(kind, f"acme_{kind}").__name__)
    """
    lines = python("-c", code, path=(site,)).stdout.splitlines()
    assert [line.split(".")[0] for line in lines] == [f"dovetail_acme_{kind}" for kind in KINDS]


@pytest.mark.nightly
def test_every_kind_has_a_benchmark_that_composes(python, site):
    """The component runs beside the one that is chosen otherwise, and beside one more."""
    code = """if True:
        from dovetail.core.compose import ENGINE_NODES, KINDS, compose, installed
        from dovetail.plugins.app.ablate.variants import make
        from dovetail.plugins.app.check.beside import ablation, measure
        here = compose(["check.package=acme", "engine.device=cpu"], app="check")
        for kind in KINDS:
            mine = installed().get(kind, f"acme_{kind}")
            if kind in ENGINE_NODES and kind not in ("model", "router", "collective", "experts"):
                chosen = ablation(mine, here, ["priority"])
                print(kind, *(variant.name for variant in make(chosen.app_part.config, chosen)), sep="; ")
            else:
                print(kind, measure(mine, here, 1, [])["reason"])
    """
    lines = dict(line.split(maxsplit=1) for line in python("-c", code, path=(site,)).stdout.splitlines())
    assert lines["scheduler;"] == "scheduler=fcfs; scheduler=priority; scheduler=acme_scheduler"
    assert lines["logits;"] == "without acme_logits; acme_logits"
    assert lines["router"] == "routers need replicas" and lines["workload"] == "an engine has no such component"
    assert {line.rstrip(";") for line in lines} == set(KINDS)


REFUSED = {
    "new.component=shceduler/mine": "there is no kind `shceduler`. Did you mean `scheduler`?",
    "new.component=scheduler": "not of the form <kind>/<name>",
    "new.component=scheduler/Mine": "lower case letters, digits and underscores",
    "new.component=scheduler/fcfs": "the name is taken, scheduler=fcfs is in dovetail",
    "new.component=kv_cache/none new.package=pytest": "is installed; choose another name",
    "new.component=scheduler/mine new.package=json": "the module json exists already",
    "new.component=scheduler/mine new.package=class": "its module would be called class, a keyword",
    "new.component=scheduler/none": "its class would be called None, which is taken",
    "new.component=grammar/choices": "its class would be called Choices, which is taken",
    "new.component=app/engine": "the name of a node",
    "new.component=scheduler/mine new.package=a--b": "with single hyphens",
    "new.component=scheduler/mine new.folder=full": "is not an empty folder: set new.folder",
    "new.component=scheduler/mine new.folder=full/file": "is not an empty folder",
}


def test_what_new_refuses(dovetail, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    results = dovetail(*(words("app=new", *line.split()) for line in REFUSED))
    for result, reason in zip(results, REFUSED.values(), strict=True):
        assert reason in refusal(result)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["full"], "nothing was written"
    assert (tmp_path / "full" / "file").read_text() == "mine"
