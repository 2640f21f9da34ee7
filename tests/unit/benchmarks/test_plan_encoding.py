"""plan_encoding.py: plans reach readers in processes of their own."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "plan_encoding.py"


@pytest.fixture
def plan_encoding() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_encoding", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_plan_is_received_after_it_was_sent(plan_encoding: ModuleType) -> None:
    data = plan_encoding.encode_plan(plan_encoding.decode_step(8))
    sent, taken = plan_encoding.through_ring(data, 2, 20, 1e-4)
    assert len(sent) == len(taken) == 20
    assert all(0 < time < 10 for time in (*sent, *taken))


def test_figures_for_each_number_of_rows_and_readers(
    plan_encoding: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_encoding, "best_us", lambda call: 1.0)
    plan_encoding.main(["1", "4", "--readers", "1", "--plans", "20", "--gap", "0.1"])
    told = capsys.readouterr().out
    assert re.findall(r"^(\d+) decode rows, (\d+) bytes", told, re.M) == [("1", "152"), ("4", "320")]
    figure = r"\d+\.\d \(\d+\.\d\)"
    line = rf"^  ring, readers: 1, 0.1 ms between plans: send {figure}, received {figure}$"
    assert len(re.findall(line, told, re.M)) == 2


def test_a_reader_that_does_not_start_is_told(plan_encoding: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_encoding, "__file__", "nothing.py")
    with pytest.raises(SystemExit, match="a reader did not start"):
        plan_encoding.through_ring(b"plan", 2, 20, 0.0)
