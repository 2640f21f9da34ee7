"""compare.py: its figures, what it tells a peer, and a whole comparison with transformers on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import dovetail
from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError
from dovetail.core.tokenizer import Tokenizer

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def load(path: str, monkeypatch: pytest.MonkeyPatch, folder: Path = BENCHMARKS) -> ModuleType:
    """As Python runs a script: its folder comes first on the path."""
    monkeypatch.syspath_prepend(str((folder / path).parent))
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, folder / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("compare.py", monkeypatch)


TINY = ("engine.device=cpu", "engine.max_len=128", "engine.max_seqs=4", "engine.kv_pages=100")
SMALL = ("workload.requests=3", "workload.prompt_tokens=6", "workload.output_tokens=5")


def chosen(workload: str) -> dict[str, list[str]]:
    return {workload: [*TINY, *SMALL, f"workload={workload}"]}


def test_both_get_the_same_prompts_and_nobody_gets_one_twice(compare: ModuleType, tmp_path: Path) -> None:
    jobs = compare.offline.make_jobs(chosen("fixed"), 2, tmp_path)["fixed"]
    assert [(job.purpose, job.round) for job in jobs] == [
        ("warm-up", 0),
        ("one token", 0),
        ("whole", 0),
        ("one token", 1),
        ("whole", 1),
    ]
    protocol = [[json.loads(line) for line in job.path.read_text().splitlines()] for job in jobs]
    assert [[line["output_tokens"] for line in lines] for lines in protocol] == [[4] * 3, [1] * 3, [5] * 3] + [
        [1] * 3,
        [5] * 3,
    ]
    assert len({tuple(line["prompt_ids"]) for lines in protocol for line in lines}) == 15


def test_a_workload_may_go_without_the_run_of_one_token(compare: ModuleType, tmp_path: Path) -> None:
    jobs = compare.offline.make_jobs(chosen("fixed"), 1, tmp_path, ["fixed"])
    assert [job.purpose for job in jobs["fixed"]] == ["warm-up", "whole"]
    measured = {name: {"fixed": [(jobs["fixed"][1], {"seconds": s})]} for name, s in (("ours", 2.0), ("theirs", 4.0))}
    (row,) = compare.offline.compared(measured, jobs, "ours", "theirs")
    assert row["ours"] == {"seconds": 2.0, "output_tokens_per_s": 7.5}
    assert row["ratio"] == {"output_tokens_per_s": 1.9737}
    assert (
        compare.offline.markdown([row], "ours", "theirs").splitlines()[-1]
        == "| fixed, 3 x 6/5 | - | - | 7.5 / 3.8 (1.97) |"
    )
    with pytest.raises(ConfigError, match="--whole-only long: none of fixed"):
        compare.offline.make_jobs(chosen("fixed"), 1, tmp_path, ["long"])


def test_only_what_is_comparable_is_compared(compare: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": [1, 2], "output_tokens": n}) + "\n" for n in (5, 6)))
    with pytest.raises(ConfigError, match=r"workload=trace: .*bench\.url"):
        compare.offline.make_jobs({"trace": [*TINY, "workload=trace", f"workload.path={file}"]}, 1, tmp_path)
    assert compare.has_rates([*TINY, "workload=poisson"]) and not compare.has_rates([*TINY, "workload=fixed"])


def test_an_option_may_be_for_one_workload(compare: ModuleType) -> None:
    args, overrides = compare.arguments(
        ["vllm", "--workloads", "latency,online", "--set", "online:workload.rates=[1,2]", "--", *TINY]
    )
    assert compare.chosen(overrides, args.workloads.split(","), args.set) == {
        "latency": [*TINY, "workload=latency"],
        "online": [*TINY, "workload=online", "workload.rates=[1,2]"],
    }
    with pytest.raises(ConfigError, match="--set online: not among --workloads latency"):
        compare.chosen(overrides, ["latency"], args.set)
    with pytest.raises(SystemExit):
        compare.arguments(["vllm", "--set", "workload.rates=[1,2]"])


def test_figures_follow_from_medians(compare: ModuleType) -> None:
    def job(purpose: str) -> Any:
        return compare.offline.Job("fixed", purpose, 0, Path())

    runs = [(job("one token"), {"seconds": s}) for s in (0.1, 0.9, 0.2)]
    runs += [(job("whole"), {"seconds": s}) for s in (5.2, 1.2, 1.1)]
    assert compare.offline.figures(runs, requests=4, output_tokens=11) == {
        "tpot_ms": 100.0,
        "one_token_s": 0.2,
        "seconds": 1.2,
        "output_tokens_per_s": 36.7,
    }


def test_a_peer_is_told_what_we_are_told(compare: ModuleType, tmp_path: Path) -> None:
    overrides = ["+preset=h200_bf16_tp8", "model=llama3_8b", "engine.max_len=1024", "kv_cache=paged"]
    shared = compare.shared_settings(compose(overrides, app="bench"), tmp_path)
    assert (shared.tp, shared.max_len, shared.max_seqs, shared.dtype) == (8, 1024, 256, "bfloat16")
    assert shared.dummy and not shared.prefix_caching and shared.memory_fraction == 0.9
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(shared.model)
    assert (config.model_type, config.hidden_size, config.num_key_value_heads) == ("llama", 4096, 8)
    assert config.rope_parameters["rope_theta"] == 500000.0
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["torch_dtype"] == "bfloat16" and told["rope_theta"] == 500000.0, "older versions read these"


@pytest.mark.parametrize(
    ("model", "known_as"),
    [
        ("mixtral_8x7b", "mixtral"),
        ("qwen3_8b", "qwen3"),
        ("falcon_7b", "falcon"),
        ("gptj_6b", "gptj"),
        ("deepseek_v3", "deepseek_v3"),
    ],
)
def test_shapes_get_the_model_type_that_others_go_by(compare: ModuleType, model: str, known_as: str) -> None:
    found = compare.hf_config(dict(compose([f"model={model}"], app="plan").part("model").config.hf))
    assert found["model_type"] == known_as


def test_workloads_share_no_prompts(compare: ModuleType, tmp_path: Path) -> None:
    """They run in one engine: prompts of the run before would stand in its prefix cache."""
    words = ["model=llama3_8b", "engine.max_len=1024"]
    jobs = compare.offline.make_jobs(
        {name: [*words, f"workload={name}"] for name in ("latency", "batch64")}, 1, tmp_path
    )
    seen: set[str] = set()
    for runs in jobs.values():
        for job in runs:
            prompts = {str(json.loads(line)["prompt_ids"]) for line in job.path.read_text().splitlines()}
            assert seen.isdisjoint(prompts), (job.workload, job.purpose)
            seen |= prompts


def test_what_vllm_is_asked_for(compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in with the names of vLLM's offline API."""
    asked: dict[str, Any] = {}

    class LLM:
        def __init__(self, **args: Any) -> None:
            asked.update(args)

        def reset_prefix_cache(self) -> None:
            asked["forgot"] = True

        def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
            assert not use_tqdm and all(p["ignore_eos"] and p["temperature"] == 0.0 for p in params)
            assert prompts == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * p["max_tokens"])]) for p in params]

    vllm = SimpleNamespace(LLM=LLM, SamplingParams=dict, __version__="0")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    load("peers/protocol.py", monkeypatch)
    peer = load("peers/vllm_peer.py", monkeypatch)
    settings = compare.asdict(compare.shared_settings(compose([*TINY, "engine.tp=2"], app="bench"), tmp_path))
    with peer.load(settings | {"engine_args": {"quantization": "fp8", "max_num_seqs": 7}}) as (run, about):
        told = run([([1, 2], 5), ([3], 2)])
    assert told["output_tokens"] == 7 and told["seconds"] > 0 and about["engine"] == "vllm 0"
    assert asked.pop("forgot"), "the next run would find the prompts of the last"
    assert asked == {
        "model": settings["model"],
        "load_format": "auto",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "max_model_len": 128,
        "max_num_seqs": 7,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
        "quantization": "fp8",
    }


