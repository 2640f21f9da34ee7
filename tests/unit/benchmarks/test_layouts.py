"""layouts.py: the winner of each load, results of a race that ends early, and a whole race on the simulated device."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "layouts.py"


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("layouts", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "layouts", module)
    spec.loader.exec_module(module)
    return module


def summary(name: str, low: float, median: float, high: float) -> dict[str, dict[str, float]]:
    return {name: {"min": low, "median": median, "max": high}}


def one_run(speed: float) -> dict[str, Any]:
    runs = [{"output_tokens_per_s": speed}]
    load = {"rate": None, "runs": runs, "summary": summary("output_tokens_per_s", speed, speed, speed)}
    return {"results": [{"workload": "w", "loads": [load]}]}


def test_throughput_decides_a_burst_and_latency_decides_a_rate(layouts: ModuleType) -> None:
    burst, rate = layouts.Load("batch64", None), layouts.Load("online", 4.0)
    tokens = {
        "a": summary("output_tokens_per_s", 90, 100, 110),
        "b": summary("output_tokens_per_s", 118, 120, 122),
        "c": summary("output_tokens_per_s", 100, 110, 119),
    }
    won = layouts.winner(burst, tokens)
    assert (won["layout"], won["tie"]) == ("b", ["c"]) and won["lead"] == pytest.approx(120 / 110 - 1)
    times = {"a": summary("e2e_ms.median", 10, 11, 12), "b": summary("e2e_ms.median", 20, 22, 24)}
    won = layouts.winner(rate, times)
    assert (won["layout"], won["tie"], won["lead"]) == ("a", [], pytest.approx(1.0))
    assert layouts.winner(rate, {"a": times["a"]}) == {"layout": "a", "lead": None, "tie": []}
    lines = list(layouts.table({burst: tokens, rate: {"b": times["b"]}}, ["a", "b", "c"]))
    assert lines[2] == "| batch64 | output tokens/s | 100 | 120 | 110 | b, +9.1% (no clear lead over c) |"
    once = {"a": summary("output_tokens_per_s", 12345, 12345, 12345), "b": summary("output_tokens_per_s", 9, 9, 9)}
    (*_, line) = layouts.table({burst: once}, ["a", "b"])
    assert line.startswith("| batch64 | output tokens/s | 12345 | 9 | a, ") and "one run each" in line
    assert lines[3] == "| online 4/s | E2E median, ms | - | 22 | - | b |"


def test_rounds_alternate_and_a_machine_that_slows_down_makes_a_tie(
    layouts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each start is slower than the one before: without reversal the first layout would win."""
    speeds = iter([100.0, 90.0, 80.0, 70.0])
    started: list[str] = []

    def measure(layout: str, *_: Any) -> dict[str, Any]:
        started.append(layout)
        return one_run(next(speeds))

    monkeypatch.setattr(layouts, "measure", measure)
    out = tmp_path / "out.json"
    assert layouts.main(["--layouts", "a", "b", "--rounds", "2", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert started == ["a", "b", "b", "a"]
    assert result["wins"]["w"] == {"layout": "a", "lead": pytest.approx(0.0), "tie": ["b"]}


def test_results_survive_an_interrupt_and_a_failure(
    layouts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "new folder" / "out.json"
    starts = iter([one_run(1.0), one_run(2.0), {"error": "broken"}, KeyboardInterrupt()])

    def measure(*_: Any) -> dict[str, Any]:
        result = next(starts)
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(layouts, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        layouts.main(["--layouts", "a", "b", "--rounds", "2", "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["wins"]["w"]["layout"] == "a"
    assert result["layouts"]["b"] == {"error": "broken", "before": one_run(2.0)}
    assert [file.name for file in out.parent.iterdir()] == ["out.json"]


FOREVER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({pids!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
print("printed", flush=True)
print("warned", file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_a_layout_that_takes_too_long_is_killed_with_all_its_processes(
    layouts: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, pids = tmp_path / "forever.py", tmp_path / "pids"
    script.write_text(FOREVER.format(pids=str(pids)))
    monkeypatch.setattr(layouts, "RUN", script)
    assert layouts.main(["--layouts", "slow", "--patience", "2"]) == 1
    printed = capfd.readouterr()
    assert "printed" in printed.out and "slow: warned\nno result within 2 s (--patience)" in printed.err
    deadline = time.monotonic() + 10
    while any(map(runs, map(int, pids.read_text().split()))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(runs, map(int, pids.read_text().split())))


def test_a_stopped_race_leaves_no_process(tmp_path: Path) -> None:
    """SIGTERM, as a job's time limit sends it."""
    words = ["--layouts", "executor=simulated", "--workloads", "fixed", "--", "executor.speed=1e-6", "cost=h200"]
    race = subprocess.Popen([sys.executable, str(SCRIPT), *words], stdout=subprocess.DEVNULL)
    try:
        children = Path(f"/proc/{race.pid}/task/{race.pid}/children")
        while not (running := children.read_text().split()):
            time.sleep(0.02)
        race.terminate()
        assert race.wait(30) == 128 + signal.SIGTERM
        assert not any(map(runs, map(int, running)))
    finally:
        race.kill()


def runs(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.nightly
def test_a_race(layouts: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At a hundredth of a simulated H200's speed, so that nothing else counts, eight ranks answer one request sooner
    than one; the third layout cannot start."""
    conf = tmp_path / "conf" / "workload"
    conf.mkdir(parents=True)
    (conf / "few.yaml").write_text("defaults: [fixed, _self_]\nrequests: 2\nprompt_tokens: 8\noutput_tokens: 6\n")
    one, eight, none = "+preset=h200_fp8_tp1", "+preset=h200_fp8_tp8 model=llama3_8b", "+preset=nothing"
    out, plot = tmp_path / "layouts.json", tmp_path / "layouts.svg"
    words = ["--layouts", one, eight, none, "--workloads", "few", "--out", str(out), "--plot", str(plot)]
    common = ["executor=simulated", "executor.speed=0.01", "engine.device=cpu", "attention=sdpa"]
    common += ["collective=nccl", "engine.max_len=256", "bench.warmup=0"]
    code = layouts.main([*words, "--", "--config-dir", str(tmp_path / "conf"), *common])
    printed = capfd.readouterr()
    assert code == 1 and "+preset=nothing: dovetail:" in printed.err
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["wins"]["few"]["layout"] == eight and result["wins"]["few"]["lead"] > 0.1, printed.out
    assert [result["layouts"][name]["startup"]["layout"]["tp"] for name in (one, eight)] == [1, 8]
    assert set(result["layouts"][none]) == {"error"} and "| few | output tokens/s |" in printed.out
    assert "<svg" in plot.read_text()
