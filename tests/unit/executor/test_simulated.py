"""executor=simulated: an engine runs without a device, at the speed of its cost model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.compose import compose
from dovetail.core.compose.cli import main
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import (
    CatchUp,
    FinishReason,
    Grammar,
    Join,
    JoinBlob,
    Request,
    RequestOptions,
    RowWork,
    SamplingParams,
    SchedulerContext,
    StepPlan,
)
from dovetail.core.tokenizer import Tokenizer
from dovetail.plugins.cost.roofline import Roofline

SHAPES = ("app=generate", "executor=simulated", "model=llama3_8b", "engine.max_len=256", "engine.max_seqs=4")


@contextmanager
def engine(*overrides: str) -> Iterator[Engine]:
    made = start_engine(compose([*SHAPES, *overrides]))
    try:
        yield made
    finally:
        made.shutdown()


def outputs(engine: Engine, params: SamplingParams, *prompts: list[int]) -> list[list[int]]:
    """Return the output per prompt. Each must end by length."""
    found = {engine.add(prompt, params)[0].uid: [] for prompt in prompts}
    while engine.has_work:
        for event in engine.step():
            found[event.uid] += event.tokens
            assert event.reason in (None, FinishReason.LENGTH)
    return list(found.values())


def test_outputs_end_by_length_and_follow_from_the_prompts_end() -> None:
    with engine() as simulated:
        ends = set(simulated.info.spec.eos_ids)
        params = SamplingParams(max_tokens=200)
        first, other, again = outputs(simulated, params, [1, 2, 3], [1, 2, 4], [7, 8, 3])
    assert ends and not ends & {*first, *other}
    assert first != other and first == again and len(first) == 200 and len(set(first)) > 190


def test_a_step_takes_the_time_of_the_cost_model() -> None:
    with engine("cost=h200", "cost.step_us=30000", "executor.speed=2") as simulated:
        began = time.perf_counter()
        outputs(simulated, SamplingParams(max_tokens=8), [1, 2, 3])
        taken = time.perf_counter() - began
        assert taken >= 8 * 0.015
        assert simulated.counters.wait_seconds > 0.5 * taken, "the host waited for it"


@pytest.mark.parametrize(("depth", "least", "most"), [(1, 0.25, 1.0), (2, 0.0, 0.2)])
def test_the_device_waits_for_the_host_only_without_overlap(depth: int, least: float, most: float) -> None:
    """The host takes 30 ms for a step that the device runs in 64 ms. Time without requests does not count."""
    with engine("cost=h200", "cost.step_us=60000", f"engine.depth={depth}") as simulated:
        schedule = simulated.scheduler.schedule

        def slow(ctx: SchedulerContext) -> StepPlan | None:
            time.sleep(0.03)
            return schedule(ctx)

        simulated.scheduler.schedule = slow  # type: ignore[method-assign]
        for _ in range(2):
            outputs(simulated, SamplingParams(max_tokens=6), [1, 2, 3])
            time.sleep(0.3)
        counters = simulated.counters
    share = counters.idle_seconds / (counters.idle_seconds + counters.device_seconds)
    assert least <= share < most and counters.device_seconds >= counters.steps * 0.06


def test_weights_need_no_room() -> None:
    """405 billion parameters run on any machine."""
    with engine("model=llama31_405b") as simulated:
        assert simulated.info.device == "simulated"
        assert any("made up" in note for note in simulated.info.notes)


def test_experts_do_not_move() -> None:
    with engine("model=small_moe", "engine.tp=2", "experts=whole", "experts.rebalance=3") as simulated:
        assert any("experts.rebalance=3 moves none" in note for note in simulated.info.notes)


def test_logprobs_are_uniform() -> None:
    with engine() as simulated:
        simulated.add([1, 2, 3, 4], SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=0))
        events = []
        while simulated.has_work:
            events += simulated.step()
    assert [len(event.prompt_logprobs) for event in events] == [3, 0]
    assert all(entry.logprob < -11 and len(entry.top) == 1 for event in events for entry in event.logprobs)


def test_a_grammar_is_obeyed() -> None:
    with engine("model=tiny") as simulated:
        model = simulated.composition.part("model")
        simulated.add([5], SamplingParams(max_tokens=16, grammar=Grammar(kind="regex", value="[a-c]{4}")))
        tokens: list[int] = []
        while simulated.has_work:
            for event in simulated.step():
                tokens += event.tokens
    text = Tokenizer(model.target().source(model.config).checkpoint).decode(tokens)
    assert len(text) == 4 and set(text) <= set("abc")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_prompts_are_embedded(pooling: str) -> None:
    with engine("engine.token_budget=16") as simulated:
        simulated.add([1] * 40, SamplingParams(max_tokens=1), RequestOptions(pooling=pooling))
        events = []
        while simulated.has_work:
            events += simulated.step()
    (event,) = events
    assert event.pooled_C.shape == (4096,) and event.pooled_C.std() == 0 and event.pooled_C[0] > 0


@pytest.mark.parametrize("depth", [1, 3])
def test_made_up_drafts_change_no_token_and_are_accepted_at_the_given_rate(depth: int) -> None:
    prompts = [[n, 3] for n in range(1, 5)]
    params = SamplingParams(max_tokens=150)
    with engine() as simulated:
        plain = outputs(simulated, params, *prompts)
    drafted = ("spec_decode=ngram", "spec_decode.lookahead=2", "executor.acceptance=0.5", "engine.drafts=always")
    with engine(*drafted, f"engine.depth={depth}") as simulated:
        assert outputs(simulated, params, *prompts) == plain
        counters = simulated.counters
        assert counters.drafted > 0.9 * 2 * counters.decode_rows
        # The first of two is accepted with 1/2, both with 1/4.
        assert counters.accepted / counters.decode_rows == pytest.approx(0.75, abs=0.1)


def test_drafting_takes_the_time_of_the_draft_model() -> None:
    model = ("spec_decode=draft_model", "model@spec_decode.model=llama3_8b", "executor.acceptance=0", "cost=h200")
    drafter = (*model, "engine.drafts=always", "spec_decode.lookahead=3")
    seconds = []
    for words, drafts in (((), 0), (drafter, 3), (drafter, 1)):
        with engine("cost=h200", "engine.depth=2", *words) as simulated:
            simulated.scheduler.draft_tokens = lambda seq, ctx, drafts=drafts: drafts  # type: ignore[attr-defined]
            outputs(simulated, SamplingParams(max_tokens=20), [1, 2, 3])
            seconds.append(simulated.counters.device_seconds)
    assert 3 < seconds[1] / seconds[0] < 4, "up to three passes as long as the step, fewer near the end"
    assert 1.5 < seconds[2] / seconds[0] < 2.1, "one pass"


@pytest.mark.parametrize(("launch_us", "bound_by_host"), [(0, False), (500, True)])
def test_a_draft_model_that_catches_up_takes_the_time_of_its_chunks(launch_us: int, bound_by_host: bool) -> None:
    model = ("spec_decode=draft_model", "model@spec_decode.model=llama3_8b", "executor.acceptance=0", "cost=h200")
    model += (f"cost.launch_us={launch_us}",)
    seconds = []
    chunks = [CatchUp(0, 0, 700), CatchUp(1, 50, 100)]
    with engine(*model) as simulated:
        cost = simulated.cost
        assert cost is not None
        works = [RowWork(700, 700, 0), RowWork(100, 150, 0)]
        expected = 32 * 8 * 500e-6 if bound_by_host else cost.follow_seconds(works)
        assert cost.catch_up_seconds(works) == pytest.approx(expected) and not cost.catch_up_seconds([])
        for step, catch_up in enumerate(([], chunks)):
            plan = StepPlan(step, [], catch_up=catch_up)
            plan.joins = [] if catch_up else [Join(0, 1, 0, 0), Join(1, 2, 0, 0)]
            request = Request(uid=1, prompt_ids=(1, 2), params=SamplingParams())
            blob = JoinBlob((1, 2), request, 0, -1)
            simulated.executor.submit(plan, {(1, 0): blob, (2, 0): blob})
            seconds.append(simulated.executor.collect().device_seconds)
    assert seconds[1] - seconds[0] == pytest.approx(expected) and expected > 1e-3


def test_drafts_are_refused() -> None:
    refused = "requires spec_decode with drafts false.*Would work: spec_decode=none"
    with pytest.raises(CapabilityError, match=refused), engine("spec_decode=ngram"):
        pass


# executor.clock=virtual

VIRTUAL = (
    "app=bench",
    "executor=simulated",
    "executor.clock=virtual",
    "model=llama3_8b",
    "cost=h200",
    "bench.warmup=0",
)


def bench(tmp_path: Path, *words: str) -> dict[str, Any]:
    """Return the figures of one run."""
    out = tmp_path / "bench.json"
    assert main([*VIRTUAL, "bench.one_token_run=false", f"bench.out={out}", *words]) == 0
    (load,) = json.loads(out.read_text())["results"][0]["loads"]
    (run,) = load["runs"]
    return run  # type: ignore[no-any-return]


def test_a_step_begins_once_its_launch_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one plan in flight, the device waits 3 ms for the host before each of 8 steps."""
    words = (
        "engine.depth=1",
        "engine.max_len=256",
        "workload=fixed",
        "workload.requests=1",
        "workload.output_tokens=8",
    )
    plain = bench(tmp_path, *words)
    monkeypatch.setattr(Roofline, "launch_seconds", lambda self, plan: 0.003)
    slower = bench(tmp_path, *words)
    assert slower["seconds"] - plain["seconds"] == pytest.approx(8 * 0.003, abs=1e-5)
    assert slower["host_ms_per_step"]["submit"] == 3.0 and plain["host_ms_per_step"]["submit"] == 0.0


