"""Suffix decoding on the device against a suffix automaton on the host."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

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
