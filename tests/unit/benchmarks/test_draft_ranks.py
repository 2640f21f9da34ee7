"""draft_ranks.py: what it counts of accepted paths, and a measurement of the bundled models."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dovetail.core.interfaces import AcceptedPath
from dovetail.plugins.spec_decode.shape import Shape, shape_of

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "draft_ranks.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draft_ranks", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["draft_ranks"] = module
    spec.loader.exec_module(module)
    return module


def test_accepted_siblings_are_counted_by_level_and_rank(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of padding and entries behind the accepted drafts do not count."""
    monkeypatch.setattr(script, "LEAST", 1)
    counts = script.RankCounts(Shape((-1, -1, 0, 1, 0), (0, 1, 0, 0, 1), (0.0,) * 5), slots=3)
    for warm_up in (True, False):
        if not warm_up:
            counts.clear()
        counts.count(
            AcceptedPath(
                slots_R=torch.tensor([0, 1, 2, 3, 1]),
                root_R=torch.zeros(5, dtype=torch.int64),
                index_RD=torch.tensor([[0, 1, 5], [0, 2, 4], [0, 9, 9], [0, 1, 5], [0, 1, 1]]),
                accepted_R=torch.tensor([2, 1, 0, 2, 1]),
            )
        )
    # Level 2: two rows are behind draft 0, which has two children, and one is behind draft 1, which has one.
    assert counts.ranks() == ([[2 / 4, 1 / 4], [0 / 3, 1 / 2]], 4)


@pytest.mark.nightly
def test_a_measurement_writes_the_file_that_chooses_a_tree(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.py", tmp_path / "ranks.json"
    text.write_text("def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n" * 20)
    size = ["--prompts", "6", "--prompt-tokens", "32", "--tokens", "40"]
    small = ["engine.device=cpu", "engine.max_len=96", "spec_decode.tree=24", "spec_decode=draft_model"]
    assert script.main(["--text", str(text), "--out", str(out), *size, "--", *small]) == 0
    assert "tokens per step expected" in capsys.readouterr().out
    shape = shape_of(str(out), 8, 4)
    assert shape.parents[0] == -1 and 0.3 < shape.expected[0] <= 1
    assert script.main(["--text", str(text), "--out", str(out), "--", "spec_decode=ngram", "engine.device=cpu"]) == 2
    assert script.main(["--text", str(tmp_path / "none"), "--out", str(out), *size, "--", *small]) == 2