@pytest.mark.parametrize("depth", [1, 2])
def test_virtual_time_is_that_of_the_steps(tmp_path: Path, depth: int) -> None:
    """A minute of steps of 0.5 s takes a moment. The host takes none of that time."""
    began = time.perf_counter()
    words = ("cost.step_us=500000", "cost.kernel_us=0", "workload.output_tokens=100", f"engine.depth={depth}")
    run = bench(tmp_path, *words)
    assert time.perf_counter() - began < 30
    assert 0.5 * run["steps"] < run["seconds"] < 0.51 * run["steps"] and run["device_idle"] == 0.0
    assert run["seconds"] == pytest.approx(run["steps"] * run["device_ms_per_step"] / 1e3, rel=1e-3)
    assert run["host_ms_per_step"]["schedule"] == 0.0


def test_virtual_time_repeats_to_the_bit_and_waits_for_arrivals(tmp_path: Path) -> None:
    words = (
        "workload=poisson",
        "workload.rates=[0.5]",
        "workload.seconds=32",
        "engine.depth=2",
        "engine.late_launch=true",
    )
    first, again = bench(tmp_path, *words), bench(tmp_path, *words)
    assert first == again
    assert first["seconds"] > 15 and first["device_idle"] < 0.2, "idle time without requests is not the host's"
    assert first["ttft_ms"]["max"] < 100


