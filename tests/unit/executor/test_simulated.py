"""executor=simulated: an engine runs without a device, at the speed of its cost model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dovetail.core.compose import compose
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import FinishReason, Grammar, RequestOptions, SamplingParams, SchedulerContext, StepPlan
from dovetail.core.tokenizer import Tokenizer

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
    seconds = []
    for words in ((), (*model, "engine.drafts=always", "spec_decode.lookahead=3")):
        with engine("cost=h200", "engine.depth=2", *words) as simulated:
            outputs(simulated, SamplingParams(max_tokens=20), [1, 2, 3])
            seconds.append(simulated.counters.device_seconds)
    assert 3 < seconds[1] / seconds[0] < 4, "up to three passes as long as the step, fewer near the end"


def test_drafts_are_refused() -> None:
    refused = "requires spec_decode with drafts false.*Would work: spec_decode=none"
    with pytest.raises(CapabilityError, match=refused), engine("spec_decode=ngram"):
        pass
