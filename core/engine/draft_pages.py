"""Which KV pages lack the KV of the drafter's own layers, because it did not follow the steps that computed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.core.interfaces.plan import PageOpKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dovetail.core.interfaces import KVGroup, PageDelta, PageOp

_SIDES = {PageOpKind.COPY: (False, False), PageOpKind.LOAD: (True, False), PageOpKind.STORE: (False, True)}
"""Whether source and destination of an operation are pages of the host."""


class DraftPages:
    """Pages of one KV group, and of the host, that the drafter has not filled. Sequences share them as prefixes, so a
    sequence may find pages that hold the target's KV alone. A page counts as filled when the drafter has followed its
    sequence past the page's end."""

    def __init__(self, group: KVGroup, slots: int) -> None:
        """`group`: a group without a window; pages of all groups are shared together."""
        self._group, self._tokens = group.id, group.page_tokens
        self._pages: list[dict[int, int]] = [{} for _ in range(slots)]
        """Index -> page, by slot."""
        self._filled = [0] * slots
        """Number of leading pages that count as filled, by slot."""
        self._lacking: set[tuple[bool, int]] = set()
        """(whether it is a page of the host, page)"""

    def copy(self, ops: Iterable[PageOp]) -> None:
        """Note copies of pages, in their order."""
        for kind, group, src, dst in ops:
            if group == self._group:
                of_host, to_host = _SIDES[PageOpKind(kind)]
                found = (of_host, src) in self._lacking
                (self._lacking.add if found else self._lacking.discard)((to_host, dst))

    def leave(self, slot: int) -> None:
        self._pages[slot].clear()
        self._filled[slot] = 0

    def take(self, deltas: Iterable[PageDelta], computed: Mapping[int, int]) -> set[int]:
        """Note new entries of page tables. `computed`: tokens in the given pages of sequences that join, by slot.
        Return the slots with new pages."""
        grown = set()
        for group, slot, index, page in deltas:
            if group != self._group:
                continue
            self._pages[slot][index] = page
            # A sequence that joins may find tokens in this page.
            if index * self._tokens >= computed.get(slot, 0):
                self._lacking.add((False, page))
                self._filled[slot] = min(self._filled[slot], index)
                grown.add(slot)
        return grown

    def known(self, slot: int, computed: int) -> int:
        """Return how many of the first `computed` tokens of a joining sequence are in filled pages. Called once, after
        `take`."""
        pages, (full, rest) = self._pages[slot], divmod(computed, self._tokens)
        given = ((index, pages.get(index, 0)) for index in range(full + (rest > 0)))
        known = next((index * self._tokens for index, page in given if (False, page) in self._lacking), computed)
        self._filled[slot] = known // self._tokens
        if rest and full in pages:
            # The sequence writes the rest of this page.
            self._lacking.add((False, pages[full]))
        return known

    def fill(self, slot: int, tokens: int) -> None:
        """Note that the drafter's pages of this slot hold its first `tokens` tokens."""
        pages, full = self._pages[slot], tokens // self._tokens
        for index in range(self._filled[slot], full):
            self._lacking.discard((False, pages.get(index, 0)))
        self._filled[slot] = max(self._filled[slot], full)
