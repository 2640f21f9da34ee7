from __future__ import annotations

from array import array

import pydantic
import pytest

from dovetail.core.errors import PluginError
from dovetail.core.interfaces import KVGroup, PageEntry
from dovetail.core.memory.eviction import LRU
from dovetail.core.testing.kv_model import TokenSequence, layout, live, owned_pages, reserve, sequence, write
from dovetail.core.testing.suite import lines_run
from dovetail.plugins.kv_cache import prefix_hash
from dovetail.plugins.kv_cache.config import PrefixHashConfig
from dovetail.plugins.kv_cache.prefix_hash import PrefixHashAllocator

PAGE = 4


def allocator(pages: int = 32, eviction: str = "lru") -> PrefixHashAllocator:
    return PrefixHashAllocator(PrefixHashConfig(eviction=eviction), (KVGroup(0, (0,), page_tokens=PAGE),), {0: pages})


def pages_of(entries: tuple[PageEntry, ...]) -> list[int]:
    return [page for _, _, page in entries]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Token ids of every hashed page, in order."""
    seen: list[list[int]] = []
    page_key = prefix_hash.page_key

    def spy(parent: bytes, tokens: bytes) -> bytes:
        seen.append(array("i", tokens).tolist())
        return page_key(parent, tokens)

    monkeypatch.setattr(prefix_hash, "page_key", spy)
    return seen


def test_each_page_is_hashed_once(hashed: list[list[int]]) -> None:
    kv, seq = allocator(), sequence(1, 10)
    for _ in range(3):
        kv.peek(seq)
    write(kv, seq)
    while len(seq.tokens) < 21:
        seq.tokens.append(len(seq.tokens))
        reserve(kv, seq, len(seq.tokens))
        kv.publish(seq, len(seq.tokens) - 1)
    assert hashed == [seq.tokens[i : i + PAGE] for i in range(0, 20, PAGE)]


def test_a_fork_inherits_keys(hashed: list[list[int]]) -> None:
    kv, parent, child = allocator(), sequence(1, 9), sequence(2, 9)
    write(kv, parent)
    kv.fork(parent, child, 8)
    reserve(kv, child, 12)
    kv.publish(child, 9)
    assert len(hashed) == 2


def test_peek_stops_hashing_at_the_first_miss(hashed: list[list[int]]) -> None:
    allocator().peek(sequence(1, 1000))
    assert len(hashed) == 1


def test_only_full_pages_are_shared() -> None:
    kv = allocator()
    write(kv, sequence(1, 11))
    assert kv.peek(sequence(2, 12)) == 8


def test_the_second_publisher_of_a_page_keeps_it_private() -> None:
    kv, first, second = allocator(), sequence(1, 8), sequence(2, 8)
    kv.acquire(second)
    reserve(kv, second, 8)
    mine = write(kv, first)
    kv.publish(second, 8)
    assert owned_pages(kv.acquire(sequence(3, 9))) == mine
    kv.release(second)
    assert kv.stats().cached == 0, "the duplicate is free, not cached"
    kv.check()


def test_a_prefix_is_evicted_from_its_end() -> None:
    kv, seq = allocator(pages=4), sequence(1, 16)
    write(kv, seq)
    kv.release(seq)
    reserve(kv, sequence(2, 1), PAGE)
    assert kv.peek(sequence(3, 17)) == 12
    assert kv.stats().evictions == 1


def test_lru_and_fifo_choose_differently() -> None:
    for eviction, survivor in (("lru", 0), ("fifo", 100)):
        kv = allocator(pages=2, eviction=eviction)
        for uid, first in ((1, 0), (2, 100)):
            write(kv, seq := sequence(uid, 4, first=first))
            kv.release(seq)
        kv.acquire(again := sequence(3, 5))
        kv.release(again)
        reserve(kv, sequence(4, 1), 1)
        assert [first for first in (0, 100) if kv.peek(sequence(5, 5, first=first))] == [survivor]


@pytest.mark.parametrize("eviction", ["lfu", "cost"])
def test_what_is_found_often_stays_although_others_came_later(eviction: str) -> None:
    kv = allocator(pages=4, eviction=eviction)
    for uid in (1, 2, 3):
        write(kv, popular := sequence(uid, 9))
        kv.release(popular)
    for uid in (4, 5, 6):
        write(kv, other := sequence(uid, 8, first=100 * uid))
        kv.release(other)
    assert kv.peek(sequence(7, 9)) == 8


def test_free_pages_go_before_cached_ones() -> None:
    kv, seq = allocator(pages=3), sequence(1, 8)
    write(kv, seq)
    kv.release(seq)
    reserve(kv, sequence(2, 1), 1)
    assert kv.stats().evictions == 0


def test_a_hit_is_the_least_over_groups() -> None:
    uneven = layout(a=(4, 16), b=(4, 4))
    kv = PrefixHashAllocator(PrefixHashConfig(), uneven.groups, uneven.num_pages)
    write(kv, first := sequence(1, 16))
    kv.release(first)
    reserve(kv, sequence(2, 1), 8)  # evicts two pages of group 1, none of group 0
    assert kv.acquire(sequence(3, 17)).tokens == 8


def test_hits_fill_whole_pages_of_every_group() -> None:
    mixed = layout(a=(4, 16), b=(8, 16))
    kv = PrefixHashAllocator(PrefixHashConfig(), mixed.groups, mixed.num_pages)
    write(kv, sequence(1, 20))
    hit = kv.acquire(sequence(2, 21))
    assert (hit.tokens, [len(pages) for pages in owned_pages(hit).values()]) == (16, [4, 2])


def test_a_page_about_to_be_overwritten_is_withdrawn() -> None:
    kv, seq = allocator(), sequence(1, 8)
    write(kv, seq)
    kv.trim(seq, 6)
    assert kv.peek(sequence(2, 9)) == 8, "still intact"
    seq.tokens[6:] = [70, 71]
    assert reserve(kv, seq, 8).ops == ()
    assert kv.peek(sequence(2, 9)) == 4
    kv.publish(seq, 8)
    assert kv.peek(TokenSequence(3, [*seq.tokens, 0])) == 8
    kv.check()


def test_a_page_that_others_read_is_copied_before_it_is_overwritten() -> None:
    kv, seq, reader = allocator(), sequence(1, 8), sequence(2, 9)
    write(kv, seq)
    shared = pages_of(kv.acquire(reader).entries)
    kv.trim(seq, 6)
    (op,) = reserve(kv, seq, 8).ops
    assert op.src == shared[1]
    assert kv.peek(sequence(3, 9)) == 8


def test_keys_of_waiting_sequences_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_hash, "WAITING_CHAINS", 10)
    kv = allocator()
    for uid in range(30):
        kv.peek(sequence(uid, 9))
    assert len(kv._waiting) == 10


def test_cost_is_independent_of_100k_cached_pages() -> None:
    """The work of equal calls, in lines of Python, does not grow with the cache."""
    lines = []
    for cached in (100, 100_000):
        kv = allocator(pages=cached + 64)
        chunk = 50
        for number in range(cached // chunk):
            write(kv, other := sequence(10 + number, chunk * PAGE, first=1000 + chunk * PAGE * number))
            kv.release(other)
        assert kv.stats().cached == cached
        seq, child = sequence(1, 41), sequence(2, 41)
        lines.append(lines_run(lambda: live(kv, seq, child)))  # noqa: B023
    assert lines[0] == lines[1]


def test_a_decode_step_costs_the_same_at_any_length(hashed: list[list[int]]) -> None:
    lines = []
    for length in (6, 4002):
        kv, seq = allocator(pages=1200), sequence(1, length)
        write(kv, seq)
        seq.tokens.append(6)
        hashed.clear()
        lines.append(lines_run(lambda: (kv.reserve(seq, length + 1), kv.publish(seq, length))))  # noqa: B023
        assert not hashed, "the page is not full"
    assert lines[0] == lines[1]


class Stubborn(LRU):
    """Policy that always chooses page 1, owned or not."""

    def victim(self) -> int:
        return 1


def test_a_policy_that_chooses_an_owned_page_is_an_error() -> None:
    kv = allocator(pages=2, eviction=f"{__name__}:Stubborn")
    first, second = sequence(1, 4), sequence(2, 4, first=100)
    write(kv, first)
    write(kv, second)
    kv.release(second)
    with pytest.raises(PluginError, match=r"Stubborn.victim\(\) chose page 1"):
        kv.reserve(sequence(3, 1), 1)


@pytest.mark.parametrize("name", ["LRU", "", "mine.Policy", ":Policy"])
def test_a_misspelt_policy_is_refused_when_the_config_is_read(name: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="neither one of lru, fifo, lfu, cost"):
        PrefixHashConfig(eviction=name)
