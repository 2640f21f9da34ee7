"""Packages installed by pip into separate folders, and Dovetail's command line run with these folders on the path.

One process runs the command lines of a test, since the start of a process takes a second or more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party_plugin"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def pip_install(package: Path, target: Path) -> Path:
    """Install like `pip install <package>`, but without an index and without changing this environment."""
    how = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *how, "--target", str(target), str(package)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="session")
def lighthouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the installed example package."""
    return pip_install(EXAMPLE, tmp_path_factory.mktemp("site") / "lighthouse")


@pytest.fixture(scope="session")
def wreck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the installed broken package."""
    return pip_install(Path(__file__).parent / "broken_package", tmp_path_factory.mktemp("site") / "wreck")


def environment(path: tuple[Path, ...]) -> dict[str, str]:
    found = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """python(*argv, path=(folder,), **environment): run Python in an empty folder, with these folders on the path."""

    def run(*argv: str, path: tuple[Path, ...] = (), **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *argv],
            cwd=tmp_path,
            env=environment(path) | env,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    return run


@dataclass(frozen=True)
class Words:
    """Words of one command line of Dovetail."""

    words: tuple[str, ...]
    env: dict[str, str]
    cwd: Path | None = None

    @property
    def job(self) -> dict[str, Any]:
        return {"text": " ".join(self.words), "argv": self.words, "env": self.env}


def words(*these: str, cwd: Path | None = None, **env: str) -> Words:
    return Words(these, env, cwd)


def listing(**env: str) -> Words:
    return words("app=plugins", "plugins.format=json", **env)


def composing(*these: str, **env: str) -> Words:
    return words(*these, "--cfg", "job", **env)


def run_all(folder: Path, *lines: Words, path: tuple[Path, ...] = (), timeout: float = 220) -> list[tuple[int, str]]:
    """Run command lines in one process with these folders on the path; return the exit code and output of each."""
    files = folder / "jobs.json", folder / "results.json"
    files[0].write_text(json.dumps([{**line.job, "cwd": str(line.cwd or folder)} for line in lines]))
    argv = [sys.executable, str(ROOT / "tests" / "driver.py"), *map(str, files)]
    done = subprocess.run(
        argv, cwd=folder, env=environment(path), capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return [(result["code"], result["out"]) for result in json.loads(files[1].read_text())]


@pytest.fixture
def dovetail(tmp_path: Path) -> Callable[..., list[tuple[int, str]]]:
    """dovetail(words("app=plugins"), ..., path=(folder,)): `run_all` in an empty folder."""
    return lambda *lines, path=(): run_all(tmp_path, *lines, path=path)


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Output of app=plugins, and the default composition, without any package."""
    (_, listed), (_, default) = run_all(tmp_path_factory.mktemp("bare"), listing(), composing())
    return json.loads(listed), default


def refusal(result: tuple[int, str]) -> str:
    """Return the single message with which words are refused."""
    code, out = result
    (message,) = out.splitlines()
    assert code == 2 and message.startswith("dovetail: ")
    return message
