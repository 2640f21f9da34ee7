"""Experts that move between ranks beside drafts, adapters and lanes give the tokens of one engine, and a rank that ends
or stops during a move ends all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from lane_threads import Work, alone, lanes

from dovetail import LLM, SamplingParams
from dovetail.core.errors import EngineStopped
from dovetail.plugins.executor.multiproc import MultiprocExecutor

pytestmark = pytest.mark.nightly
PROMPTS = [[7, 300, 21, 4], [9] * 40, [500, 2, 77]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
RANKS = ("experts=whole", "executor=multiproc", "engine.tp=2")
MOVING = ("experts.redundant=2", "experts.rebalance=1")
MTP = ("spec_decode=mtp", "spec_decode.lookahead=2", "engine.drafts=always")


def greedy(count: int = 3, first: int = 0) -> list[Work]:
    return [Work(first + n, PROMPTS[n], GREEDY, after=n) for n in range(count)]


@pytest.mark.parametrize(("where", "message"), [
    ("before", "rank 1 was killed by SIGKILL"),
    ("after", "rank 1 was killed by SIGKILL"),
    ("stop", "rank 1 does not answer, stopped by a signal"),
])  # fmt: skip
def test_a_rank_that_ends_during_a_move_ends_all(where, message, monkeypatch, gone: Callable[[int], bool]) -> None:
    """The other rank waits for it in the broadcast of an expert."""
    monkeypatch.setenv("MOVE_ENDS", where)
    monkeypatch.setattr(MultiprocExecutor, "loader", "ending_moves:load")
    base = ("engine.device=cpu", "engine.kv_pages=64", "engine.max_len=256", "collective.timeout=8")
    with LLM(overrides=["model=small_moe", *base, *RANKS, *MOVING]) as llm:
        (pid,) = llm.engine.executor.worker_pids  # type: ignore[union-attr]
        with pytest.raises(EngineStopped, match=message):
            llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    assert gone(pid)


@pytest.mark.parametrize("placement", ["whole", "gather", "all_to_all"])
def test_drafts_of_the_prediction_layer(placement: str) -> None:
    """The layer has experts of its own."""
    options = ("model=small_mtp", "engine.token_budget=32")
    ranks = (f"experts={placement}", "executor=multiproc", "engine.tp=2", "engine.depth=2")
    moving = alone(greedy(), *options, *MTP, *ranks, *MOVING)
    still = alone(greedy(), *options, *MTP, *ranks)
    assert moving.moved > 3 and not still.moved
    assert moving.tokens == still.tokens == alone(greedy(), *options).tokens
    assert moving.accepted == still.accepted, "drafts are the same, too"


@pytest.mark.parametrize("depth", [1, 2])
def test_lanes_with_drafts(depth: int) -> None:
    options = ("model=small_mtp", "engine.max_seqs=4")
    scripts = [greedy(2), greedy(1, first=9)]
    drafting = ("spec_decode=ngram", "spec_decode.min_match=1", "engine.drafts=always", f"engine.depth={depth}")
    with lanes(2, *options, *drafting, "experts=gather", "engine.ep=2", *MOVING) as run:
        found = run(scripts)
    assert found[0].moved == found[1].moved > 3
    assert sum(done.accepted for done in found) > 0
    expected = alone([*scripts[0], *scripts[1]], *options).tokens
    assert {uid: tokens for done in found for uid, tokens in done.tokens.items()} == expected


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """A LoRA on the attention of `small_moe`."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in range(3):
        for name, outputs in (("q_proj", 64), ("v_proj", 32)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora"
            tensors[f"{at}_A.weight"] = torch.randn(8, 64, generator=draw)
            tensors[f"{at}_B.weight"] = torch.randn(outputs, 8, generator=draw)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_adapters(adapter: str) -> None:
    def tokens(*overrides: str) -> list[list[list[int]]]:
        base = ("model=small_moe", "engine.device=cpu", "engine.kv_pages=64", "engine.max_len=64")
        load = ("adapter=lora", f"+adapter.load.a='{adapter}'")
        with LLM(overrides=[*base, *load, *overrides]) as llm:
            return [[g.token_ids for g in llm.generate(PROMPTS, GREEDY, adapter=name)] for name in ("a", "")]

    expected = tokens()
    assert expected[0] != expected[1], "an adapter without effect proves nothing"
    assert tokens(*RANKS, *MOVING) == tokens(*RANKS) == expected
