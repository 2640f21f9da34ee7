"""Part of the contract suite for KV allocators: prefixes that several sequences share, forks and trims."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import Hit, KVAllocator, PageOpKind, Reservation
from dovetail.core.testing.kv_model import LAYOUTS, Layout, TokenSequence, owned_pages, reserve, sequence, write

each_layout = pytest.mark.parametrize("layout", tuple(LAYOUTS.values()), ids=tuple(LAYOUTS))


class SharingTests:
    """Tests that KVAllocatorContract inherits. It has the meaning and defaults of the settings."""

    reuses: bool
    contiguous: bool

    def _make(self, layout: Layout) -> KVAllocator:
        raise NotImplementedError

    # Reuse

    @each_layout
    def test_a_published_prefix_is_found(self, layout: Layout) -> None:
        kv, first = self._make(layout), sequence(1, 2 * layout.stride)
        mine = write(kv, first)
        second = sequence(2, 2 * layout.stride + 1)
        found = kv.peek(second)
        hit = kv.acquire(second)
        assert hit.tokens == found, f"peek returned {found}, acquire found {hit.tokens} tokens"
        assert found == (2 * layout.stride if self.reuses else 0), "tokens found of a published prefix"
        assert owned_pages(hit) == (mine if self.reuses else {}), "a hit must name the pages that were published"
        kv.check()

    @each_layout
    def test_a_released_prefix_is_found(self, layout: Layout) -> None:
        kv, first, second = self._make(layout), sequence(1, 2 * layout.stride), sequence(2, 2 * layout.stride + 1)
        write(kv, first)
        kv.release(first)
        assert bool(kv.stats().cached) == self.reuses, f"pages cached after release, with reuses = {self.reuses}"
        hit = kv.acquire(second)
        assert hit.tokens == (2 * layout.stride if self.reuses else 0), "tokens found of a released prefix"
        for group in layout.groups if hit.tokens else ():
            indices = [index for group_id, index, _ in hit.entries if group_id == group.id]
            assert indices == list(range(hit.tokens // group.page_tokens)), f"group {group.id}: table indices of a hit"
        kv.check()

    @each_layout
    def test_a_hit_leaves_one_token_to_feed(self, layout: Layout) -> None:
        kv, first, second = self._make(layout), sequence(1, 2 * layout.stride), sequence(2, 2 * layout.stride)
        write(kv, first)
        assert kv.peek(second) < len(second.tokens), "peek must leave one token to feed"
        assert kv.acquire(second).tokens < len(second.tokens), "acquire must leave one token to feed"

    @each_layout
    def test_peek_is_pure(self, layout: Layout) -> None:
        kv, first, second = self._make(layout), sequence(1, 2 * layout.stride), sequence(2, 2 * layout.stride + 1)
        write(kv, first)
        kv.release(first)
        before = kv.stats()
        found = [kv.peek(second) for _ in range(3)]
        assert kv.stats() == before, "peek must change nothing"
        assert found == [kv.acquire(second).tokens] * 3, "every peek must return the tokens that acquire then finds"

    @each_layout
    def test_nothing_is_found_before_publish(self, layout: Layout) -> None:
        kv, first, second = self._make(layout), sequence(1, 2 * layout.stride), sequence(2, 2 * layout.stride + 1)
        kv.acquire(first)
        reserve(kv, first, len(first.tokens))
        assert kv.acquire(second).tokens == 0, "acquire found pages that were reserved but not published"

    @each_layout
    def test_nothing_is_found_without_reuse(self, layout: Layout) -> None:
        kv, first, second = self._make(layout), sequence(1, 2 * layout.stride), sequence(2, 2 * layout.stride + 1)
        write(kv, first)
        assert kv.acquire(second, reuse=False) == Hit(), "acquire(reuse=False) must return an empty Hit"

    @each_layout
    def test_salt_separates(self, layout: Layout) -> None:
        kv, first = self._make(layout), sequence(1, 2 * layout.stride)
        second = sequence(2, 2 * layout.stride + 1, salt="other")
        write(kv, first)
        assert kv.peek(second) == 0, "peek found a prefix with another salt"
        assert kv.acquire(second) == Hit(), "acquire found a prefix with another salt"

    @each_layout
    def test_equal_pages_after_different_ones_are_not_found(self, layout: Layout) -> None:
        kv, first, second = self._make(layout), sequence(1, 2 * layout.stride), sequence(2, layout.stride, first=1000)
        write(kv, first)
        write(kv, second)
        mixed = TokenSequence(3, second.tokens + first.tokens[layout.stride :] + [0])
        assert kv.acquire(mixed).tokens <= layout.stride, "a page was reused although the tokens before it differ"

    @each_layout
    def test_cached_pages_make_room(self, layout: Layout) -> None:
        kv, first, second = self._make(layout), sequence(1, layout.capacity), sequence(2, layout.capacity, first=1000)
        write(kv, first)
        kv.release(first)
        kv.acquire(second)
        reserve(kv, second, layout.capacity)
        kv.check()

    @each_layout
    def test_owned_pages_are_never_evicted(self, layout: Layout) -> None:
        kv = self._make(layout)
        first, second, third = sequence(1, layout.stride), sequence(2, layout.stride + 1), sequence(3, 1)
        mine = write(kv, first)
        kv.acquire(second)
        kv.release(first)
        for tokens in range(layout.stride, layout.capacity + 1, layout.stride):
            made = kv.reserve(third, tokens)
            if made is None:
                break
            taken = owned_pages(made)
            evicted = self.reuses and any(set(mine[group]) & set(taken.get(group, ())) for group in mine)
            assert not evicted, f"reserve gave {taken} of which another sequence owns some of {mine}"
        kv.check()

    @each_layout
    def test_reset_forgets_cached_pages_alone(self, layout: Layout) -> None:
        kv, first, second = self._make(layout), sequence(1, layout.stride), sequence(2, layout.stride, first=1000)
        write(kv, first)
        write(kv, second)
        kv.release(first)
        owned = kv.stats().owned
        try:
            kv.reset()
        except NotImplementedError:
            pytest.skip("reset is optional")
        assert (kv.stats().cached, kv.stats().owned) == (0, owned), "reset must free cached pages and no owned page"
        assert kv.peek(sequence(3, layout.stride + 1)) == 0, "peek found a prefix whose pages reset has freed"
        kv.check()

    @each_layout
    def test_allocators_share_no_state(self, layout: Layout) -> None:
        """Neither do their groups: the eviction policy of each has its own state."""
        alone = list(_turnover(self._make(layout), layout, 0))
        busy = _turnover(self._make(layout), layout, 5000)
        beside = []
        for outcome in _turnover(self._make(layout), layout, 0):
            next(busy, None)
            next(busy, None)
            beside.append(outcome)
        assert beside == alone, "calls on another allocator changed what this one does: is some state on a class?"

    # Forks and trims

    @each_layout
    def test_fork_shares_until_a_write(self, layout: Layout) -> None:
        for parent_first in (True, False):
            kv, parent, child = self._make(layout), sequence(1, layout.stride + 2), sequence(2, layout.stride + 2)
            mine = write(kv, parent)
            before = kv.stats().owned
            hit = kv.fork(parent, child, layout.stride + 1)
            got, expected = (hit.tokens, owned_pages(hit), hit.ops), (layout.stride + 1, mine, ())
            assert (*got, kv.stats().owned) == (*expected, before), "fork must share the parent's pages without a copy"
            writer, other = (parent, child) if parent_first else (child, parent)
            moved = reserve(kv, writer, layout.stride + 3)
            first = {group: 0 if self.contiguous else len(pages) - 1 for group, pages in mine.items()}
            copied = [(group, index) for group, pages in mine.items() for index in range(first[group], len(pages))]
            sources = [(PageOpKind.COPY, group, mine[group][index]) for group, index in copied]
            assert [op[:3] for op in moved.ops] == sources, "the first writer must copy each shared page it writes"
            entries = tuple((group, index, op.dst) for (group, index), op in zip(copied, moved.ops, strict=True))
            assert moved.entries == entries, "the writer's table must name the copies"
            assert reserve(kv, other, layout.stride + 3) == Reservation(), "the other sequence now owns its page alone"
            kv.check()

    @each_layout
    def test_a_fork_at_a_page_boundary_copies_nothing(self, layout: Layout) -> None:
        kv, parent, child = self._make(layout), sequence(1, layout.stride), sequence(2, layout.stride)
        write(kv, parent)
        kv.fork(parent, child, layout.stride)
        if self.contiguous:
            pytest.skip("contiguous = True: a run that grows is copied")
        for seq in (child, parent):
            ops = reserve(kv, seq, layout.stride + 1).ops
            assert not ops, f"only whole pages are shared, and nothing writes to them, but reserve copies: {ops}"

    @each_layout
    def test_a_fork_may_come_before_publish(self, layout: Layout) -> None:
        """With plans in flight the parent has reserved and written more than it has published."""
        kv, parent, child = self._make(layout), sequence(1, layout.stride + 2), sequence(2, layout.stride + 2)
        kv.acquire(parent)
        mine = owned_pages(reserve(kv, parent, 3 * layout.stride))
        shared = owned_pages(kv.fork(parent, child, layout.stride + 1))
        for group in layout.groups:
            expected = mine[group.id][: ceil_div(layout.stride + 1, group.page_tokens)]
            assert shared[group.id] == expected, f"group {group.id}: pages that fork shares"
        start = 0 if self.contiguous else -1
        copied = {(group, page) for group, pages in shared.items() for page in pages[start:]}
        ops = reserve(kv, child, layout.stride + 2).ops
        assert {(op.group, op.src) for op in ops} <= copied, "reserve must copy only shared pages that are written next"
        kv.check()

    @each_layout
    def test_a_fork_outlives_its_parent(self, layout: Layout) -> None:
        kv, parent, child = self._make(layout), sequence(1, layout.stride + 1), sequence(2, layout.stride + 1)
        write(kv, parent)
        kv.fork(parent, child, layout.stride + 1)
        owned = kv.stats().owned
        kv.release(parent)
        assert kv.stats().owned == owned, "the child must keep the shared pages when its parent is released"
        kv.release(child)
        assert kv.stats().owned == 0, "both sequences are released, but pages are owned"
        kv.check()

    @each_layout
    def test_trim_gives_back_pages_past_length(self, layout: Layout) -> None:
        kv, seq = self._make(layout), sequence(1, 1)
        reserve(kv, seq, layout.capacity)
        kv.trim(seq, layout.stride + 1)
        needed = sum(kv.pages_needed(layout.stride + 1).values())
        assert kv.stats().owned == needed, f"{needed} pages hold {layout.stride + 1} tokens; got {kv.stats()}"
        kv.trim(seq, layout.capacity)
        kv.check()
        again = {group: len(pages) for group, pages in owned_pages(reserve(kv, seq, 2 * layout.stride + 1)).items()}
        grown, kept = kv.pages_needed(2 * layout.stride + 1), kv.pages_needed(layout.stride + 1)
        missing = {group: grown[group] - kept[group] for group in grown if grown[group] > kept[group]}
        assert again == missing, "pages per group that reserve must add after trim"

    @each_layout
    def test_a_page_written_anew_after_trim_is_not_found(self, layout: Layout) -> None:
        kv, seq, other = self._make(layout), sequence(1, 2 * layout.stride), sequence(2, 2 * layout.stride + 1)
        write(kv, seq)
        kv.trim(seq, layout.stride + 1)
        del seq.tokens[layout.stride + 1 :]
        copied = {op.group for op in reserve(kv, seq, 2 * layout.stride).ops}
        # An allocator that copies the page first leaves the published one intact.
        intact = copied == {group.id for group in layout.groups}
        most = 2 * layout.stride if intact else layout.stride + 1
        assert kv.acquire(other).tokens <= most, "acquire found tokens that were trimmed and may be overwritten"


def _turnover(kv: KVAllocator, layout: Layout, first: int) -> Iterator[tuple[object, ...]]:
    """Fill the cache several times over, and use some prefixes again. Yield the outcome of each sequence."""
    pages = layout.capacity // layout.stride
    for uid in range(4 * pages):
        reused = uid % 3 == 2
        seq = sequence(uid, (1 + uid % 2) * layout.stride + 1, first=first + 100 * (uid - 2 * reused))
        hit = kv.acquire(seq)
        made = kv.reserve(seq, len(seq.tokens))
        if made is not None:
            kv.publish(seq, len(seq.tokens))
        kv.check()
        yield hit, made
        kv.release(seq)
        kv.check()
