"""Prompt lookup on the device against a plain search through lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail import LLM, SamplingParams
from dovetail.core.interfaces import Drafter
from dovetail.plugins.spec_decode.config import NgramConfig
from dovetail.plugins.spec_decode.lookup import look_up_reference


def by_hand(tokens: list[int], config: NgramConfig) -> list[int]:
    best = (0, -1)
    for end in range(len(tokens) - 1):
        match = 0
        while match < config.max_match and match <= end and tokens[end - match] == tokens[len(tokens) - 1 - match]:
            match += 1
        best = max(best, (match, end))
    match, end = best
    if match < config.min_match:
        return []
    follow = tokens[end + 1 :]
    return [follow[i % len(follow)] for i in range(config.lookahead)]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=25), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (2, 4), (3, 3), (1, 4)]),
    st.integers(1, 5),
)
def test_it_finds_the_longest_then_latest_match(rows: list[list[int]], matches: tuple[int, int], k: int) -> None:
    config = NgramConfig(lookahead=k, min_match=matches[0], max_match=matches[1])
    slots = torch.randperm(8)[: len(rows)]
    tokens = torch.randint(0, 4, (8, 32), dtype=torch.int32)
    for slot, row in zip(slots.tolist(), rows, strict=True):
        tokens[slot, : len(row)] = torch.tensor(row, dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in rows])
    drafts, counts = look_up_reference(slots, lengths, tokens, k, *matches, float(k))
    for i, row in enumerate(rows):
        assert drafts[i, : counts[i]].tolist() == by_hand(row, config)


def test_a_sequence_that_leaves_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of `Drafter.leave` cost a launch, so a drafter that does not override it is not called."""

    def leave(self: Drafter, slot: int, tokens_L: torch.Tensor, length: torch.Tensor) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(Drafter, "leave", leave)
    small = ["engine.device=cpu", "engine.max_len=32", "engine.max_seqs=1", "spec_decode=ngram"]
    with LLM("tiny", overrides=small) as llm:
        found = llm.generate(["a", "b"], SamplingParams(max_tokens=2, ignore_eos=True))
    assert [len(generation.token_ids) for generation in found] == [2, 2]
