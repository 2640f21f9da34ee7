"""The README's commands and Python run; its plugin installs and passes the contract suite."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def block(language: str, containing: str) -> str:
    found = [text for kind, text in BLOCKS if kind == language and containing in text]
    assert len(found) == 1, f"{len(found)} {language} blocks with {containing!r}"
    return found[0]


def run(argv: list[str], cwd: Path, *path: Path) -> str:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(p) for p in path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def commands() -> list[str]:
    lines = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
    found = [line.split(" && ")[-1] for line in lines if "python run.py" in line]
    assert len(found) >= 7
    return found


def given(command: str) -> list[str]:
    """Return the arguments after `python run.py`, as the tests pass them."""
    argv = shlex.split(command, comments=True)[2:]
    if "model.path=/models/Llama-3-8B" in argv:
        argv = [a.replace("/models/Llama-3-8B", "pkg://dovetail.plugins.model.bundled/tiny") for a in argv]
    # Comparisons take minutes (tests/unit/app and docs/ablations.md run smaller ones); tuning needs a GPU.
    if {"app=ablate", "app=quality", "app=tune"} & set(argv):
        argv += ["--cfg", "job"]
    return argv


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results by command, from one process. CI also begins with `python run.py` in a separate process."""
    jobs, results = (tmp_path_factory.mktemp("readme") / name for name in ("jobs.json", "results.json"))
    work = [{"text": command, "argv": given(command), "env": {}, "cwd": str(ROOT)} for command in commands()]
    jobs.write_text(json.dumps(work))
    run([str(Path(__file__).with_name("driver.py")), str(jobs), str(results)], ROOT)
    return dict(zip(commands(), json.loads(results.read_text()), strict=True))


@pytest.mark.parametrize("command", commands())
def test_commands(results: dict[str, dict[str, Any]], command: str) -> None:
    argv, out = given(command), results[command]["out"]
    assert results[command]["code"] == 0, out
    if "app=plan" in argv:
        assert "fits" in out
    elif "app=plugins" in argv:
        assert "prefix_hash" in out
    elif "--cfg" in argv:
        assert "token_budget" in out
    else:
        assert "tokens/s" in out and "TTFT" in out


def test_python(tmp_path: Path) -> None:
    script = tmp_path / "use.py"
    script.write_text(block("python", "llm.stream"), encoding="utf-8")
    assert len(run([str(script)], tmp_path)) > 20


def test_the_plugin(tmp_path: Path) -> None:
    """The plugin is installed like pip would: a module and the metadata of its entry point on the path."""
    site = tmp_path / "site"
    (site / "newest-1.0.dist-info").mkdir(parents=True)
    (site / "newest.py").write_text(block("python", "# newest.py"), encoding="utf-8")
    (site / "newest-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: newest\nVersion: 1.0\n", encoding="utf-8"
    )
    project = block("toml", "entry-points")
    name, module = re.findall(r'^(\w+) = "(\w+)"$', project.partition("entry-points")[2], re.M)[0]
    (site / "newest-1.0.dist-info" / "entry_points.txt").write_text(
        f"[dovetail]\n{name} = {module}\n", encoding="utf-8"
    )

    assert "tokens/s" in run([str(ROOT / "run.py"), "scheduler=newest", "generate.max_tokens=8"], tmp_path, site)
    assert "newest" in run([str(ROOT / "run.py"), "app=plugins", "plugins.kind=scheduler"], tmp_path, site)

    suite = tmp_path / "test_newest.py"
    suite.write_text(block("python", "SchedulerContract"), encoding="utf-8")
    out = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)], tmp_path, site)
    assert re.search(r"\d\d passed", out), out


def test_the_plugin_is_twenty_lines() -> None:
    code = block("python", "# newest.py")
    assert sum(1 for line in code.splitlines() if line.strip()) <= 20
