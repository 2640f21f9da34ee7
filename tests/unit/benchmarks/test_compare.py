"""compare.py: whole comparisons, with stand-ins for the engines and with transformers on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.errors import ConfigError

from .conftest import BENCHMARKS, TINY, results_page

pytestmark = pytest.mark.nightly

SMALL = ("workload.requests=3", "workload.prompt_tokens=6", "workload.output_tokens=5")


ENGINE = """
import json, os, pathlib, sys
settings, name = json.loads(sys.argv[1]), pathlib.Path(__file__).stem.removesuffix("_peer")
script = json.loads(pathlib.Path(__file__).with_name("script.json").read_text())
log = pathlib.Path(__file__).with_name(f"{name}.jsonl").open("a")
config = pathlib.Path(settings.get("model", "")) / "config.json"
about = {"settings": settings, "config": json.loads(config.read_text()) if config.is_file() else None}
log.write(json.dumps(about | {"mark": os.environ.get("MARK")}) + "\\n")
print(json.dumps({"ready": {"engine": name, "startup_s": 1.0}}), flush=True)
seconds = iter(script[name])
for line in sys.stdin:
    file = pathlib.Path(json.loads(line)["requests"])
    requests = [json.loads(line) for line in file.read_text().splitlines()]
    log.write(json.dumps({"file": file.stem, "requests": requests}) + "\\n")
    log.flush()
    if (took := next(seconds)) is None:
        sys.exit(9)
    tokens = sum(line["output_tokens"] for line in requests)
    print(json.dumps({"seconds": took, "output_tokens": tokens}), flush=True)
"""
Race = Callable[..., tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]]


@pytest.fixture
def race(compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Race:
    """Compare two stand-ins that take `seconds` for each run; returns the result file and what each engine got."""
    peers, out = tmp_path / "peers", tmp_path / "result.json"
    peers.mkdir()
    monkeypatch.setattr(compare, "PEERS", peers)

    def run(*words: str, ours: list[float | None], twin: list[float | None], fails: str = "") -> Any:
        for name in ("dovetail", "twin"):
            (peers / f"{name}_peer.py").write_text(ENGINE)
            (peers / f"{name}.jsonl").unlink(missing_ok=True)
        (peers / "script.json").write_text(json.dumps({"dovetail": ours, "twin": twin}))
        cut = words.index("--")
        argv = ["twin", "--out", str(out), *words]
        argv[cut + 3 : cut + 3] = [] if "--order" in words else ["--order", "interleaved"]
        if fails:
            with pytest.raises(compare.offline.PeerError, match=fails):
                compare.main(argv)
        else:
            assert compare.main(argv) == 0
        logs = {path.stem: [json.loads(line) for line in path.open()] for path in sorted(peers.glob("*.jsonl"))}
        return json.loads(out.read_text()) if out.exists() else None, logs

    return run


def test_both_engines_get_the_same_prompts_and_none_twice(race: Race) -> None:
    words = ("--workloads", "fixed,latency", "--rounds", "2", "--set", "latency:workload.requests=2")
    result, logs = race(*words, "--", *TINY, *SMALL, ours=[1.0] * 10, twin=[2.0] * 10)
    assert logs["dovetail"][1:] == logs["twin"][1:]
    runs = [(run["file"], [line["output_tokens"] for line in run["requests"]]) for run in logs["twin"][1:]]
    assert runs == [
        (f"{workload}-{purpose}", [tokens] * requests)
        for workload, requests in (("fixed", 3), ("latency", 2))
        for purpose, tokens in (
            ("warm-up-0", 4),
            ("one_token-0", 1),
            ("whole-0", 5),
            ("one_token-1", 1),
            ("whole-1", 5),
        )
    ]
    prompts = [tuple(line["prompt_ids"]) for run in logs["twin"][1:] for line in run["requests"]]
    assert len(set(prompts)) == len(prompts) == 25
    assert result["interleaved"] and [row["requests"] for row in result["comparisons"]] == [3, 2]


def test_figures_are_medians_over_the_rounds(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--workloads", "fixed", "--rounds", "3", "--", *TINY, "workload.requests=4", "workload.output_tokens=11")
    ours = [9.0, 0.1, 5.2, 0.9, 1.2, 0.2, 1.1]
    result, _ = race(*words, "workload.prompt_tokens=6", ours=ours, twin=[2 * seconds for seconds in ours])
    (row,) = result["comparisons"]
    assert row["dovetail"] == {"tpot_ms": 100.0, "one_token_s": 0.2, "seconds": 1.2, "output_tokens_per_s": 36.7}
    assert row["ratio"] == {"tpot_ms": 0.5, "one_token_s": 0.5, "output_tokens_per_s": 2.0055}
    assert "| fixed, 4 x 6/11 | 100 / 200 (0.50) | 0.2 / 0.4 (0.50) | 36.7 / 18.3 (2.01) |" in capsys.readouterr().out
    assert [run["seconds"] for run in result["runs"]["dovetail"]] == ours[1:]


def test_a_workload_without_the_run_of_one_token(race: Race, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--workloads", "fixed", "--rounds", "1", "--whole-only")
    result, logs = race(*words, "fixed", "--", *TINY, *SMALL, ours=[1.0, 2.0], twin=[1.0, 4.0])
    assert [run["file"] for run in logs["twin"][1:]] == ["fixed-warm-up-0", "fixed-whole-0"]
    assert result["comparisons"][0]["ratio"] == {"output_tokens_per_s": 1.9737}
    assert "| fixed, 3 x 6/5 | - | - | 7.5 / 3.8 (1.97) |" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--whole-only long: none of fixed"):
        race(*words, "long", "--", *TINY, *SMALL, ours=[], twin=[])


def test_results_survive_an_engine_that_ends(race: Race) -> None:
    """The peer's second workload fails: the first one is compared, and all of our runs are kept."""
    words = ("--workloads", "fixed,batch64", "--rounds", "1", "--order", "sequential", "--", *TINY, *SMALL)
    fails = "twin ended with exit code 9"
    result, _ = race(*words, ours=[1.0, 1.0, 2.0] * 2, twin=[1.0, 1.0, 2.0, 1.0, None], fails=fails)
    assert [row["workload"] for row in result["comparisons"]] == ["fixed"]
    assert {name: len(runs) for name, runs in result["runs"].items()} == {"dovetail": 4, "twin": 2}
    assert set(result["engines"]) == {"dovetail", "twin"} and result["interleaved"] is False


