"""Suffix decoding on the device against a suffix automaton on the host."""

from __future__ import annotations

import random
from collections import deque
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail import LLM, RequestError, SamplingParams
from dovetail.core.interfaces import Request
from dovetail.plugins.app.serve.predicted_tokens import PredictedTokens
from dovetail.plugins.spec_decode.corpus import Corpus, CorpusWriter
from dovetail.plugins.spec_decode.lookup import look_up_reference


class SuffixAutomaton:
    """Automaton of a growing text (Blumer et al. 1985), with the end of the latest occurrence of each state's words."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.end = [-1], [0], [-1]
        self.whole = 0
        """State of the whole text."""
        self.match = (0, -1)
        """(length, end) of the longest suffix that occurs earlier, at its latest earlier occurrence."""

    def append(self, token: int) -> None:
        at, new = self.whole, self._add({}, self.length[self.whole] + 1, -1)
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = new
            at = self.link[at]
        if at < 0:
            self.link[new] = 0
        else:
            after = self.next[at][token]
            if self.length[after] > self.length[at] + 1:
                clone = self._add(dict(self.next[after]), self.length[at] + 1, self.link[after])
                self.end[clone] = self.end[after]
                while at >= 0 and self.next[at].get(token) == after:
                    self.next[at][token] = clone
                    at = self.link[at]
                self.link[after] = after = clone
            self.link[new] = after
        earlier = self.link[new]
        self.match = (self.length[earlier], self.end[earlier])
        self.whole = state = new
        while state > 0:
            self.end[state] = self.length[new] - 1
            state = self.link[state]

    def _add(self, following: dict[int, int], length: int, link: int) -> int:
        self.next.append(following)
        self.length.append(length)
        self.link.append(link)
        self.end.append(-1)
        return len(self.next) - 1


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from([0.5, 1.0, 2.5]),
)
def test_it_drafts_what_followed_the_longest_match(rows: list[list[int]], k: int, growth: float) -> None:
    tokens = torch.randint(0, 3, (8, 48), dtype=torch.int32)
    for slot, row in enumerate(rows):
        tokens[slot, : len(row)] = torch.tensor(row, dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in rows])
    drafts, counts = look_up_reference(torch.arange(len(rows)), lengths, tokens, k, 1, 64, growth)
    for i, row in enumerate(rows):
        automaton = SuffixAutomaton()
        for token in row:
            automaton.append(token)
        length, end = automaton.match
        assert counts[i] == min(k, int(length * growth))
        follow = row[end + 1 :]
        assert drafts[i, : counts[i]].tolist() == [follow[n % len(follow)] for n in range(counts[i])]


# Predictions, and the ring of earlier outputs.

LEAD = 16


def match(text: list[int], row: list[int]) -> int:
    """Length of the longest end of the row, up to LEAD tokens, that is in the text with a token behind it or at its
    end."""
    return max(n for n in range(min(LEAD, len(row)) + 1) if not n or tuple(row[-n:]) in ends(text, n))


def ends(text: list[int], n: int) -> set[tuple[int, ...]]:
    return {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}


@pytest.mark.parametrize("seed", range(4))
def test_the_corpus_is_what_a_host_would_keep(seed: int) -> None:
    """Sequences of three owners come and go; the ring has the newest outputs. Matches are found in the row's text (by
    the automaton), its prediction and the outputs of its owner, and the draft is what followed one of them."""
    rng, slots, ring = random.Random(seed), 3, 61
    target: Any = SimpleNamespace(build=SimpleNamespace(device=torch.device("cpu")), max_seqs=slots, max_len=64)
    corpus = Corpus.allocate(target, ring=ring, prediction=20, lead=LEAD)
    writer = CorpusWriter(corpus, target)
    tokens_SL = torch.zeros(slots + 1, 64, dtype=torch.int32)
    kept: deque[tuple[str, list[int]]] = deque()
    found = set()
    for step in range(60):
        slot, salt = step % slots, f"owner {rng.randrange(3)}"
        prompt, output, predicted = ([rng.randrange(3) for _ in range(rng.randint(1, n))] for n in (12, 30, 25))
        params = SamplingParams(prediction=tuple(predicted if rng.random() < 0.5 else ()))
        writer.enter(slot, Request(step, tuple(prompt), params, cache_salt=salt))
        row = prompt + output
        tokens_SL[slot, : len(row)] = torch.tensor(row, dtype=torch.int32)
        drafts, counts = look_up_reference(
            torch.tensor([slot]), torch.tensor([len(row)]), tokens_SL, 4, 1, LEAD, 0.5, corpus
        )
        automaton = SuffixAutomaton()
        for token in row:
            automaton.append(token)
        behind = prompt[-LEAD:] + list(params.prediction[:20]) if params.prediction else []
        own = min(automaton.match[0], LEAD)
        # A match must end where the prediction begins or later.
        hit = max((n for n in range(1, LEAD + 1) if tuple(row[-n:]) in late_ends(behind, n, prompt)), default=0)
        mine = [text for owner, text in kept if owner == salt]
        others = max((match(text, row) for text in mine), default=0)
        longest = max(own, hit, others)
        assert counts.tolist() == [min(4, longest // 2)]
        # -1 ends a draft.
        draft = list(takewhile(lambda token: token >= 0, drafts[0, : counts[0]].tolist()))
        source = "prediction" if hit >= max(own, others) else "own" if own >= others else "ring"
        if draft and source == "ring":
            assert any(tuple(row[-longest:] + draft) in ends(text, longest + len(draft)) for text in mine)
            found.add(source)
        if draft and source == "prediction":
            assert tuple(row[-hit:] + draft) in ends(behind, hit + len(draft))
            found.add(source)
        writer.leave(slot, tokens_SL[slot], torch.tensor(len(row)))
        kept.append((salt, output))
        while sum(len(text) + 1 for _, text in kept) > ring:
            cut = sum(len(text) + 1 for _, text in kept) - ring
            owner, oldest = kept.popleft()
            if cut < len(oldest):
                kept.appendleft((owner, oldest[cut:]))
                break
    assert found == {"prediction", "ring"}


def late_ends(text: list[int], n: int, prompt: list[int]) -> set[tuple[int, ...]]:
    """Return the runs of n tokens that end at the prompt's end or later."""
    first = min(len(prompt), LEAD)
    return {tuple(text[end - n : end]) for end in range(max(first, n), len(text) + 1)} if text else set()


