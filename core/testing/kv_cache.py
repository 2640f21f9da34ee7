"""Contract suite for KV allocators. Authors subclass:

class TestMine(KVAllocatorContract):
    def make(self, groups, num_pages):
        return MyAllocator(MyConfig(), groups, num_pages)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import Hit, KVAllocator, KVGroup, PageOpKind, Reservation
from dovetail.core.testing.kv_machine import make_kv_state_machine
from dovetail.core.testing.kv_model import (
    LAYOUTS,
    SLIDING,
    Layout,
    TokenSequence,
    layout,
    live,
    owned_pages,
    reserve,
    sequence,
    write,
)
from dovetail.core.testing.suite import lines_run

__all__ = ["KVAllocatorContract", "make_kv_state_machine"]

each_sliding = pytest.mark.parametrize("layout", tuple(SLIDING.values()), ids=tuple(SLIDING))
each_layout = pytest.mark.parametrize("layout", tuple(LAYOUTS.values()), ids=tuple(LAYOUTS))


class KVAllocatorContract:
    """One test for each rule of dovetail.core.interfaces.KVAllocator."""

    reuses = True
    """Whether acquire finds prefixes that other sequences published. False: it must never find any."""
    contiguous = False
    """Whether a sequence's pages are consecutive. If so, reserve may move all of them, takes pages up to the
    sequence's limit, and fails when no free run is long enough."""
    slides = True
    """Whether pages behind a window are freed. False: a window group is treated like one without a window."""
    machine_settings = settings(
        max_examples=100,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        # Shrink one failure only. Several, each explained, take minutes.
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )

    def make(self, groups: Sequence[KVGroup], num_pages: Mapping[int, int]) -> KVAllocator:
        """Return a fresh allocator. The only method to override."""
        raise NotImplementedError("override make(groups, num_pages)")

    # Life cycle of a sequence

    @each_layout
    def test_a_sequence_is_known_until_release(self, layout: Layout) -> None:
        kv, seq, parent = self._make(layout), sequence(1, 9), sequence(2, 9)
        kv.acquire(parent)
        ways: tuple[Callable[[], object], ...] = (
            lambda: kv.acquire(seq),
            lambda: kv.reserve(seq, 5),
            lambda: kv.fork(parent, seq, 0),
        )
        for register in ways:
            register()
            with pytest.raises(ValueError):
                kv.acquire(seq)
            with pytest.raises(ValueError):
                kv.fork(parent, seq, 0)
            kv.release(seq)
            kv.check()

    def test_a_failed_reserve_does_not_register(self) -> None:
        kv, seq = self._make(ONE), sequence(1, 9)
        assert kv.reserve(seq, ONE.capacity + 1) is None, "reserve past the capacity must return None"
        kv.acquire(seq)

    def test_unknown_sequences_are_refused(self) -> None:
        kv, seq = self._make(ONE), sequence(1, 9)
        with pytest.raises(ValueError):
            kv.publish(seq, 0)
        with pytest.raises(ValueError):
            kv.trim(seq, 0)
        with pytest.raises(ValueError):
            kv.fork(seq, sequence(2, 9), 0)

    @each_layout
    def test_release_gives_every_page_back(self, layout: Layout) -> None:
        kv, seq = self._make(layout), sequence(1, layout.capacity)
        empty = kv.stats()
        for _ in range(3):
            kv.acquire(seq)
            assert kv.reserve(seq, layout.capacity) is not None
            kv.release(seq)
            kv.check()
            same = kv.stats() == empty or self.reuses and (kv.stats().owned, kv.stats().free) == (0, empty.free)
            assert same, f"after release of unpublished pages expected {empty}, got {kv.stats()}"

    @each_layout
    def test_release_is_idempotent(self, layout: Layout) -> None:
        kv, seq = self._make(layout), sequence(1, 9)
        kv.release(seq)
        write(kv, seq)
        kv.release(seq)
        released = kv.stats()
        kv.release(seq)
        assert kv.stats() == released, "a second release must change nothing"
        kv.check()

    # reserve

    @each_layout
    def test_pages_are_those_granted_and_never_page_zero(self, layout: Layout) -> None:
        kv = self._make(layout)
        pages = owned_pages(reserve(kv, sequence(1, 1), layout.capacity))
        for group in layout.groups:
            count, last = ceil_div(layout.capacity, group.page_tokens), layout.num_pages[group.id]
            given = pages[group.id]
            assert len(set(given)) == len(given) == count, f"group {group.id}: expected {count} pages, got {given}"
            assert set(given) <= set(range(1, last + 1)), f"group {group.id} has pages 1 to {last}, got {given}"

    @each_layout
    def test_every_page_can_be_owned(self, layout: Layout) -> None:
        for group in layout.groups:
            alone = Layout((group,), {group.id: layout.num_pages[group.id]})
            pages = owned_pages(reserve(self._make(alone), sequence(1, 1), alone.capacity))
            assert set(pages[group.id]) == set(range(1, alone.num_pages[group.id] + 1)), "some pages are never used"

    @each_layout
    def test_two_sequences_share_no_page_by_accident(self, layout: Layout) -> None:
        kv = self._make(layout)
        half = layout.capacity // 2 // layout.stride * layout.stride
        first = owned_pages(reserve(kv, sequence(1, 1), half))
        second = owned_pages(reserve(kv, sequence(2, 1), half))
        for group in layout.groups:
            shared = set(first[group.id]) & set(second[group.id])
            assert not shared, f"group {group.id}: pages {shared} were given to two unrelated sequences"

    @each_layout
    def test_reserve_is_absolute_and_idempotent(self, layout: Layout) -> None:
        kv, seq = self._make(layout), sequence(1, 1)
        made = [reserve(kv, seq, upto) for upto in (3, layout.stride + 1, layout.stride + 1, 2, 2 * layout.stride)]
        for number, upto in ((0, 3), (1, layout.stride + 1), (4, 2 * layout.stride)):
            so_far = [entry for reservation in made[: number + 1] for entry in reservation.entries]
            for group in layout.groups:
                indices = [index for group_id, index, _ in so_far if group_id == group.id]
                assert indices == list(range(ceil_div(upto, group.page_tokens))), f"table indices up to token {upto}"
        assert made[2] == made[3] == Reservation(), "reserving what is reserved must return an empty Reservation"
        before = kv.stats()
        for _ in range(layout.stride):
            assert reserve(kv, seq, 2 * layout.stride) == Reservation(), "reserve is not idempotent"
        assert kv.stats() == before, "reserving what is reserved must change nothing"

    @each_layout
    def test_reserve_without_enough_pages_changes_nothing(self, layout: Layout) -> None:
        kv, seq, other = self._make(layout), sequence(1, 1), sequence(2, 1)
        reserve(kv, seq, 5)
        before = kv.stats()
        assert kv.reserve(seq, layout.capacity + 1) is None, "reserve past the capacity must return None"
        assert kv.reserve(other, layout.capacity) is None, "reserve of pages that another sequence owns"
        assert kv.stats() == before, "a failed reserve must change nothing"
        kv.check()
        reserve(kv, seq, layout.capacity)

    def test_reserve_is_all_groups_or_none(self) -> None:
        for starved, known in itertools.product((0, 1), (False, True)):
            kv, seq = self.make(layout(a=(4, 8), b=(4, 8)).groups, {0: 8, 1: 8, starved: 2}), sequence(1, 1)
            if known:
                kv.acquire(seq)
            before = kv.stats()
            assert kv.reserve(seq, 12) is None, f"group {starved} lacks pages, so reserve must return None"
            assert kv.stats() == before, "a failed reserve must change nothing in any group"
            kv.check()

    @each_layout
    def test_pages_needed_is_what_a_fresh_sequence_owns(self, layout: Layout) -> None:
        for tokens in (1, layout.stride, layout.stride + 1, layout.capacity):
            kv = self._make(layout)
            pages = owned_pages(reserve(kv, sequence(1, 1), tokens))
            assert kv.pages_needed(tokens) == {group.id: len(pages[group.id]) for group in layout.groups}

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
    def test_pages_are_taken_ahead_where_they_must_be_consecutive(self, layout: Layout) -> None:
        kv, seq = self._make(layout), sequence(1, 1)
        seq.limit = 2 * layout.stride + 1
        pages = owned_pages(reserve(kv, seq, 1))
        ahead = kv.pages_needed(seq.limit if self.contiguous else 1)
        assert {group: len(taken) for group, taken in pages.items()} == ahead, "pages reserved for 1 token"
        slots = sum(ahead[group.id] * group.page_tokens for group in layout.groups)
        assert kv.stats().waste == 1 - len(layout.groups) / slots, "1 token used in every group, the rest is waste"
        more = bool(reserve(kv, seq, seq.limit).entries)
        assert more != self.contiguous, f"reserve({seq.limit}) took pages: {more}; contiguous = {self.contiguous}"
        kv.check()

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

    # Sliding windows

    @each_sliding
    def test_pages_behind_the_window_are_given_back(self, layout: Layout) -> None:
        if not self.slides:
            pytest.skip("slides = False: pages behind a window are kept")
        kv, seq = self._make(layout), sequence(1, 12 * layout.stride)
        limits = {group.id: kv.pages_needed(len(seq.tokens), ahead=3)[group.id] for group in layout.groups}
        for group in layout.groups:
            enough = ceil_div(group.window + 3 + 2 * group.page_tokens, group.page_tokens)
            whole = 0 if group.window else len(seq.tokens) // group.page_tokens
            assert limits[group.id] <= enough or limits[group.id] == whole, f"pages_needed is too large for {group}"
        kv = self.make(layout.groups, limits)
        kv.acquire(seq)
        for start in range(0, len(seq.tokens), 3):
            upto = min(start + 3, len(seq.tokens))
            fits = kv.reserve(seq, upto) is not None
            assert fits, f"reserve({upto}) failed with the pages that pages_needed gave, {limits}: {kv.stats()}"
            kv.publish(seq, upto)
            held = sum(ceil_div(upto, group.page_tokens) - group.pages_behind(upto - 1) for group in layout.groups)
            owned = kv.stats().owned
            assert owned == held, f"{upto} tokens are published: expected {held} owned pages, got {owned}"
            kv.check()
        with pytest.raises(ValueError):
            kv.trim(seq, 1)
        kv.release(seq)
        assert kv.stats().owned == 0, "pages are owned after release"
        kv.check()

    @each_sliding
    def test_only_groups_without_a_window_take_room_ahead(self, layout: Layout) -> None:
        kv = self._make(layout)
        pages = owned_pages(reserve(kv, sequence(1, 20), 3, ahead=20))
        for group in layout.groups:
            upto = 3 if group.window and self.slides else 20
            expected = ceil_div(upto, group.page_tokens)
            assert len(pages[group.id]) == expected, f"group {group.id}: pages of reserve(3, ahead=20)"
        kv.check()

    @each_sliding
    def test_a_hit_has_the_windows_pages_alone(self, layout: Layout) -> None:
        kv, first, second = self._make(layout), sequence(1, 3 * layout.stride), sequence(2, 3 * layout.stride + 1)
        write(kv, first)
        kv.release(first)
        hit = kv.acquire(second)
        assert hit.tokens == (3 * layout.stride if self.reuses else 0), "tokens found of a released prefix"
        for group in layout.groups if hit.tokens else ():
            indices = [index for group_id, index, _ in hit.entries if group_id == group.id]
            behind = group.pages_behind(hit.tokens) if self.slides else 0
            assert indices == list(range(behind, hit.tokens // group.page_tokens)), f"hit in {group}: table indices"
        kv.check()

    @each_sliding
    def test_a_fork_behind_the_window_is_an_acquire(self, layout: Layout) -> None:
        if not self.slides:
            pytest.skip("slides = False: pages behind a window are kept")
        kv, parent, child = self._make(layout), sequence(1, 3 * layout.stride), sequence(2, layout.stride + 1)
        write(kv, parent)
        found = kv.peek(child)
        hit = kv.fork(parent, child, layout.stride)
        assert hit.tokens == found, "the parent's window has passed the child: fork must find as much as acquire"
        kv.check()

    @each_sliding
    def test_a_fork_may_publish_before_its_parent(self, layout: Layout) -> None:
        length = 2 * layout.stride + 1
        kv, parent, child = self._make(layout), sequence(1, length), sequence(2, length + 1)
        reserve(kv, parent, length)
        kv.fork(parent, child, length)
        kv.publish(child, length)
        kv.check()

    # Overall behaviour

    @each_layout
    def test_stats_add_up(self, layout: Layout) -> None:
        kv, first, second = self._make(layout), sequence(1, layout.stride + 1), sequence(2, layout.stride + 1)
        write(kv, first)
        kv.fork(first, second, layout.stride + 1)
        stats = kv.stats()
        total = sum(layout.num_pages.values())
        assert stats.pages == total == stats.free + stats.cached + stats.owned, "free, cached and owned must add up"
        assert stats.used_tokens == (layout.stride + 1) * len(layout.groups), "a shared token slot counts once"
        pages = kv.pages_needed(layout.stride + 1)
        slots = sum(pages[group.id] * group.page_tokens for group in layout.groups)
        assert stats.owned_tokens == slots, "owned_tokens must count all slots of owned pages, each page once"
        assert 0 <= stats.waste < 1, f"waste is a share of the owned slots, got {stats.waste}"

    def test_cost_does_not_grow_with_cached_pages(self) -> None:
        """Count the Python lines run by equal work on a small and on a large cache."""
        costs = []
        for cached in (20, 2000):
            kv = self.make(layout(a=(4, 4096)).groups, {0: 4096})
            for number in range(cached // 4):
                write(kv, other := sequence(100 + number, 16, first=1000 * number))
                kv.release(other)
            seq, child = sequence(1, 17), sequence(2, 17)
            costs.append(lines_run(lambda: live(kv, seq, child)))  # noqa: B023
        assert costs[1] <= costs[0] * 1.5, (
            f"calls must cost O(pages touched), but run {costs[0]} lines with 20 cached pages and {costs[1]} with 2000"
        )

    def test_state_machine(self) -> None:
        machine = make_kv_state_machine(self.make, contiguous=self.contiguous, slides=self.slides)
        run_state_machine_as_test(machine, settings=self.machine_settings)

    def _make(self, layout: Layout) -> KVAllocator:
        return self.make(layout.groups, layout.num_pages)


ONE = LAYOUTS["one_group"]
