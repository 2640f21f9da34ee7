"""Lanes, replicas that share routed experts, give the tokens of one engine with all experts. In CI the lanes are
threads of one process; .ci/nightly also runs 300 random schedules, processes, and lanes of several ranks."""

from __future__ import annotations

import os
import random

import pytest
from lane_threads import Done, Work, alone, lanes

from dovetail import SamplingParams
from dovetail.core.engine.engine import Engine
from dovetail.core.interfaces import CatchUp, StepPlan, StepShape
from dovetail.core.interfaces.plan import RowFlag
from dovetail.core.parallel.channel import ChannelClosed
from dovetail.core.parallel.lanes import LaneBoard, Lanes

MOE = ("model=small_moe", "engine.max_seqs=4")
LATENTS = (
    *("model=deepseek_v2_lite", "model.load=dummy", "engine.max_seqs=4", "engine.dtype=float32"),
    *(f"model.hf.{option}" for option in ("vocab_size=512", "hidden_size=64", "intermediate_size=96")),
    *(f"model.hf.{option}" for option in ("num_hidden_layers=3", "num_attention_heads=4", "num_key_value_heads=4")),
    *(f"model.hf.{option}" for option in ("kv_lora_rank=24", "qk_nope_head_dim=12", "qk_rope_head_dim=8")),
    *(f"model.hf.{option}" for option in ("v_head_dim=10", "n_routed_experts=8", "num_experts_per_tok=3")),
    *(f"model.hf.{option}" for option in ("moe_intermediate_size=48", "bos_token_id=0", "eos_token_id=511")),
)


def greedy(number: int, prompt: list[int], tokens: int, **when: int) -> Work:
    return Work(number, prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), **when)


def schedule(seed: int, count: int) -> list[list[Work]]:
    """Return a random script for each lane: requests that come at any time, and some that are aborted."""
    draw = random.Random(seed)
    scripts: list[list[Work]] = [[] for _ in range(count)]
    for number in range(100 * seed, 100 * seed + draw.randint(1, 4 * count)):
        prompt = [draw.randrange(500)] * draw.randint(1, 40)
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.8)), seed=number, max_tokens=draw.randint(1, 16), ignore_eos=True
        )
        aborted = draw.randint(0, 12) if draw.random() < 0.2 else None
        # A lane may stay without work, or have all of it.
        lane = min(draw.randrange(count + 1), count - 1)
        scripts[lane].append(Work(number, prompt, params, draw.randint(0, 25), aborted))
    return scripts


def check(found: list[Done], scripts: list[list[Work]], *overrides: str) -> None:
    """Compare with one engine; an aborted request has a beginning of its tokens."""
    whole = [Work(work.number, work.prompt, work.params) for script in scripts for work in script]
    expected = alone(whole, *overrides).tokens
    cut = {work.number << 8 for script in scripts for work in script if work.aborted_after is not None}
    got = {uid: tokens for done in found for uid, tokens in done.tokens.items()}
    assert got.keys() | cut >= expected.keys()
    for uid, tokens in got.items():
        assert tokens == (expected[uid][: len(tokens)] if uid in cut else expected[uid]), f"uid {uid}"


def test_lanes_equal_one_engine() -> None:
    """One lane without any work, pages that run out, random schedules, and lanes that sleep in between."""
    options = (*MOE, "engine.kv_pages=6", "engine.depth=2")
    idle = [[greedy(1, [7, 300, 21, 4], 10), greedy(2, [9] * 40, 5, after=2)], []]
    short = [[greedy(10 + n, [n] * 20, 14) for n in range(3)], [greedy(20, [5, 6], 12, after=3)]]
    every = [idle, short, schedule(1, 2), schedule(2, 2)]
    with lanes(2, *options, "experts=gather", "engine.ep=2") as run:
        found = [run(scripts) for scripts in every]
    assert found[0][1].empty > 8, "the lane without work serves its experts"
    assert found[1][0].preemptions, "the pages suffice, so nothing is preempted"
    check([done for each in found for done in each], [script for scripts in every for script in scripts], *MOE)


def test_drafts_up_to_the_longest_sequence() -> None:
    """Lanes verify unlike numbers of drafts, and one of them reaches engine.max_len."""
    options = ("engine.max_len=32", "spec_decode=ngram", "engine.drafts=always")
    short = (*MOE, "engine.max_len=32")
    scripts = [[greedy(0, [3, 4, 5, 6] * 5, 40)], [greedy(1, [1, 2, 3], 9), greedy(2, [8, 9] * 8, 40, after=4)]]
    with lanes(2, *MOE, *options, "experts=all_to_all", "experts.capacity=0.3", "engine.ep=2") as run:
        found = run(scripts)
    assert max(map(len, found[0].tokens.values())) == 12, "32 tokens less the prompt's 20"
    assert sum(done.accepted for done in found) > 0
    check(found, scripts, *short)


