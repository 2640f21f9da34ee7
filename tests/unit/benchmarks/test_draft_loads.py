"""draft_loads.py: what a load is, and two small ones in virtual time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "draft_loads.py"


@pytest.fixture(scope="module")
def draft_loads():
    spec = importlib.util.spec_from_file_location("draft_loads", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["draft_loads"] = module
    spec.loader.exec_module(module)
    return module


def test_loads(draft_loads):
    burst = draft_loads.read_load("3x40/20")
    assert [(one.arrival, one.prompt, one.output) for one in burst] == [(0.0, 40, 20)] * 3
    drawn = draft_loads.read_load("~2.5/s:400x40/20")
    assert drawn == draft_loads.read_load("~2.5/s:400x40/20")
    assert 120 < drawn[-1].arrival < 200 and {one.prompt for one in drawn} == set(range(20, 61))


@pytest.mark.parametrize("load", ["", "3x40", "0x40/20", "3x40/0", "x/s:3x40/20", "3x40/20 "])
def test_no_load(draft_loads, load, capsys):
    with pytest.raises(SystemExit, match="2"):
        draft_loads.main(["--loads", load, "--", "+preset=h200_fp8_tp1"])
    assert "is no load: REQUESTSxPROMPT/OUTPUT" in capsys.readouterr().err


def test_no_run(draft_loads, capsys):
    with pytest.raises(SystemExit, match="2"):
        draft_loads.main(["--runs", "0", "--", "+preset=h200_fp8_tp1"])
    assert "--runs is 0; at least one is needed" in capsys.readouterr().err


def test_runs_of_a_load_have_prompts_of_their_own(draft_loads, monkeypatch):
    prompts, add = [], draft_loads.Engine.add
    monkeypatch.setattr(
        draft_loads.Engine, "add", lambda self, prompt, *how: (prompts.append(prompt), add(self, prompt, *how))
    )
    overrides = ["+preset=h200_fp8_tp1", "engine.max_len=256"]
    assert draft_loads.tokens_per_second(overrides, "2x64/4", 3) > 0
    of_load = [prompt for prompt in prompts if len(prompt) == 64]
    assert len({tuple(prompt[:2]) for prompt in of_load}) == len(of_load) == 2 * 3


def test_drafts_that_are_accepted_gain(draft_loads, capsys):
    overrides = ["+preset=h200_fp8_tp1", "spec_decode=ngram", "engine.max_len=256"]
    assert draft_loads.main(["--loads", "2x64/32", "--acceptance", "0", "0.9", "--", *overrides]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "2x64/32" in line)
    useless, accepted = map(float, row.replace("│", " ").split()[-2:])
    assert 0.95 < useless <= 1.0 and accepted > 1.3
    for words, message in (([*overrides, "spec_decode=magic"], "magic"), ([*overrides, "cost=none"], "set cost=")):
        assert draft_loads.main(["--loads", "2x64/32", "--", *words]) == 2
        assert message in capsys.readouterr().err
