"""Lanes, replicas that share routed experts, give the tokens of one engine with all experts. In CI the lanes are
threads of one process; .ci/nightly also runs 200 random schedules, processes, and lanes of several ranks."""

from __future__ import annotations

import os
import random

import pytest
from lane_threads import Done, Work, alone, lanes

from dovetail import SamplingParams
from dovetail.core.interfaces import StepShape
from dovetail.core.parallel.channel import ChannelClosed
from dovetail.core.parallel.lanes import LaneBoard, Lanes

NIGHTLY = "DOVETAIL_RANKS" in os.environ
MOE = ("model=small_moe", "engine.max_seqs=4")
LATENTS = (
    *("model=deepseek_v2_lite", "model.load=dummy", "engine.max_seqs=4", "engine.dtype=float32"),
    *(f"model.hf.{option}" for option in ("vocab_size=512", "hidden_size=64", "intermediate_size=96")),
    *(f"model.hf.{option}" for option in ("num_hidden_layers=3", "num_attention_heads=4", "num_key_value_heads=4")),
    *(f"model.hf.{option}" for option in ("kv_lora_rank=24", "qk_nope_head_dim=12", "qk_rope_head_dim=8")),
    *(f"model.hf.{option}" for option in ("v_head_dim=10", "n_routed_experts=8", "num_experts_per_tok=3")),
    "model.hf.moe_intermediate_size=48",
)


def greedy(number: int, prompt: list[int], tokens: int, **when: int) -> Work:
    return Work(number, prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), **when)


def schedule(seed: int, count: int) -> list[list[Work]]:
    """Return a random script for each lane: requests that come at any time, and some that are aborted."""
    draw = random.Random(seed)
    scripts: list[list[Work]] = [[] for _ in range(count)]
    for number in range(draw.randint(1, 4 * count)):
        prompt = [draw.randrange(500)] * draw.randint(1, 40)
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.8)), seed=number, max_tokens=draw.randint(1, 24), ignore_eos=True
        )
        aborted = draw.randint(0, 12) if draw.random() < 0.2 else None
        # A lane may stay without work, or have all of it.
        lane = min(draw.randrange(count + 1), count - 1)
        scripts[lane].append(Work(number, prompt, params, draw.randint(0, 40), aborted))
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
    """Some schedules, one lane without any work, pages that run out, and lanes that sleep in between."""
    options = (*MOE, "engine.kv_pages=9", "engine.depth=2")
    idle = [[greedy(0, [7, 300, 21, 4], 20), greedy(1, [9] * 40, 5, after=2)], []]
    short = [[greedy(n, [n] * 20, 30) for n in range(4)], [greedy(9, [5, 6], 40, after=3)]]
    with lanes(2, *options, "experts=gather", "engine.ep=2") as run:
        found = run(idle)
        assert found[1].empty > 10, "the lane without work serves its experts"
        check(found, idle, *MOE)
        found = run(short)
        assert found[0].preemptions, "the pages suffice, so nothing is preempted"
        check(found, short, *MOE)
        for seed in range(3):
            scripts = schedule(seed, 2)
            check(run(scripts), scripts, *MOE)


def test_drafts_up_to_the_longest_sequence() -> None:
    """Lanes verify unlike numbers of drafts, and one of them reaches engine.max_len."""
    options = (*MOE, "spec_decode=ngram", "engine.drafts=always")
    scripts = [[greedy(0, [3, 4, 5, 6] * 8, 40)], [greedy(1, [1, 2, 3], 9), greedy(2, [8, 9] * 15, 40, after=4)]]
    with lanes(2, *options, "experts=all_to_all", "experts.capacity=0.3", "engine.ep=2") as run:
        found = run(scripts)
    assert max(map(len, found[0].tokens.values())) == 32, "64 tokens less the prompt's 32"
    assert sum(done.accepted for done in found) > 0
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


@pytest.mark.skipif(not NIGHTLY, reason="DOVETAIL_RANKS is not set")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("model", [MOE, LATENTS], ids=["small_moe", "latents"])
@pytest.mark.parametrize("placement", ["gather", "all_to_all"])
def test_random_schedules(placement: str, model: tuple[str, ...], count: int) -> None:
    """25 for each choice, so 200 together."""
    with lanes(count, *model, f"experts={placement}", f"engine.ep={count}", "engine.kv_pages=12") as run:
        for seed in range(25):
            scripts = schedule(1000 * count + seed, count)
            check(run(scripts), scripts, *model)