DRAFTERS = {
    "mtp": ("spec_decode=mtp", "model=small_mtp", "engine.max_seqs=4", "engine.dtype=float32"),
    "draft_model": (*MOE, "spec_decode=draft_model", "model@spec_decode.model=small_moe"),
    "layer_skip": (*MOE, "spec_decode=layer_skip"),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_whose_experts_the_lanes_share(name: str) -> None:
    """Lanes draft in the same steps: one without work, one that feeds prompts, one that verifies nothing."""
    options = (*DRAFTERS[name], "experts=all_to_all", "experts.capacity=0.5", "engine.ep=2")
    plain = [option for option in DRAFTERS[name] if "spec_decode" not in option]
    idle = [[greedy(1, [7, 300, 21, 4], 10), greedy(2, [9] * 40, 5, after=2)], []]
    every = [idle, schedule(3, 2), schedule(4, 2)]
    with lanes(2, *options, "engine.drafts=always", "engine.kv_pages=12", "engine.depth=2") as run:
        found = [run(scripts) for scripts in every]
    assert found[0][1].empty > 2 and sum(done.accepted for each in found for done in each) > 0
    check([done for each in found for done in each], [script for scripts in every for script in scripts], *plain)


def test_a_drafter_of_one_lane_catches_up(monkeypatch) -> None:
    """The other lanes serve its experts, with rows of their own or without any."""
    launch = Engine._check

    def with_chunks(engine: Engine, plan: StepPlan, waits: bool) -> None:
        launch(engine, plan, waits)
        if engine._lanes is not None and engine._lanes.number == 0:
            plan.catch_up = [CatchUp(row.slot, 1, 5) for row in plan.rows if row.flags & RowFlag.DECODE]

    monkeypatch.setattr(Engine, "_check", with_chunks)
    scripts = [[greedy(1, [7, 300, 21, 4, 8, 8], 12), greedy(2, [9] * 20, 9)], [greedy(3, [5, 6], 6, after=2)]]
    with lanes(2, *DRAFTERS["draft_model"], "engine.drafts=always", "experts=gather", "engine.ep=2") as run:
        check(run(scripts), scripts, *MOE)


def test_experts_move_while_lanes_run() -> None:
    """Copies and moves of experts change no token; observers get the loads of the ranks."""
    scripts = [[greedy(1, [7, 300, 21, 4], 20), greedy(2, [9] * 40, 9, after=2)], [greedy(3, [5, 6], 12, after=3)]]
    moving = ("experts=all_to_all", "engine.ep=2", "experts.redundant=4", "experts.rebalance=2", "engine.depth=2")
    with lanes(2, *MOE, *moving) as run:
        found = run(scripts)
    assert found[0].moved == found[1].moved > 3
    loads = [pair for done in found for pair in done.loads]
    assert loads and all(greatest >= mean > 0 for greatest, mean in loads)
    check(found, scripts, *MOE)


def open_lanes(count: int) -> tuple[LaneBoard, list[Lanes]]:
    board = LaneBoard(count)
    made = []
    for number in range(count):
        order = board.order(number)
        given = {"fd": os.dup(order["fd"]), "alarm": os.dup(order["alarm"])}
        made.append(Lanes(**{**order, **given, "alarms": [os.dup(fd) for fd in order["alarms"]]}))
    return board, made


def test_the_end_of_the_lanes_ends_a_wait() -> None:
    board, (one, other) = open_lanes(2)
    assert not one.awake and not other.awake
    board.end()
    with pytest.raises(ChannelClosed):
        one.agree(StepShape.of(()), active=True)
    assert other.awake and board.late() == [1], "lane 0 has begun a round"
    for lane in (one, other):
        lane.close()
    board.close()


@pytest.mark.nightly
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("model", [MOE, LATENTS], ids=["small_moe", "latents"])
@pytest.mark.parametrize(
    "placement", ["gather", "all_to_all", "all_to_all experts.redundant=4 experts.rebalance=1 engine.depth=2"]
)
def test_random_schedules(placement: str, model: tuple[str, ...], count: int) -> None:
    """25 for each choice, so 300 together."""
    with lanes(count, *model, *f"experts={placement}".split(), f"engine.ep={count}", "engine.kv_pages=12") as run:
        for seed in range(25):
            scripts = schedule(1000 * count + seed, count)
            check(run(scripts), scripts, *model)
