"""Runs the suites of components in one process of pytest, which may crash or hang without harm to this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dovetail.core.compose import ENGINE_NODES, Registered
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import Progress

LOG = "DOVETAIL_REPORT_LOG"
"""core.testing.report_log.FILE, which needs pytest to be imported."""
POLL_SECONDS = 5.0
"""Interval at which the test that runs is read from the log."""
OUTPUT_LINES = 20
"""Last lines of pytest's output that are shown if it ends before the tests do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test."""

    test: str
    outcome: str
    """passed, failed or skipped."""
    seconds: float
    reason: str
    """Message of a failure, reason of a skip; else empty."""


@dataclass(frozen=True, slots=True)
class Group:
    """The tests of one suite over one component, or over the package."""

    title: str
    file: str
    """Name of the test module."""
    source: str


_PACKAGE = """
from dovetail.core.testing.package import PackageContract

class TestPackage(PackageContract):
    package, component = {package!r}, {component!r}
"""
_CONTRACT = """
from dovetail.core.testing.suites import suite_of

class TestContract(suite_of({kind!r}, {name!r})):
    pass
"""
_ENGINE = """
from dovetail.core.testing.engine_runs import EngineRunContract

class TestEngine(EngineRunContract):
    kind, name = {kind!r}, {name!r}
"""


def groups(package: str, components: Sequence[Registered], *, whole: bool, engine: bool) -> list[Group]:
    """Return what is run: the package's own tests first, of which one component has only some. `whole`: the components
    are all of the package."""
    title, component = f"package {package}", ""
    if not whole:
        (only,) = (registered.component for registered in components)
        title, component = f"{only.kind}={only.name}: options and class", f"{only.kind}/{only.name}"
    found = [Group(title, "test_package.py", _PACKAGE.format(package=package, component=component))]
    for number, registered in enumerate(components):
        kind, name = registered.component.kind, registered.component.name
        found.append(
            Group(f"{kind}={name}: contract", f"test_{number}_contract.py", _CONTRACT.format(kind=kind, name=name))
        )
        # A router is in front of the engines.
        if engine and kind in ENGINE_NODES and kind != "router":
            found.append(
                Group(f"{kind}={name}: in an engine", f"test_{number}_engine.py", _ENGINE.format(kind=kind, name=name))
            )
    return found


def run(chosen: Sequence[Group], timeout: float, progress: Progress) -> list[dict[str, Any]]:
    """Run the groups and return each with its outcomes. `progress`: called with the test that runs."""
    if missing := [module for module in ("pytest", "hypothesis") if find_spec(module) is None]:
        raise ConfigError(f"app=check needs {' and '.join(missing)}: pip install 'dovetail[check]'")
    with tempfile.TemporaryDirectory(prefix="dovetail-check-") as place:
        folder = Path(place)
        for group in chosen:
            (folder / group.file).write_text(group.source, encoding="utf-8")
        ended = _pytest(folder, [group.file for group in chosen], timeout, progress)
        outcomes = _read(folder / "log.jsonl", ended)
    return [
        {"title": group.title, "tests": [asdict(one) for one in outcomes.get(group.file, [_not_run(ended)])]}
        for group in chosen
    ]


def _pytest(folder: Path, files: Sequence[str], timeout: float, progress: Progress) -> str:
    """Run pytest and return "" if it ran all tests, else how it ended and the end of its output."""
    how = ["-q", "--import-mode=importlib", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    how += ["-p", "dovetail.core.testing.report_log"]
    here = ["--rootdir", str(folder), "--confcutdir", str(folder), "--basetemp", str(folder / "tmp")]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pytest", *how, *here, *files],
        cwd=folder,
        env=os.environ | {LOG: str(folder / "log.jsonl"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    try:
        out = _output(process, timeout, folder / "log.jsonl", progress)
    except subprocess.TimeoutExpired:
        how_ended = f"was ended after check.timeout={timeout:g} s"
        out = ""
    else:
        if process.returncode in (0, 1):
            return ""
        code = process.returncode
        how_ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = "\n".join(out.splitlines()[-OUTPUT_LINES:])
    return f"the process {how_ended}" + (f"; its last output:\n{last}" if last else "")


def _output(process: subprocess.Popen[str], timeout: float, log: Path, progress: Progress) -> str:
    """Wait for the end of a process and return its output. Raises subprocess.TimeoutExpired."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return process.communicate(timeout=max(min(left, POLL_SECONDS), 0.0))[0]
        except subprocess.TimeoutExpired:
            if left <= POLL_SECONDS:
                raise
            progress(_newest(log), None)


def _newest(log: Path) -> str:
    """Return the test of the log's last whole line."""
    lines = log.read_text(encoding="utf-8").rpartition("\n")[0].splitlines() if log.exists() else []
    return json.loads(lines[-1])["test"].rpartition("::")[2] if lines else "tests"


def _read(log: Path, ended: str) -> dict[str, list[Outcome]]:
    """Return the outcomes by file. A test that started and has no outcome ended the process."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    found: dict[str, dict[str, Outcome]] = {}
    for line in map(json.loads, lines):
        file, _, test = line["test"].partition("::")
        of_file, name = found.setdefault(Path(file).name, {}), test.partition("::")[2] or test
        if name not in of_file or of_file[name].outcome != "failed":
            of_file[name] = Outcome(name, line["outcome"], line["seconds"], line["reason"])
    return {file: [_ended(one, ended) for one in outcomes.values()] for file, outcomes in found.items()}


def _ended(one: Outcome, ended: str) -> Outcome:
    return Outcome(one.test, "failed", 0.0, ended) if one.outcome == "started" else one


def _not_run(ended: str) -> Outcome:
    return Outcome("", "failed", 0.0, ended or "no test ran")
