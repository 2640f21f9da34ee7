"""Commands and Python of the README and the pages run; their plugins install and pass the suites that they name."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .commands import Command, blocks, commands, scripts, with_blocks

# Everything runs in two processes before the first test; this takes less than a minute on two free cores.
pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly]

COMMANDS = commands()
TO_RUN = [c for c in COMMANDS if not c.why_not_run and not c.is_pytest]
SCRIPTS = scripts()

FEW_EXAMPLES = """
from hypothesis import settings
from dovetail.core.testing.kv_cache import KVAllocatorContract
from dovetail.core.testing.scheduler import SchedulerContract
from dovetail.core.testing.spec_decode import DrafterContract

KVAllocatorContract.machine_settings = settings(KVAllocatorContract.machine_settings, max_examples=15)
SchedulerContract.loads = 1
DrafterContract.slots = 3
"""
"""conftest.py of the pages' suites: their schedulers, allocators and drafters differ in a few lines from built-in ones,
whose tests have more examples."""


@dataclass
class Ran:
    results: dict[str, dict[str, Any]]
    """Page and text -> exit code and output."""
    suites: str
    """Output of pytest over every test file of the pages."""
    folder: Path

    def of(self, page: str, text: str) -> dict[str, Any]:
        return self.results[f"{page}: {text}"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Run everything once for all workers of pytest-xdist; the others wait for the first."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    kept = shared / "pages.json"
    with (shared / "pages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(run_pages(tmp_path_factory)))
    results, suites, folder = json.loads(kept.read_text())
    return Ran(results, suites, Path(folder))


def run_pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], str, str]:
    work, site = tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("site")
    made = make_packages(work)
    generated = set(work.rglob("test_*.py"))  # app=check runs the same suites
    write_files(work)
    install(work, site)
    jobs = [{"page": s.page, "text": s.text, "code": s.text} for s in SCRIPTS]
    jobs += [{"page": c.page, "text": c.line, **how(c)} for c in TO_RUN if not c.is_shell and c not in made]
    for job in jobs:
        job["cwd"] = str(folder_of(work, str(job["page"])))
    (work / "jobs.json").write_text(json.dumps(jobs))
    driver = [str(Path(__file__).parents[1] / "driver.py"), str(work / "jobs.json"), str(work / "results.json")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *extra_path()]), "OMP_NUM_THREADS": "1"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    ours = start([sys.executable, *driver], work, env)
    (work / "conftest.py").write_text(FEW_EXAMPLES)
    tests = sorted(str(file) for file in work.rglob("test_*.py") if file not in generated)
    # The same as tests/conftest.py does for tests with processes.
    once_more = ["--reruns", "1", "--only-rerun", "RankFailed"]
    quiet = ["-q", "-p", "no:cacheprovider", "--confcutdir", str(work)]
    suites = start([sys.executable, "-m", "pytest", *quiet, *once_more, *tests], work, env)
    results = {f"{c.page}: {c.line}": result for c, result in made.items()}
    # Before the other commands, which may read what these write.
    said = ours.communicate(timeout=800)[0]
    assert ours.returncode == 0, said
    for command in (c for c in TO_RUN if c.is_shell):
        shell = start(["bash", "-c", command.shell], folder_of(work, command.page), env)
        out = shell.communicate(timeout=800)[0]
        results[f"{command.page}: {command.line}"] = {"code": shell.returncode, "out": out}
    suites_output = suites.communicate(timeout=800)[0]
    for job, result in zip(jobs, json.loads((work / "results.json").read_text()), strict=True):
        results[f"{job['page']}: {job['text']}"] = result
    return results, suites_output, str(work)


def how(command: Command) -> dict[str, Any]:
    return {"argv": command.argv, "env": command.environment}


def start(argv: list[str], cwd: Path, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def extra_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def folder_of(work: Path, page: str) -> Path:
    folder = work / page.removesuffix(".md").replace("/", "_")
    folder.mkdir(exist_ok=True)
    return folder


def make_packages(work: Path) -> dict[Command, dict[str, Any]]:
    """Run the commands that make a package, before the files of the pages replace some of its files."""
    made = {}
    for command in (c for c in TO_RUN if "app=new" in c.line):
        argv = [sys.executable, str(Path(__file__).parents[2] / "run.py"), *command.argv]
        process = start(argv, folder_of(work, command.page), dict(os.environ))
        out, _ = process.communicate(timeout=110)
        made[command] = {"code": process.returncode, "out": out}
    return made


def write_files(work: Path) -> None:
    for block in blocks():
        if block.file:
            file = folder_of(work, block.page) / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            text = block.text
            # The name of the file is for the reader; Hydra requires its header in the first line.
            file.write_text(text.partition("\n")[2] if file.suffix == ".yaml" else text, encoding="utf-8")


def install(work: Path, site: Path) -> None:
    """Install packages with pip, and single modules as a file with the metadata of their entry point."""
    projects = [str(file.parent) for file in work.rglob("pyproject.toml")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), *projects], check=True, timeout=110)
    for module in (file for file in work.glob("*/*.py") if not file.name.startswith("test_")):
        if str(module.parent) in projects and "hookimpl" in module.read_text() and (site / module.name).exists():
            continue
        (site / module.name).write_text(module.read_text(), encoding="utf-8")
        if "@hookimpl" in module.read_text():
            info = site / f"{module.stem}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.stem}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[dovetail]\n{module.stem} = {module.stem}\n")


@pytest.mark.parametrize("command", TO_RUN, ids=lambda c: f"{c.page}: {c.line}")
def test_command(ran: Ran, command: Command) -> None:
    result = ran.of(command.page, command.line)
    assert result["code"] == command.exit_code, result["out"]
    if command.exit_code == 2:
        assert result["out"].startswith("dovetail: ")
    elif not command.is_shell and command.generates:
        assert "tokens/s" in result["out"] and "TTFT" in result["out"]
    else:
        assert result["out"]


@pytest.mark.parametrize("number", range(len(SCRIPTS)), ids=[f"{s.page} {i}" for i, s in enumerate(SCRIPTS)])
def test_python(ran: Ran, number: int) -> None:
    result = ran.of(SCRIPTS[number].page, SCRIPTS[number].text)
    assert result["code"] == 0, f"{SCRIPTS[number].text}\n{result['out']}"


def test_suites_of_the_examples_pass(ran: Ran) -> None:
    summary = ran.suites.strip().splitlines()[-1]
    assert re.search(r"\d{3} passed", summary) and "failed" not in summary and "error" not in summary, ran.suites


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.is_pytest], ids=lambda c: f"{c.page}: {c.line}")
def test_what_pytest_is_given_stands_on_the_page(ran: Ran, command: Command) -> None:
    given = folder_of(ran.folder, command.page) / command.line.split()[1]
    assert given.exists() and list([given] if given.is_file() else given.glob("test_*.py"))


SHOWN = [(block.page, line) for block in blocks("text") for line in block.text.splitlines()]


@pytest.mark.parametrize(("page", "line"), SHOWN, ids=[f"{page}: {line[:40]}" for page, line in SHOWN])
def test_output_shown_is_what_comes(ran: Ran, page: str, line: str) -> None:
    said = " ".join(" ".join(r["out"].split()) for key, r in ran.results.items() if key.startswith(f"{page}: "))
    assert " ".join(line.removesuffix("...").split()) in said


def test_every_shell_block_is_collected() -> None:
    languages = {block.language for block in blocks()}
    assert languages <= {"bash", "python", "toml", "yaml", "text"}, "blocks of other languages are not run"
    for page, text in with_blocks().items():
        assert text.count("```") % 2 == 0, f"{page}: a fence is open"
    for block in blocks():
        assert block.file or block.language not in ("toml", "yaml"), f"{block.page}: name the file in the first line"


def test_the_plugin_of_the_readme_is_twenty_lines() -> None:
    (code,) = (block.text for block in blocks() if (block.page, block.file) == ("README.md", "newest.py"))
    assert sum(1 for line in code.splitlines() if line.strip()) <= 20