def test_comparisons_that_share_a_gpu_run_requests_alone(
    race: Race, compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "gpu.lock"
    share = partial(compare.offline.gpu_of_many, lock)
    words = ("--workloads", "fixed", "--rounds", "1", "--lock", str(lock), "--", *TINY, *SMALL)
    with ThreadPoolExecutor(1) as other:
        with share(alone=False), share(alone=False):  # two engines start at the same time
            running = other.submit(race, *words, ours=[1.0] * 3, twin=[2.0] * 3)
            with pytest.raises(TimeoutError):
                running.result(timeout=2.0)
            assert "warm-up" not in capsys.readouterr().err
        result, _ = running.result()
    assert len(result["comparisons"]) == 1


def test_what_an_engine_needs_of_a_gpu_that_it_shares(compare: ModuleType) -> None:
    words = ["+preset=h200_fp8_tp1", "model=llama3_8b", "model.load=dummy", "engine.max_len=4096", "engine.max_seqs=64"]
    requests = [SimpleNamespace(prompt_ids=[1] * 100, output_tokens=tokens) for tokens in range(1, 101)]
    share = compare.offline.share_of(compose(words, app="bench"), {"some": [SimpleNamespace(requests=requests)]})
    assert share.tokens == sum(range(137, 201)), "of the longest requests that run at once"
    assert share.kv_bytes == share.tokens * 2 * 32 * 8 * 128
    assert share.tokens <= 32 * (share.pages - 64) < share.tokens + 32
    gigabytes = share.fraction * share.plan.device_bytes / 1e9
    assert 8 + 5 < gigabytes < 20, "weights of 8 GB, and the rest of a small load"
    part = {"engine.memory_fraction": share.fraction, "engine.kv_pages": share.pages}
    assert compare.part_of_memory(share, words) == part
    assert set(compare.part_of_memory(share, [*words, "engine.memory_fraction=0.3"])) == {"engine.kv_pages"}
    assert compare.part_of_memory(share, [*words, "engine.kv_pages=9", "engine.memory_fraction=0.3"]) == {}


def test_an_engine_takes_no_more_of_a_shared_gpu_than_there_is(compare: ModuleType) -> None:
    words = ["+preset=h200_bf16_tp1", "model=llama2_13b", "model.load=dummy", "engine.max_len=4096"]
    requests = [SimpleNamespace(prompt_ids=[1] * 4000, output_tokens=96)] * 256
    share = compare.offline.share_of(compose(words, app="bench"), {"some": [SimpleNamespace(requests=requests)]})
    assert share.tokens < 256 * 4096
    assert share.plan.weights + share.pages * 32 * share.kv_bytes / share.tokens < share.plan.budget
    assert share.fraction <= share.plan.engine.memory_fraction


def test_a_peer_gets_our_settings_and_an_environment(race: Race) -> None:
    words = ("--workloads", "fixed", "--rounds", "1", "--order", "sequential")
    words += ("--env", "MARK=x=y", "--args", '{"a": 1}')
    overrides = ("+preset=h200_bf16_tp8", "model=llama3_8b", "engine.max_len=1024", "kv_cache=paged", *SMALL)
    _, logs = race(*words, "--", *overrides, ours=[1.0] * 3, twin=[2.0] * 3)
    assert (logs["dovetail"][0]["mark"], logs["twin"][0]["mark"]) == (None, "x=y")
    settings, config = logs["twin"][0]["settings"], logs["twin"][0]["config"]
    names = ("tp", "max_len", "max_seqs", "dtype", "dummy", "prefix_caching", "memory_fraction", "engine_args")
    assert [settings[name] for name in names] == [8, 1024, 256, "bfloat16", True, False, 0.9, {"a": 1}]
    assert (config["model_type"], config["hidden_size"], config["num_key_value_heads"]) == ("llama", 4096, 8)
    assert config["torch_dtype"] == "bfloat16" and config["rope_theta"] == 500000.0, "older versions read these"


def test_what_cannot_be_compared_is_refused(compare: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({"prompt_ids": [1, 2], "output_tokens": 5, "arrival": 0.5}) + "\n")
    for words, message in (
        (
            ["transformers", "--workloads", "trace", "--set", f"trace:workload.path={file}", "--"],
            r"workload=trace: .*bench\.url",
        ),
        (["transformers", "--workloads", "poisson", "--"], r"--workloads poisson: .*there is no transformers_server"),
        (["vllm", "--workloads", "fixed", "--", "engine.dp=2"], r"engine\.dp=2: .*benchmarks/layouts\.py"),
        (["vllm", "--workloads", "fixed", "--set", "online:workload.rates=[1]", "--"], "--set online: not among"),
    ):
        with pytest.raises(ConfigError, match=message):
            compare.main([*words, *TINY])
    with pytest.raises(SystemExit):
        compare.main(["vllm", "--set", "workload.rates=[1,2]"])


@pytest.mark.parametrize(
    ("model", "model_type"),
    [
        ("mixtral_8x7b", "mixtral"),
        ("qwen3_8b", "qwen3"),
        ("falcon_7b", "falcon"),
        ("gptj_6b", "gptj"),
        ("deepseek_v3", "deepseek_v3"),
    ],
)
def test_shapes_get_the_model_type_of_other_engines(compare: ModuleType, model: str, model_type: str) -> None:
    found = compare.model_folder.hf_config(dict(compose([f"model={model}"], app="plan").part("model").config.hf))
    assert found["model_type"] == model_type


@pytest.mark.parametrize(
    ("overrides", "fit"),
    [
        (("model=llama3_8b", "workload.requests=16"), True),
        (("model=llama3_8b", "workload.requests=256", "workload.prompt_tokens=4000"), False),
        (("model=llama3_70b", "workload.requests=1"), False),
        (("model=llama3_8b", "workload.requests=16", "cost=none"), False),
        (("engine.device=cpu",), True),
    ],
)
def test_engines_take_turns_where_both_fit(
    compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], fit: bool
) -> None:
    """16 sequences of 1024 tokens take 2 GB next to the 16 GB of weights; 256 of 4096 take 137 GB."""
    words = ["+preset=h200_bf16_tp1", "engine.max_len=4096", *overrides]
    if "engine.device=cpu" not in overrides:
        monkeypatch.setattr(compare.offline, "detect_host", lambda device: SimpleNamespace(device="cuda"))
    composition = compose([*words, "workload=fixed"], app="bench")
    jobs = compare.make_jobs({"fixed": composition}, 1, tmp_path)
    assert compare.offline.both_fit(composition, jobs) is fit


