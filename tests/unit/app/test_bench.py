"""The app `bench` end to end: the bundled model on the CPU."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.compose.cli import main
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import TimedRequest
from dovetail.plugins.app.bench.app import check_apart, check_writable
from dovetail.plugins.app.bench.inprocess import EngineTarget
from dovetail.plugins.app.bench.record import commit

CPU = ("app=bench", "engine.device=cpu", "engine.max_len=128", "engine.kv_pages=200", "bench.warmup=1")
ROOT = Path(__file__).parents[3]
SMALL = ("workload.requests=4", "workload.prompt_tokens=6", "workload.output_tokens=5")


def bench(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    assert main([*CPU, *overrides, f"bench.out={out}"]) == 0
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def test_a_run_on_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two workloads in one start; the second one is a load curve."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"prompt_ids": [5] * 40, "output_tokens": 4, "arrival": i * 0.3} for i in range(2)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    variants = tmp_path / "conf" / "workload"
    variants.mkdir(parents=True)
    (variants / "small.yaml").write_text("defaults: [fixed, _self_]\nrequests: 4\nprompt_tokens: 6\noutput_tokens: 5\n")
    (variants / "curve.yaml").write_text(
        "defaults: [poisson, _self_]\nrates: [30.0, 60.0]\nat_least: 3\nseconds: 0.01\noutput_tokens: 2\n"
    )
    (variants / "twice.yaml").write_text(f"defaults: [trace, _self_]\npath: {trace}\n")
    result = bench(
        tmp_path,
        *("-cd", str(tmp_path / "conf"), "bench.workloads=[small,curve,twice]", "bench.runs=2", "bench.slo.ttft=30"),
        f"bench.plot={tmp_path / 'curves.svg'}",
    )
    assert result["schema"] == "dovetail.bench/2" and result["config"]["model"]["name"] == "llama"
    assert result["versions"]["torch"] and result["startup"]["phases_s"] and result["machine"]["gpus"] == []
    assert result["startup"]["tuning"] == "", "on a CPU nothing is tuned"
    small, curve, twice = result["results"]
    (load,) = small["loads"]
    assert load["rate"] is None and len(load["runs"]) == 2
    for run in load["runs"]:
        assert (run["requests"], run["failed"], run["prompt_tokens"], run["output_tokens"]) == (4, 0, 24, 20)
        assert run["run_tpot_ms"] == pytest.approx((run["seconds"] - run["one_token_run_s"]) / 4 * 1e3, abs=1e-3)
        assert run["steps"] == 5 and run["preemptions"] == 0 and 0 < run["device_idle"] < 1
        assert run["goodput"]["share"] == 1.0
        host = run["host_ms_per_step"]
        assert all(host[part] > 0 for part in ("schedule", "submit", "wait", "update"))
        assert 0 < run["device_ms_per_step"] <= sum(host.values())
        assert sum(host.values()) * run["steps"] <= run["seconds"] * 1e3
    assert [load["rate"] for load in curve["loads"]] == [30.0, 60.0] and curve["knee"]["rate"] == 60.0
    assert all("run_tpot_ms" not in load["summary"] for load in curve["loads"])
    # 32 of 40 prompt tokens are in full pages of the first request; the cache is emptied after warm-up and first run.
    assert [run["prefix_hit_rate"] for run in twice["loads"][0]["runs"]] == [0.4, 0.4]
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    told = capsys.readouterr().out
    assert "knee of curve: 60 requests/s" in told and "inside the engine" in told


def test_requests_spread_over_adapters(tmp_path: Path, save_lora: Callable[..., str]) -> None:
    loads = [f"+adapter.load.{name}='{save_lora(name, seed=seed)}'" for seed, name in enumerate("ab", 1)]
    lora = ("adapter=lora", "adapter.slots=1", "bench.adapters=[a,b]")
    result = bench(tmp_path, *SMALL, "workload.requests=12", *lora, *loads)
    (run,) = result["results"][0]["loads"][0]["runs"]
    assert (run["failed"], run["output_tokens"]) == (0, 60)
    # With one slot, requests of the other adapter wait until it is free: more steps than the five of a single batch.
    assert run["steps"] > 5 and "run_tpot_ms" in run


@pytest.mark.nightly
def test_a_run_on_two_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures cover both replicas and each one; arrival times are kept, and the cache is empty after warm-up."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"prompt_ids": [5 + i % 2] * 80, "output_tokens": 4, "arrival": i * 0.4} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    result = bench(tmp_path, "engine.dp=2", "workload=trace", f"workload.path={trace}", "router=round_robin")
    assert result["startup"]["layout"] == {"tp": 1, "pp": 1, "dp": 2}
    (run,) = result["results"][0]["loads"][0]["runs"]
    assert (run["requests"], run["failed"], run["prompt_tokens"], run["output_tokens"]) == (4, 0, 320, 16)
    first, second = run["replicas"]
    assert [(one["requests"], one["output_tokens"]) for one in (first, second)] == [(2, 8), (2, 8)]
    assert run["steps"] == first["steps"] + second["steps"] and first["steps"] >= 4
    # 64 of 80 tokens are in full pages, and each prompt is sent twice to the same replica.
    assert [one["prefix_hit_rate"] for one in (run, first, second)] == [0.4, 0.4, 0.4]
    assert run["seconds"] >= 1.2 and 0 < run["client_busy"]
    assert "2 x cpu (dp=2)" in (told := capsys.readouterr().out) and "replicas, last run" in told


def test_a_request_is_sent_at_its_arrival_time_regardless_of_others() -> None:
    target = EngineTarget(compose(["workload=fixed", *CPU[1:]], app="bench"))
    target.start(lambda phase, share: None)
    try:
        requests = [TimedRequest((1, 2, 3), 2), TimedRequest((4, 5, 6), 2), TimedRequest((7, 8, 9), 2, arrival=0.4)]
        lines, figures = target.run(requests, lambda done: None)
        assert lines[0].times == lines[1].times, "a burst enters one step together"
        assert all(0.4 <= clock < 10 for clock in lines[2].times)
        assert [line.tokens for line in lines] == [2, 2, 2] and figures["steps"] == 4
        rejected, _ = target.run([TimedRequest((1,), 3), TimedRequest((1,) * 100, 500)], lambda done: None)
        assert not rejected[0].failure
    finally:
        target.close()


def test_steps_are_put_off_for_requests_to_come_as_in_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated device; the clock advances only by waiting, and slightly each time it is read."""
    now = 1000.0

    def look() -> float:
        nonlocal now
        now += 1e-6
        return now

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", look)
    monkeypatch.setattr(time, "sleep", wait)
    device = ("executor=simulated", "model=tiny", "engine.depth=2", "cost=h200", "cost.step_us=10000")
    waited = []
    for late in (False, True):
        target = EngineTarget(compose(["workload=fixed", *device, f"engine.late_launch={late}"], app="bench"))
        target.start(lambda phase, share: None)
        lines, figures = target.run([TimedRequest((1, 2), 40), TimedRequest((3, 4), 4, 0.203)], lambda done: None)
        target.close()
        waited.append(lines[1].ttft)
        assert figures["device_idle"] < 0.01
    assert waited[0] - waited[1] == pytest.approx(0.01, rel=0.05), "one step sooner"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("workload=latency",), "do not fit into a context of 128"),
        (("workload=fixed", "bench.workloads=[poisson]"), "give one of them"),
        (("bench.workloads=[fixd]",), "Did you mean `fixed`"),
        (("bench.plot=x.bmp",), "must end with one of .png, .svg, .pdf"),
        (("bench.out=/proc/nowhere/x.json",), "cannot be written"),
        (("workload=agents", "workload.shared_tokens=1", "workload.message.most=60", "grammar=none"), "grammar=none"),
        (("bench.slo.ttft=0",), "greater than 0"),
        (("bench.adapters=[sql]",), "not loaded: sql; loaded: none"),
        (("bench.url=http://127.0.0.1:9/v1",), "is the server up"),
        (("bench.url=http://127.0.0.1:9/v1", "bench.send=text", "model=llama3_8b"), "no tokenizer"),
    ],
)
def test_a_mistake_is_reported(overrides: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CPU, *overrides]) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_result_is_not_overwritten(tmp_path: Path) -> None:
    others = {"served.rec": "DOVETAIL", "page.html": "<!doctype html>\n<p>mine", "trace.json": '{"traceEvents": []}'}
    for name, text in others.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=rf"bench\.out=.*{name}: the file exists and is not a result of Dovetail"):
            check_writable(str(tmp_path / name), "bench.out")
        assert (tmp_path / name).read_text() == text
    former = tmp_path / "former.json"
    former.write_text('{\n "schema": "dovetail.bench/1"}')
    check_writable(str(former), "bench.out")


def test_two_results_have_two_files() -> None:
    check_apart({"ablate.out": "a.json", "ablate.report": "a.html", "ablate.plot": None})
    with pytest.raises(ConfigError, match=r"ablate\.report=\./a\.json is the file of ablate\.out: choose another name"):
        check_apart({"ablate.out": "a.json", "ablate.report": "./a.json"})


def test_a_missing_matplotlib_is_reported_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main([*CPU, "bench.plot=x.png"]) == 2
    assert "pip install 'dovetail[bench]'" in capsys.readouterr().err


# A server.


def test_results_name_the_commit_of_a_checkout() -> None:
    """Through src/dovetail too, which has links to the files that git knows."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (found := commit()) is not None and found["hash"] == head.strip()