def test_virtual_time_reaches_arrivals_of_every_run(tmp_path: Path) -> None:
    """The clock of a further run does not begin at 0, so arrivals are sums that round."""
    words = ("workload=poisson", "workload.rates=[3.3,7.7]", "workload.seconds=8", "engine.depth=2", "bench.runs=2")
    out = tmp_path / "bench.json"
    late = ("engine.late_launch=true", "workload.output_tokens=2", f"bench.out={out}")
    assert main([*VIRTUAL, *words, *late]) == 0
    (result,) = json.loads(out.read_text())["results"]
    runs = [run for load in result["loads"] for run in load["runs"]]
    assert len(runs) == 4 and all(5 < run["seconds"] < 15 and not run["failed"] for run in runs)


def test_replicas_run_in_virtual_time_under_a_router(tmp_path: Path) -> None:
    load = ("workload.requests=32", "workload.output_tokens=64", "engine.max_seqs=8")
    one = bench(tmp_path, *load)
    two = bench(tmp_path, *load, "engine.dp=2", "router=least_loaded")
    assert [replica["requests"] for replica in two["replicas"]] == [16, 16]
    assert two["seconds"] == pytest.approx(one["seconds"] / 2, rel=0.15)
    assert two["output_tokens"] == one["output_tokens"] == sum(r["output_tokens"] for r in two["replicas"])


def test_virtual_time_is_refused_where_clients_wait(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["app=generate", *VIRTUAL[1:3], "cost=h200"]) == 2
    error = capsys.readouterr().err
    assert "executor.clock=virtual" in error and "executor.clock=real" in error