VLLM = """
import json, os
from types import SimpleNamespace
__version__ = "0"
__path__ = []
calls = []
class Engine:
    waiting = []
    def add_request(self, name, prompt, params):
        self.waiting.append((name, prompt["prompt_token_ids"], params))
    def has_unfinished_requests(self):
        return bool(self.waiting)
    def step(self):
        (name, ids, params), *self.waiting = self.waiting
        calls.append([name, ids, params])
        outputs = [SimpleNamespace(token_ids=[7] * params["max_tokens"])]
        return [SimpleNamespace(request_id=name, finished=True, outputs=outputs)]
class LLM:
    llm_engine = Engine()
    def __init__(self, **args):
        calls.append(args)
    def reset_prefix_cache(self):
        calls.append("reset")
        with open(os.environ["CALLS"], "w") as file:
            json.dump(calls, file)
    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm
        calls.append([[prompt["prompt_token_ids"] for prompt in prompts], params])
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * p["max_tokens"])]) for p in params]
SamplingParams = StructuredOutputsParams = dict
RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
import sys
sys.modules["vllm.sampling_params"] = sys.modules["vllm"]
"""


@pytest.fixture
def vllm(compare: ModuleType, tmp_path: Path) -> Callable[..., tuple[list[Any], dict[str, Any]]]:
    """Runs a comparison with a stand-in for vLLM's offline API; returns its calls (not those of the last run) and the
    result."""

    def run(*words: str) -> tuple[list[Any], dict[str, Any]]:
        (tmp_path / "vllm.py").write_text(VLLM)
        calls, out = tmp_path / "calls.json", tmp_path / "result.json"
        calls.unlink(missing_ok=True)
        argv = ["vllm", "--rounds", "1", "--order", "sequential", "--out", str(out)]
        argv += ["--env", f"PYTHONPATH={tmp_path}", "--env", f"CALLS={calls}"]
        assert compare.main([*argv, *words]) == 0
        return json.loads(calls.read_text()) if calls.exists() else [], json.loads(out.read_text())

    return run


