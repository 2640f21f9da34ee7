"""simulator_error.py: its errors, and the bundled model on the CPU from the measurement to the table."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "simulator_error.py"
SMALL = ("--requests", "4", "--tokens", "8", "--rate", "20", "--seconds", "0.2", "--hold-out", "equal_burst")
CPU = ("+preset=tiny_cpu", "cost=cpu", "engine.dtype=float32", "engine.max_len=64", "engine.token_budget=64")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulator_error", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["simulator_error"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("simulator_error") / "result.json"
    assert script.run(["--out", str(path), *SMALL, "--", *CPU, "engine.kv_pages=100"]) == 0
    return path, json.loads(path.read_text())


def test_a_measurement_is_simulated_before_and_after_a_calibration(result: tuple[Path, dict[str, Any]]) -> None:
    found = result[1]
    assert found["schema"] == "dovetail.simulator_error/1" and found["calibration"]["held_out"] == ["equal_burst"]
    assert len(found["errors"]) == 20 and sum(row["held_out"] for row in found["errors"]) == 5
    tpot = [row for row in found["errors"] if row["figure"] == "tpot_ms.median"]
    worse = [abs(row["uncalibrated_error"]) > abs(row["calibrated_error"]) for row in tpot]
    assert sum(worse) >= 2, "conf/cost/cpu.yaml is not this machine"
    for row in found["errors"]:
        assert row["calibrated_error"] == pytest.approx(row["calibrated"] / row["measured"] - 1, abs=1e-3)


def test_a_result_is_simulated_again(
    script: ModuleType, result: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, found = result
    again = tmp_path / "again.json"
    assert script.run(["--again", str(path), "--out", str(again)]) == 0
    assert json.loads(again.read_text())["errors"] == found["errors"], "virtual time repeats to the bit"
    assert "equal_burst" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give either --again FILE, or overrides after --"),
        (["--out", str(SCRIPT), "--", "cost=cpu"], "nothing is overwritten"),
        (["--again", str(SCRIPT)], "cannot be read"),
        (["--again", str(SCRIPT.parent / "results" / "h200_llama3_8b_ladder.json")], "it is no result of this script"),
    ],
)
def test_mistakes_are_one_message(
    script: ModuleType, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.run(argv)
    assert message in f"{stopped.value.code}{capsys.readouterr().err}" and stopped.value.code != 0
