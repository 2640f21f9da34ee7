"""A start that cannot succeed says so at once: before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
from dovetail.core.compose.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported before the mistake was found"
raise SystemExit(code)
"""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=llama", "model.path=/no/such/folder"], ["model.path=", "model.load=dummy"]),
        (["model=llama"], ["model.path=", "model.load=dummy"]),
        (["generate.prompts=/no/such/file"], ["/no/such/file"]),
        (["generate.temperature=-1"], ["temperature"]),
        (["generate.max_token=3"], ["max_tokens"]),
    ],
    ids=str,
)
def test_mistakes(overrides: list[str], words: list[str], tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CODE, *overrides]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