@pytest.mark.nightly
def test_vllm_gets_the_same_settings_and_forgets_prompts(vllm: Callable[..., Any]) -> None:
    args = {"quantization": "fp8", "max_num_seqs": 7}
    (asked, *runs), result = vllm("--workloads", "fixed", "--args", json.dumps(args), "--", *TINY, *SMALL)
    assert [run if run == "reset" else [len(ids) for ids in run[0]] for run in runs] == [
        "reset",
        [6, 6, 6],
        "reset",
        [6, 6, 6],
        "reset",
    ], "otherwise a run would find the prompts of the previous one"
    assert all(p["ignore_eos"] and p["temperature"] == 0.0 for p in runs[1][1])
    model = asked.pop("model")
    assert (Path(model) / "config.json").is_file()
    assert asked == {
        "load_format": "auto",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "tensor_parallel_size": 1,
        "max_model_len": 128,
        "max_num_seqs": 7,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "seed": 0,
        "quantization": "fp8",
    }
    assert result["engines"]["vllm"]["engine"] == "vllm 0"
    assert [run["output_tokens"] for run in result["runs"]["dovetail"]] == [3, 15]


SHAPES = ("hidden_size=32", "intermediate_size=64", "num_hidden_layers=1", "num_attention_heads=2", "vocab_size=2048")
LITTLE = (
    *("model=llama2_7b", "model.hf.num_key_value_heads=2", "model.hf.dtype=float32"),
    *(f"model.hf.{size}" for size in SHAPES),
    *("engine.device=cpu", "engine.dtype=float32", "engine.max_len=256", "engine.max_seqs=8", "engine.kv_pages=200"),
)
DRAWN = ("message.median=6", "message.most=20", "output.median=5", "output.most=9")


