"""plan.load: candidates are simulated, and the cheapest that meets the objective is found."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.compose.cli import main

pytestmark = pytest.mark.nightly

# Steps of 100 ms, whatever they do, on devices that hold 100 tokens of KV cache for each of few rows.
SLOW = ("model=tiny", "cost=h200", "cost.step_us=100000", "cost.kernel_us=0", "engine.max_len=64", "engine.depth=2")
LOAD = ("plan.load=fixed", "plan.options={requests: 16, prompt_tokens: 8, output_tokens: 8}", "plan.quants=[]")


def plan(*words: str, code: int = 0) -> dict[str, Any]:
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["app=plan", "plan.format=json", *SLOW, *LOAD, *words]) == code
    return json.loads(printed.getvalue())  # type: ignore[no-any-return]


def test_the_cheapest_candidate_that_meets_the_objective_is_found() -> None:
    """With 4 rows a step, one GPU serves 16 requests in four rounds of 0.8 s, and four GPUs in one."""
    layouts = 'plan.layouts=["engine.dp=1","engine.dp=2","engine.dp=4"]'
    found = plan("engine.max_seqs=4", "plan.price_hour=3.6", "plan.ttft=1.2", layouts)
    one, two, four = found["candidates"]
    assert [row["gpus"] for row in (one, two, four)] == [1, 2, 4]
    assert one["ttft_p99_s"] > 2.4 > 1.2 > two["ttft_p99_s"] > 0.8 > four["ttft_p99_s"]
    assert [row["meets"] for row in (one, two, four)] == [False, True, True]
    assert two["tpot_p99_s"] == pytest.approx(0.1, rel=0.05) and two["requests"] == 16
    assert two["price_per_million"] == pytest.approx(2 * 3.6 / 3600 / two["output_tokens_per_s"] * 1e6)
    assert found["best"] == "engine.dp=2"


def test_an_objective_that_no_candidate_meets_is_exit_code_1() -> None:
    found = plan("plan.gpus=1", "plan.tpot=0.01", code=1)
    assert found["best"] is None and not found["candidates"][0]["meets"]


def test_pages_that_are_set_are_those_of_the_candidates() -> None:
    """Four pages hold four requests of one page each, so 16 requests take four rounds of 0.8 s."""
    few, all_pages = (plan("plan.gpus=1", *words)["candidates"][0] for words in (["engine.kv_pages=4"], []))
    assert all_pages["ttft_p99_s"] < 0.8 < 2.4 < few["ttft_p99_s"]


def test_candidates_have_all_layouts_and_quantizers_and_say_why_not() -> None:
    found = plan("plan.gpus=2", "plan.quants=[gone]")
    names = [row["overrides"] for row in found["candidates"]]
    assert "quant=auto engine.tp=1 engine.dp=2" in names and "quant=gone engine.tp=2 engine.dp=1" in names
    assert len(names) == 3 * 2
    assert all(("no such quant" in row["reason"]) == ("gone" in row["overrides"]) for row in found["candidates"])


def test_replicas_of_a_model_with_experts_are_also_lanes() -> None:
    others = [word for word in SLOW if not word.startswith("model")]
    words = ("model=small_moe", "experts=whole", "engine.late_launch=true", "plan.gpus=2", "plan.format=json")
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["app=plan", *words, *others, *LOAD]) == 0
    found = {row["overrides"]: row for row in json.loads(printed.getvalue())["candidates"]}
    lanes = found["quant=auto engine.tp=1 engine.dp=2 engine.ep=2 experts=gather engine.late_launch=false"]
    replicas = found["quant=auto engine.tp=1 engine.dp=2"]
    assert len(found) == 4 and not lanes["reason"] and not replicas["reason"]
    assert lanes["output_tokens_per_s"] == pytest.approx(replicas["output_tokens_per_s"], rel=0.02), "0.1 s a step"


def test_an_answer_with_several_ranks_names_their_executor() -> None:
    assert plan('plan.layouts=["engine.tp=2"]')["best"] == "engine.tp=2 executor=multiproc"


def test_a_recording_can_be_the_load(tmp_path: Path) -> None:
    path = tmp_path / "run.rec"
    run = ("app=bench", "executor=simulated", "executor.clock=virtual", *SLOW, "workload.requests=3", "bench.warmup=0")
    with redirect_stdout(io.StringIO()):
        assert main([*run, "bench.one_token_run=false", f"engine.record={path}"]) == 0
    words = ["app=plan", "plan.format=json", *SLOW, "plan.gpus=1", f"plan.load={path}"]
    with redirect_stdout(io.StringIO()) as printed:
        assert main(words) == 0
    assert json.loads(printed.getvalue())["candidates"][0]["requests"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan.load=chatt",), "no such workload"),
        (("plan.ttft=1", "plan.price_hour=2"), "plan.ttft and plan.price_hour: without effect unless plan.load names"),
        (("plan.load=fixed", "plan.options={request: 3}"), "workload=fixed has no option `request`"),
        (("plan.load=sharegpt",), "options of the workload are plan.options={<name>: <value>}"),
        (("plan.load=fixed", 'plan.layouts=["engine.tpp=2"]'), "engine.tpp: it has no option `tpp`"),
        (("plan.load=fixed", "cost.memory=0.5", "plan.gpus=1"), "no candidate can be simulated"),
        (("plan.load=fixed", "plan.gpus=1", "cost=none"), "cost=none predicts nothing"),
    ],
)
def test_mistakes_are_one_message(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [word for word in SLOW if "cost=none" not in words or not word.startswith("cost")]
    assert main(["app=plan", *given, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_the_table_names_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app=plan", *SLOW, *LOAD, "plan.gpus=1", "plan.tpot=0.2"]) == 0
    out = capsys.readouterr().out
    assert "p99 TPOT 0.2 s" in out and "cheapest that meets the objective: quant=auto engine.tp=1 engine.dp=1" in out
