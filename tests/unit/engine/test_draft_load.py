"""Latency with a drafter on the simulated H200, in virtual time: useless drafts cost nearly nothing, good ones pay."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dovetail.core.compose import compose
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.interfaces import SamplingParams

pytestmark = pytest.mark.nightly

SHAPES = (
    *(
        "app=generate",
        "executor=simulated",
        "executor.clock=virtual",
        "model=llama3_70b",
        "cost=h200",
        "quant=fp8",
        "engine.device=cuda",
    ),
    *("engine.depth=2", "engine.max_seqs=256", "engine.max_len=2048", "engine.tp=1", "kv_cache=paged"),
)
DRAFTERS = {
    "none": (),
    "ngram": ("spec_decode=ngram",),
    "draft_model": ("spec_decode=draft_model", "model@spec_decode.model=llama3_8b"),
    "eagle3": ("spec_decode=eagle3_llama3_8b",),
}
TARGETS = {"eagle3": ("model=llama3_8b",)}


class Latency(NamedTuple):
    ttft: float
    tpot: float
    """Means, seconds."""


def serve(engine: Engine, rows: int, tokens: int) -> Latency:
    """Keep `rows` requests running, each with a prompt of 300 tokens, until each slot has served two."""
    params, clock = SamplingParams(max_tokens=tokens), engine.executor.clock.now
    left, added, first, ended = rows, {}, {}, {}

    def add() -> None:
        added[engine.add([len(added) % 1000] * 300, params)[0].uid] = clock()

    for _ in range(rows):
        add()
    while engine.has_work:
        for event in engine.step():
            if event.tokens:
                first.setdefault(event.uid, clock())
            if event.reason is not None:
                ended[event.uid] = clock()
                if left:
                    left -= 1
                    add()
    ttft = sum(first[uid] - added[uid] for uid in added) / len(added)
    tpot = sum(ended[uid] - first[uid] for uid in added) / len(added) / (tokens - 1)
    return Latency(ttft, tpot)


def measured(drafter: str, rows: int, acceptance: float, *more: str) -> Latency:
    words = [*SHAPES, *DRAFTERS[drafter], *more]
    if drafter != "none":
        words.append(f"executor.acceptance={acceptance}")
    engine = start_engine(compose(words))
    serve(engine, rows, max(600 // rows, 40))  # Drafting learns.
    latency = serve(engine, rows, max(800 // rows, 60))
    engine.shutdown()
    return latency


@pytest.mark.parametrize("rows", [1, 8, 64, 256])
@pytest.mark.parametrize("drafter", ["ngram", "draft_model", "eagle3"])
def test_useless_drafts_cost_at_most_two_percent(drafter: str, rows: int) -> None:
    plain, drafted = (measured(name, rows, 0.0, *TARGETS.get(drafter, ())) for name in ("none", drafter))
    assert drafted.tpot <= 1.02 * plain.tpot and drafted.ttft <= 1.02 * plain.ttft


@pytest.mark.parametrize(("rows", "gain"), [(1, 2.5), (64, 1.15)])
def test_good_drafts_are_used(rows: int, gain: float) -> None:
    plain, drafted = (measured(name, rows, 0.8) for name in ("none", "ngram"))
    all_of_them = measured("ngram", rows, 0.8, "engine.drafts=always")
    assert plain.tpot / drafted.tpot > gain and drafted.tpot < 1.05 * all_of_them.tpot