@pytest.mark.nightly
def test_loads_that_people_have(vllm: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Drawn lengths, sampling, rounds and schemas reach both engines alike; the model has shapes alone."""
    names = ("chat", "multi_turn", "agents", "3x6/5-sampled", "2x4/3", "1x9/2")
    words = ["--workloads", ",".join(names)]
    for name in ("chat", "multi_turn"):
        words += [word for option in DRAWN for word in ("--set", f"{name}:workload.{option}")]
    sizes = ("chat:workload.conversations=4", "multi_turn:workload.conversations=2", "multi_turn:workload.rounds=3")
    sizes += ("agents:workload.conversations=3", "agents:workload.shared_tokens=20", "agents:workload.output.median=8")
    sizes += ("agents:workload.message.most=70",)
    words += [word for size in sizes for word in ("--set", size)]
    (asked, *calls), result = vllm(*words, "--", *LITTLE)
    assert asked["skip_tokenizer_init"] is False and asked["load_format"] == "dummy", "schemas need the tokenizer"
    rounds = [call for call in calls if call != "reset" and isinstance(call[0], str)][-6:]
    prompts = {int(name): ids for name, ids, _ in rounds}
    for index, ids in prompts.items():
        if index % 3:
            before = prompts[index - 1]
            answer = rounds[[int(name) for name, _, _ in rounds].index(index - 1)][2]["max_tokens"]
            assert ids[: len(before) + answer] == before + [7] * answer, "a round continues the previous one"
    at_once = [call for call in calls if call != "reset" and not isinstance(call[0], str)]
    chat, agents = at_once[1], at_once[3]
    assert all((p["temperature"], p["top_p"]) == (0.8, 0.95) for p in chat[1] + rounds[0][2:])
    assert len({p["max_tokens"] for p in chat[1]}) > 1
    assert all(json.loads(p["structured_outputs"]["json"])["type"] == "object" for p in agents[1])
    rows = {row["workload"]: row for row in result["comparisons"]}
    assert list(rows) == list(names)
    with_tpot = [name for name, row in rows.items() if "tpot_ms" in row["ratio"]]
    assert with_tpot == ["3x6/5-sampled", "2x4/3"], "it is not defined for the others"
    runs = {engine: {run["workload"]: run for run in runs} for engine, runs in result["runs"].items()}
    for name in names:
        ours, theirs = (runs[engine][name] for engine in ("dovetail", "vllm"))
        assert (ours["output_tokens"], ours["requests_hash"]) == (theirs["output_tokens"], theirs["requests_hash"])
    printed = capsys.readouterr().out
    assert "| agents, 3 x " in printed and "| 3 x 6/5, sampled | " in printed


def test_one_engine_alone_and_the_other_beside_it_later(
    race: Race, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--workloads", "2x4/3", "--rounds", "1")
    result, logs = race(*load, "--only", "twin", "--", *TINY, ours=[], twin=[1.0, 2.0, 4.0])
    assert set(logs) == set(result["runs"]) == set(result["engines"]) == {"twin"}
    assert "| 2 x 4/3 | 1000 | 2 | 1.5 |" in capsys.readouterr().out
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(result))
    both, logs = race(*load, "--reuse", str(kept), "--", *TINY, ours=[1.0, 1.0, 2.0], twin=[])
    assert set(logs) == {"dovetail"} and both["runs"]["twin"] == result["runs"]["twin"]
    assert both["comparisons"][0]["ratio"] == {"tpot_ms": 0.5, "one_token_s": 0.5, "output_tokens_per_s": 2.0}
    for workload, overrides, message in (
        ("2x4/3", ("engine.max_seqs=3",), r"measured with max_seqs=4, this run has max_seqs=3"),
        ("2x5/3", (), r"has no run of 2x5/3, one token, round 1 with the same requests; it has 2x4/3"),
    ):
        words = ("--workloads", workload, "--rounds", "1", "--reuse", str(kept), "--", *TINY, *overrides)
        with pytest.raises(ConfigError, match=message):
            race(*words, ours=[], twin=[])
    kept.write_text("{}")
    with pytest.raises(ConfigError, match="has no runs of engines"):
        race(*load, "--reuse", str(kept), "--", *TINY, ours=[], twin=[])


def test_the_command_of_vllms_server(compare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    server = importlib.import_module("vllm_server")
    settings = compare.asdict(compare.shared_settings(compose(TINY, app="bench"), "vllm", tmp_path))
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


def test_a_comparison(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes, taking turns; the docs show the result."""
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
    started, table = results_page(result, monkeypatch)
    assert started.startswith("dovetail ") and "transformers " in started and "| `fixed` |" in table