def test_what_vllm_is_asked_to_serve(compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    load("peers/vllm_peer.py", monkeypatch)
    server = load("peers/vllm_server.py", monkeypatch)
    settings = compare.asdict(compare.shared_settings(compose(TINY, app="bench"), tmp_path))
    more = {
        "kv_cache_dtype": "fp8",
        "enable_prefix_caching": False,
        "disable_log_requests": False,
        "compilation_config": {"level": 3},
    }
    program, *words = server.command(settings | {"engine_args": more, "port": 8123})
    assert program == sys.executable and words[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert "--no-enable-prefix-caching" in words and "--disable-log-stats" in words
    assert "--skip-tokenizer-init" not in words, "its outputs are texts"
    assert not any("log-requests" in word for word in words), "that flag has no opposite"
    given = {name: value for name, value in zip(words, words[1:], strict=False) if name.startswith("--")}
    assert given["--max-model-len"] == "128" and given["--kv-cache-dtype"] == "fp8" and given["--port"] == "8123"
    assert json.loads(given["--compilation-config"]) == {"level": 3}


@pytest.mark.parametrize(
    ("overrides", "fit"),
    [
        (("model=llama3_8b", "workload.requests=16"), True),
        (("model=llama3_8b", "workload.requests=256"), False),
        (("model=llama3_70b", "workload.requests=1"), False),
        (("model=llama3_8b", "workload.requests=16", "cost=none"), False),
        (("engine.device=cpu",), True),
    ],
)
def test_engines_take_turns_where_both_fit(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], fit: bool
) -> None:
    """16 sequences of 1024 tokens take 2 GB beside the 16 GB of weights; 256 of 4096 take 137 GB."""
    longer = ["workload.prompt_tokens=4000"] if "workload.requests=256" in overrides else []
    words = ["+preset=h200_bf16_tp1", "engine.max_len=4096", *overrides, *longer]
    if "engine.device=cpu" not in overrides:
        monkeypatch.setattr(compare.offline, "detect_host", lambda device: SimpleNamespace(device="cuda"))
    jobs = compare.offline.make_jobs({"fixed": [*words, "workload=fixed"]}, 1, tmp_path)
    assert compare.offline.both_fit(compose(words, app="bench"), jobs) is fit


def test_an_engine_that_does_not_start_is_said(compare: ModuleType, tmp_path: Path) -> None:
    with (
        pytest.raises(compare.offline.PeerError, match="vllm ended with exit code 1"),
        compare.offline.running(compare.launch("vllm", sys.executable, {}, {})),
    ):
        pass


def test_the_peer_alone_gets_its_environment(compare: ModuleType) -> None:
    args, overrides = compare.arguments(["vllm", "--env", "A=1", "--env", "B=x=y", "--", "model=tiny", "engine.tp=2"])
    assert dict(args.env) == {"A": "1", "B": "x=y"} and overrides == ["model=tiny", "engine.tp=2"]


def test_a_comparison(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes, taking turns; the docs show what comes of it."""
    out = tmp_path / "result.json"
    options = ["transformers", "--workloads", "fixed", "--rounds", "1", "--out", str(out)]
    assert compare.main([*options, "--", *TINY, *SMALL]) == 0
    assert "| fixed, 3 x 6/5 |" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["schema"] == "dovetail.compare/2" and result["interleaved"]
    (row,) = result["comparisons"]
    for name in compare.offline.FIGURES:
        assert row["ratio"][name] == pytest.approx(row["dovetail"][name] / row["transformers"][name], abs=1e-4)
    assert {engine: [run["output_tokens"] for run in runs] for engine, runs in result["runs"].items()} == {
        "dovetail": [3, 15],
        "transformers": [3, 15],
    }
    started, table = load("docs/hooks.py", monkeypatch, BENCHMARKS.parent)._comparison(result)
    assert started.startswith("dovetail ") and "transformers " in started and "| `fixed` |" in table


def test_what_was_measured_survives_an_engine_that_ends(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's second workload fails: the first one is compared, and all of our runs are kept."""

    @contextmanager
    def running(launch: Any) -> Iterator[SimpleNamespace]:
        def run(job: Any) -> dict[str, Any]:
            if launch.name == "transformers" and job.workload == "batch64":
                raise compare.offline.PeerError("transformers ended with exit code 9")
            return {"seconds": 2.0 if job.purpose == "whole" else 1.0, "output_tokens": 7}

        yield SimpleNamespace(name=launch.name, about={"engine": launch.name, "startup_s": 1.0}, run=run)

    monkeypatch.setattr(compare.offline, "running", running)
    out = tmp_path / "result.json"
    options = ["transformers", "--workloads", "fixed,batch64", "--rounds", "1", "--order", "sequential"]
    with pytest.raises(compare.offline.PeerError, match="exit code 9"):
        compare.main([*options, "--out", str(out), "--", *TINY, *SMALL])
    result = json.loads(out.read_text())
    assert [row["workload"] for row in result["comparisons"]] == ["fixed"]
    assert {name: len(runs) for name, runs in result["runs"].items()} == {"dovetail": 4, "transformers": 2}
    assert set(result["engines"]) == {"dovetail", "transformers"} and result["interleaved"] is False


def test_replicas_are_not_compared_with_one(compare: ModuleType, tmp_path: Path) -> None:
    """A peer would get the GPUs of one replica."""
    with pytest.raises(ConfigError, match=r"engine\.dp=2: .*benchmarks/layouts\.py"):
        compare.shared_settings(compose([*TINY, "engine.dp=2"], app="bench"), tmp_path)


TWIN = """
import json, os, sys
told = json.loads(sys.argv[1])
options = ["app=serve", "engine.device=cpu", f"engine.max_len={told['max_len']}"]
options += [f"model.path={told['model']}", f"serve.port={told['port']}"]
os.execv(sys.executable, [sys.executable, told["engine_args"]["run"], *options])
"""


@pytest.mark.skipif("DOVETAIL_SERVERS" not in os.environ, reason="four starts of servers: .ci/nightly runs it")
def test_servers_under_load(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real ones; the peer is ours under another name. The docs show what comes of it."""
    (tmp_path / "twin_server.py").write_text(TWIN)
    (tmp_path / "twin_peer.py").touch()
    monkeypatch.setattr(compare, "PEERS", tmp_path)
    sizes = {"rates": [20, 40], "seconds": 0.1, "prompt_tokens": 6, "output_tokens": 5}
    words = ["twin", "--workloads", "poisson", "--args", json.dumps({"run": str(BENCHMARKS.parent / "run.py")})]
    words += [word for name, size in sizes.items() for word in ("--set", f"poisson:workload.{name}={size}")]
    out = tmp_path / "result.json"
    words += ["--env", "HF_TOKEN=s3cr3t words", "--env", "SAMPLER=0", "--out", str(out)]
    # What is the client's alone does not disturb the server.
    words += ["--", *TINY, "workload.output_tokens=7", "bench.warmup=2"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    assert compare.main(words) == 0
    printed = capsys.readouterr().out
    result = json.loads(out.read_text())
    assert [row["rate"] for row in result["served"]] == [20.0, 40.0] and not result["comparisons"]
    for row in result["served"]:
        assert f"| poisson, {row['rate']:g} ({row['requests']} requests) |" in printed
        for name in compare.served.FIGURES:
            assert row["ratio"][name] == pytest.approx(row["dovetail"][name] / row["twin"][name], abs=1e-3)
    assert "--env HF_TOKEN=... --env SAMPLER=0" in result["command"] and "s3cr3t" not in out.read_text()
    assert set(result["servers"]) == {"dovetail", "twin"}
    ours, twin = result["servers"].values()
    assert ours["version"] == twin["version"] == dovetail.__version__ and ours["startup_s"] > 0
    assert "app=serve" in ours["command"] and "twin_server.py" in twin["command"][1]
    (found,) = twin["loads"]["poisson"]["results"]
    assert all(run["failed"] == 0 for load in found["loads"] for run in load["runs"])
    started, table = load("docs/hooks.py", monkeypatch, BENCHMARKS.parent)._comparison(result)
    assert started.startswith("servers of dovetail (") and "| `poisson` at 20/s |" in table


def test_shapes_alone_are_served_with_words(compare: ModuleType, tmp_path: Path) -> None:
    composition = compose(["+preset=h200_fp8_tp1", "model=llama3_8b"], app="bench")
    compare.shared_settings(composition, tmp_path)
    _, script, *words = compare.served.dovetail_server(composition, tmp_path).command(8123)
    assert Path(script).name == "run.py"
    served = compose(words)
    model = served.part("model")
    assert served.app == "serve" and served.part("quant").name == "fp8"
    assert (model.name, model.config.path, model.config.load) == ("llama", str(tmp_path), "dummy")
    spec = model.target().spec(model.config)
    assert (spec.vocab, spec.layers) == (128256, 32)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode([5, 128255]) == "w5 w128255" and list(tokenizer.encode("w7")) == [7]


def test_a_peer_without_a_server_is_said_first(compare: ModuleType) -> None:
    with pytest.raises(ConfigError, match=r"--workloads poisson: .*transformers_server\.py is not there"):
        compare.main(["transformers", "--workloads", "poisson", "--", *TINY])


def test_a_server_that_does_not_start_is_said(compare: ModuleType) -> None:
    server = compare.served.Server("twin", lambda port: [sys.executable, "-c", "raise SystemExit(3)"], {})
    with pytest.raises(compare.served.ServerError, match="twin's server ended with exit code 3"):
        compare.served.measure(server, {}, 1, Path(), lambda about: None)


def test_what_was_measured_survives_the_other_server(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs with failures count as such."""

    @contextmanager
    def serving(server: Any, port: int) -> Iterator[float]:
        yield 1.5

    def bench(words: list[str], stdout: int) -> SimpleNamespace:
        (out,) = (word.partition("=")[2] for word in words if word.startswith("bench.out="))
        if "workload=b" in words:
            return SimpleNamespace(returncode=2)
        run = {"failed": 3, "requests": 8}
        load = {"rate": 2.0, "summary": {"ttft_ms.median": {"median": 4.0}}, "runs": [run]}
        Path(out).write_text(json.dumps({"results": [{"loads": [load]}]}))
        return SimpleNamespace(returncode=1)

    served = compare.served
    monkeypatch.setattr(served, "serving", serving)
    monkeypatch.setattr(served.subprocess, "run", bench)
    server, saved = served.Server("twin", lambda port: ["twin"], {}), []
    with pytest.raises(served.ServerError, match="workload=b against twin's server failed"):
        served.measure(server, {"a": ["workload=a"], "b": ["workload=b"]}, 1, tmp_path, saved.append)
    (about,) = saved
    assert set(about["loads"]) == {"a"} and about["startup_s"] == 1.5
    rows = served.compared({"ours": about["loads"], "twin": about["loads"]}, "ours", "twin")
    assert rows[0]["failed"] == {"ours": 3, "twin": 3}
    assert "a, 2 (8 requests; 3 of ours failed; 3 of twin failed)" in served.markdown(rows, "ours", "twin")
