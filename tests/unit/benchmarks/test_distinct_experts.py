"""distinct_experts.py: the experts that a step reads, counted in real steps."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from dovetail.core.errors import ConfigError
from dovetail.core.layers.experts import Experts

pytestmark = pytest.mark.nightly

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("distinct_experts")


def test_every_token_of_a_step_is_counted_once(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """One row selects as many experts as are active, and two rows at most twice as many."""
    build = Experts.__init__
    words = ["model=small_moe", "model.routing=uniform", "engine.device=cpu", "engine.max_len=64"]
    script.main(["1", "2", "--context", "4", "--steps", "2", "--", *words])
    one, two = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert one == ["1", "4.0", "4", "4", "4.0", "1.0"]
    assert two[0] == "2" and 4 <= float(two[1]) <= 8 and two[4] == "7.0"
    assert Experts.__init__ is build


def test_a_dense_model_is_refused(script: ModuleType) -> None:
    with pytest.raises(ConfigError, match="model=llama has no experts"):
        script.main(["1", "--", "model=tiny", "engine.device=cpu"])