def test_an_engine_drafts_from_predictions_and_earlier_outputs() -> None:
    """The text is that of plain decoding, in fewer steps; another cache_salt does not see the output."""
    prompt, params = "import os\n", SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)
    overrides = ["engine.device=cpu", "engine.kv_pages=64", "kv_cache=paged"]
    with LLM("tiny", overrides=overrides) as plain:
        expected = plain.generate(prompt, params)[0].token_ids
    with LLM("tiny", overrides=[*overrides, "spec_decode=suffix"]) as llm:

        def accepted(salt: str, prediction: tuple[int, ...] = ()) -> int:
            before = llm.engine.counters.accepted
            (result,) = llm.generate(prompt, params.model_copy(update={"prediction": prediction}), cache_salt=salt)
            assert result.token_ids == expected
            return llm.engine.counters.accepted - before

        alone = accepted("a")
        assert accepted("b") == alone, "other salts do not see the output"
        assert accepted("a") > 20, "an earlier output with the same salt"
        assert accepted("c", tuple(expected)) > 25 > alone, "a prediction, from its first token on"
        with pytest.raises(RequestError, match="prediction: token id 4096"):
            llm.generate(prompt, params.model_copy(update={"prediction": (4096,)}))


@pytest.mark.parametrize(
    ("output", "accepted"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], 8),
        ([1, 2, 9, 9, 5, 6, 7, 8], 6),
        ([1, 2, 9, 3, 4, 5, 6, 7, 8], 8),
        ([4, 5, 6, 7, 8], 5),
        ([8, 7, 6, 5, 4], 0),
        ([], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4], 8),
    ],
)
def test_tokens_of_a_prediction_are_counted(output: list[int], accepted: int) -> None:
    predicted = PredictedTokens(range(1, 9))
    for token in output:
        predicted.add(0, (token,))
    assert predicted.accepted == accepted
    assert predicted.rejected == (8 - accepted if output else 0)
