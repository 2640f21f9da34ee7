"""Packages installed by pip into separate folders, and Dovetail's command line run with these folders on the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
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


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """python(*argv, path=(folder,), **environment): run Python in an empty folder, with these folders on the path."""

    def run(
        *argv: str, path: tuple[Path, ...] = (), cwd: Path = tmp_path, **env: str
    ) -> subprocess.CompletedProcess[str]:
        found = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
        return subprocess.run(
            [sys.executable, *argv],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1"} | env,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    return run


@pytest.fixture
def dovetail(python: Run) -> Run:
    """dovetail(*words, path=(folder,)): run `python run.py <words>`."""
    return lambda *words, **more: python(str(ROOT / "run.py"), *words, **more)


@pytest.fixture
def listed(dovetail: Run) -> Callable[..., dict[str, Any]]:
    """Return the output of app=plugins."""

    def run(*path: Path, **env: str) -> dict[str, Any]:
        done = dovetail("app=plugins", "plugins.format=json", path=path, **env)
        assert (done.returncode, done.stderr) == (0, "")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


@pytest.fixture
def composed(dovetail: Run) -> Callable[..., str]:
    """Return the YAML of a composition."""

    def run(*words: str, path: tuple[Path, ...] = (), **env: str) -> str:
        done = dovetail(*words, "--cfg", "job", path=path, **env)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


@pytest.fixture
def refused(dovetail: Run) -> Callable[..., str]:
    """Return the single message with which the words are refused."""

    def run(*words: str, path: tuple[Path, ...] = (), **env: str) -> str:
        done = dovetail(*words, path=path, **env)
        assert (done.returncode, done.stdout) == (2, "")
        (message,) = done.stderr.splitlines()
        assert message.startswith("dovetail: ")
        return message

    return run
