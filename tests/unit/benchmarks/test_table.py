"""compare.py table: each run on separate GPUs and cores, the longest first, and one table of all."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
STAND_IN = """
import json, os, sys, time
words = sys.argv[1:]
cut = words.index("--")
out, model = words[words.index("--out") + 1], words[cut + 2]
print("measuring", model, flush=True)
if "70b" in model and "--break" in words[:cut]:
    sys.exit("no such peer")
time.sleep(0.5)
ours = {"tpot_ms": 1234.56, "one_token_s": 0.0125, "output_tokens_per_s": 10150.4}
theirs = {"tpot_ms": 2469.12, "one_token_s": 0.025, "output_tokens_per_s": 5075.2}
ratio = {name: ours[name] / theirs[name] for name in ours}
row = {"workload": "latency", "requests": 1, "prompt_tokens": 512, "output_tokens": 256, "ratio": ratio}
load = {"ttft_ms.median": 18.42, "ttft_ms.p99": 20.0, "tpot_ms.median": 3.0, "output_tokens_per_s": 900.0}
at_rate = {"workload": "online", "rate": 4.0, "requests": 32, "dovetail": load, "vllm": load}
started = {"dovetail": {"startup_s": 11.234}, "vllm": {"startup_s": 90.0}}
result = {
    "comparisons": [row | {"dovetail": ours, "vllm": theirs}],
    "served": [at_rate | {"ratio": dict.fromkeys(load, 1.0)}],
    "engines": started,
    "servers": started,
    "words": words,
    "gpu": os.environ["CUDA_VISIBLE_DEVICES"],
    "caches": [os.environ["TRITON_CACHE_DIR"], os.environ["VLLM_CACHE_ROOT"]],
    "cores": sorted(os.sched_getaffinity(0)),
    "began": time.monotonic(),
}
open(out, "w").write(json.dumps(result))
"""


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("peers.table")
    stand_in = tmp_path / "compare.py"
    stand_in.write_text(STAND_IN)
    monkeypatch.setattr(module, "COMPARE", stand_in)
    yield module
    for name in [name for name in sys.modules if name.partition(".")[0] == "peers"]:
        del sys.modules[name]


def results(folder: Path) -> dict[str, dict]:
    files = folder.glob("*_beside_vllm.json")
    return {file.name.removesuffix("_beside_vllm.json"): json.loads(file.read_text()) for file in files}


def test_runs_that_share_a_gpu(table: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "results"
    words = ["--gpus", "3", "--together", "3", "--parts", "offline", "--out", str(out), "--"]
    assert table.main(words) == 0
    found = results(out)
    assert set(found) == {"70b_fp8", "8b_bf16", "8b_fp8"} and {one["gpu"] for one in found.values()} == {"3"}
    ours = {name: json.loads((out / f"{name}_dovetail.json").read_text()) for name in found}
    for name, one in found.items():
        assert one["words"][one["words"].index("--reuse") + 1] == str(out / f"{name}_dovetail.json")
        assert ours[name]["words"][ours[name]["words"].index("--only") + 1] == "dovetail"
        assert (out / f"{name}.log").read_text().count("measuring") == 2, "one log of both engines"
    for began in ([one["began"] for one in ours.values()], [one["began"] for one in found.values()]):
        assert max(began) - min(began) < 0.5, "no run waits for another one, which takes that long"
    assert min(one["began"] for one in found.values()) > 0.5 + max(one["began"] for one in ours.values())
    every = [*ours.values(), *found.values()]
    assert {one["words"][one["words"].index("--lock") + 1] for one in every} == {str(out / "gpu-3.lock")}
    words = ["--together", "2", "--models", "8b_fp8", "--parts", "offline", "--out", str(tmp_path / "alone")]
    assert table.main([*words, "--", "--only", "dovetail"]) == 0
    assert list((tmp_path / "alone").glob("*.json")) == [tmp_path / "alone" / "8b_fp8_beside_vllm.json"]
    for wrong in (["--together", "0"], ["--together", "2", "--parts", "online"]):
        with pytest.raises(SystemExit):
            table.main([*wrong, "--out", str(out), "--"])


def test_runs_are_concurrent_on_separate_gpus_and_cores(
    table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    assert table.main(["--gpus", "3,5", "--out", str(out), "--", "--env", "A=b", "--rounds", "3"]) == 0
    found = results(out)
    assert set(found) == {name for name, run in table.RUNS.items() if run.model in table.README}
    assert {found["70b_fp8"]["gpu"], found["8b_bf16"]["gpu"]} == {"3", "5"} and found["8b_fp8"]["gpu"] in "35"
    assert sorted(found, key=lambda name: found[name]["began"])[-1] != "70b_fp8"
    assert found["8b_fp8_online"]["began"] > max(found[name]["began"] for name in ("70b_fp8", "8b_bf16", "8b_fp8"))
    words = found["70b_fp8"]["words"]
    assert words[0] == "vllm" and words[words.index("--env") + 1] == "A=b" and words[-1] == "engine.max_seqs=256"
    assert words[len(words) - 1 - words[::-1].index("--rounds") + 1] == "3", "the caller's option counts"
    assert len({cache for result in found.values() for cache in result["caches"]}) == 12
    own = [set(found[name]["cores"]) for name in ("70b_fp8", "8b_bf16")]
    if len(os.sched_getaffinity(0)) > 1:
        assert not own[0] & own[1]
    assert "measuring model=llama3_70b" in (out / "70b_fp8.log").read_text()
    lines = capsys.readouterr().out.splitlines()
    assert (
        "| 70B FP8, latency, 1 x 512/256 | 1235 / 2469 (0.50) | 0.0125 / 0.025 (0.50) | 10150 / 5075 (2.00) |" in lines
    )
    assert (
        "| 8B bf16, online, 4 (32) | 18.4 / 18.4 (1.00) | 20 / 20 (1.00) | 3 / 3 (1.00) | 900 / 900 (1.00) |" in lines
    )
    assert "8B FP8: server started in: dovetail 11.2 s, vllm 90.0 s" in lines


def test_a_run_that_fails_is_named_and_the_others_continue(
    table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.main(["--out", str(tmp_path), "--models", "8b_fp8,70b_fp8", "--", "--break"]) == 1
    assert set(results(tmp_path)) == {"8b_fp8", "8b_fp8_online"}
    printed = capsys.readouterr()
    assert "70b_fp8 failed, see" in printed.err and "exit code 1" in printed.err
    assert "| 8B FP8, latency, 1 x 512/256 |" in printed.out
    assert "no such peer" in (tmp_path / "70b_fp8.log").read_text()


def test_a_run_of_several_gpus_goes_first_with_all_cores(
    table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = "0,1,2,3,4,5,6,7"
    assert table.main(["--gpus", gpus, "--out", str(tmp_path), "--models", "8b_fp8,70b_fp8_tp8"]) == 0
    found = results(tmp_path)
    whole = found["70b_fp8_tp8"]
    assert whole["gpu"] == gpus and whole["cores"] == sorted(os.sched_getaffinity(0))
    assert {found["8b_fp8"]["gpu"], found["8b_fp8_online"]["gpu"]} < set(gpus.split(","))
    assert whole["began"] < min(found[name]["began"] for name in ("8b_fp8", "8b_fp8_online"))
    args = json.loads(whole["words"][whole["words"].index("--args") + 1])
    assert args["quantization"] == "fp8" and args["compilation_config"]["pass_config"]["fuse_allreduce_rms"]
    assert "| 70B FP8 on eight, latency, 1 x 512/256 |" in capsys.readouterr().out


def test_too_few_gpus_are_refused_before_anything_runs(
    table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        table.main(["--gpus", "0,1", "--out", str(tmp_path / "results"), "--models", "70b_bf16_tp8,8b_fp8"])
    assert "--gpus 0,1: 70b_bf16_tp8 takes 8" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_single_run_of_a_model(table: ModuleType, tmp_path: Path) -> None:
    assert table.main(["--out", str(tmp_path), "--models", "8b_fp8_drafts_eagle3,8b_fp8", "--parts", "offline"]) == 0
    assert set(results(tmp_path)) == {"8b_fp8_drafts_eagle3", "8b_fp8"}
    with pytest.raises(SystemExit):
        table.main(["--out", str(tmp_path), "--models", "8b_fp8_online", "--parts", "offline"])


def test_an_unknown_model_is_refused(table: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        table.main(["--out", str(tmp_path), "--models", "8b_fp4"])
    assert "8b_fp4: there are 8b_bf16, 8b_fp8, 70b_fp8" in capsys.readouterr().err


@pytest.mark.nightly
def test_every_run_composes(table: ModuleType) -> None:
    from peers.jobs import words_of

    from dovetail import compose

    seen = set()
    for run in table.RUNS.values():
        words = table.command(run, Path("out.json"), [])
        options = [words[i + 1].split(":", 1) for i, word in enumerate(words) if word == "--set"]
        for workload in words[words.index("--workloads") + 1].split(","):
            own = [option for name, option in options if name == workload]
            # A workload's options do not depend on the model: one composition of each model and of each workload.
            if not {workload, run.model} <= seen:
                compose([*run.overrides, *words_of(workload), *own], app="bench")
            seen |= {workload, run.model}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ((), ["1000x512/256"]),
        (("--workloads", "1x512/256,64x512/256"), ["1000x512/256", ""]),
        (("--workloads", "64x512/256,1000x512/256"), ["1000x512/256", "1000x512/256"]),
        (("--workloads", "64x512/256", "--whole-only", "64x512/256"), ["1000x512/256", "64x512/256"]),
    ],
)
def test_other_workloads_take_along_what_runs_whole(table: ModuleType, given: tuple[str, ...], left: list[str]) -> None:
    """compare.py refuses names in --whole-only that are not among its workloads. The last of equal options counts."""
    words = table.command(table.RUNS["mixtral_8x7b_fp8"], Path("out.json"), given)
    assert [words[i + 1] for i, word in enumerate(words) if word == "--whole-only"] == left


def test_a_run_that_fails_with_our_engine_starts_no_peer(table: ModuleType, tmp_path: Path) -> None:
    words = ["--together", "2", "--parts", "offline", "--out", str(tmp_path), "--models", "8b_fp8,70b_fp8"]
    assert table.main([*words, "--", "--break"]) == 1
    assert set(results(tmp_path)) == {"8b_fp8"}
    assert (tmp_path / "70b_fp8.log").read_text().count("measuring") == 1
