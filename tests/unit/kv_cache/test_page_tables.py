from __future__ import annotations

import pytest

from dovetail.core.interfaces import KVGroup, PageOp, PageOpKind
from dovetail.core.memory.page_list import PageList
from dovetail.core.testing.kv_model import layout, reserve, sequence, write
from dovetail.plugins.kv_cache.config import PagedConfig
from dovetail.plugins.kv_cache.paged import PagedAllocator

PAGE = 4


def allocator(pages: int = 16) -> PagedAllocator:
    return PagedAllocator(PagedConfig(), (KVGroup(0, (0,), page_tokens=PAGE),), {0: pages})


def test_pages_go_out_in_order_and_the_last_one_back_comes_first() -> None:
    kv, first, second = allocator(), sequence(1, 1), sequence(2, 1)
    assert [page for _, _, page in reserve(kv, first, 3 * PAGE).entries] == [1, 2, 3]
    assert [page for _, _, page in reserve(kv, second, PAGE).entries] == [4]
    kv.release(first)
    assert [page for _, _, page in reserve(kv, second, 5 * PAGE).entries] == [1, 2, 3, 5]


def test_group_ids_need_not_be_positions() -> None:
    groups = (KVGroup(7, (0,), page_tokens=PAGE), KVGroup(3, (1,), page_tokens=PAGE))
    kv = PagedAllocator(PagedConfig(), groups, {3: 4, 7: 4})
    assert [group for group, _, _ in reserve(kv, sequence(1, 1), 1).entries] == [7, 3]


def test_every_group_needs_its_page_count() -> None:
    with pytest.raises(ValueError, match="each group needs one"):
        PagedAllocator(PagedConfig(), layout(a=(4, 4), b=(4, 4)).groups, {0: 4})


def test_a_copy_that_has_no_page_makes_reserve_fail_and_changes_nothing() -> None:
    kv, parent, child = allocator(pages=2), sequence(1, 6), sequence(2, 6)
    write(kv, parent)
    kv.fork(parent, child, 6)
    before = kv.stats()
    assert kv.reserve(child, 7) is None
    assert kv.stats() == before
    kv.release(parent)
    assert reserve(kv, child, 7).ops == (), "the only owner by now"


def test_many_forks_of_one_page_copy_it_once_each_but_the_last() -> None:
    kv, parent = allocator(), sequence(0, 6)
    write(kv, parent)
    family = [parent, *(sequence(uid, 6) for uid in (1, 2, 3))]
    for child in family[1:]:
        kv.fork(parent, child, 5)
    ops = [reserve(kv, member, 7).ops for member in family]
    assert ops[-1] == ()
    assert [(op.src, op.dst) for (op,) in ops[:-1]] == [(2, 3), (2, 4), (2, 5)]
    kv.check()


def test_a_fork_of_full_pages_that_are_not_published_yet_copies_nothing_for_the_parent() -> None:
    kv, parent, child = allocator(), sequence(1, 12), sequence(2, 9)
    kv.acquire(parent)
    reserve(kv, parent, 12)
    kv.fork(parent, child, 8)
    assert reserve(kv, parent, 16).ops == ()


def test_trim_behind_a_fork_copies_when_the_parent_writes_again() -> None:
    kv, parent, child = allocator(), sequence(1, 8), sequence(2, 9)
    write(kv, parent)
    kv.fork(parent, child, 8)
    kv.trim(parent, 6)
    assert reserve(kv, parent, 8).ops == (PageOp(PageOpKind.COPY, 0, 2, 3),)


@pytest.mark.parametrize("upto", [9, 13])
def test_publish_past_what_is_reserved_or_known_is_refused(upto: int) -> None:
    kv, seq = allocator(), sequence(1, 8)
    kv.acquire(seq)
    reserve(kv, seq, 12)
    with pytest.raises(ValueError, match=f"cannot publish {upto} tokens"):
        kv.publish(seq, upto)


def test_fork_past_what_is_reserved_is_refused() -> None:
    kv, seq = allocator(), sequence(1, 8)
    write(kv, seq)
    with pytest.raises(ValueError, match="cannot fork 9 tokens"):
        kv.fork(seq, sequence(2, 8), 9)


def test_used_tokens_count_a_shared_slot_once() -> None:
    kv, parent, child = allocator(), sequence(1, 6), sequence(2, 6)
    write(kv, parent)
    kv.fork(parent, child, 5)
    assert (kv.stats().used_tokens, kv.stats().owned_tokens) == (6, 8)
    kv.release(parent)
    assert (kv.stats().used_tokens, kv.stats().owned_tokens) == (5, 8)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda pages: pages.free.pop(), "15 free \\+ 0 owned of 16"),
        (lambda pages: pages.free.append(3), "17 free pages, 16 different"),
        (lambda pages: pages.add_owner(3), "page 3 has 0 owners and a count of 1"),
    ],
)
def test_check_names_the_numbers(spoil: object, message: str) -> None:
    pages = PageList(KVGroup(0, (0,)), 16)
    pages.check(())
    spoil(pages)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=message):
        pages.check(())
