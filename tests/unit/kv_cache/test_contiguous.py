from __future__ import annotations

import random

from dovetail.core.interfaces import KVGroup, PageOp, PageOpKind
from dovetail.core.testing.kv_model import TokenSequence, owned_pages, reserve
from dovetail.plugins.kv_cache.config import ContiguousConfig
from dovetail.plugins.kv_cache.contiguous import ContiguousAllocator, PageRuns

PAGE = 4
GROUP = KVGroup(0, (0,), page_tokens=PAGE)


def allocator(pages: int) -> ContiguousAllocator:
    return ContiguousAllocator(ContiguousConfig(), (GROUP,), {0: pages})


def request(uid: int, prompt: int, limit: int) -> TokenSequence:
    return TokenSequence(uid, list(range(prompt)), limit=limit)


def test_the_maximum_length_is_reserved_at_once_and_counts_as_waste() -> None:
    kv, seq = allocator(16), request(1, 6, limit=30)
    assert owned_pages(reserve(kv, seq, 6)) == {0: [1, 2, 3, 4, 5, 6, 7, 8]}
    stats = kv.stats()
    assert (stats.owned_tokens, stats.used_tokens, stats.waste) == (32, 6, 1 - 6 / 32)
    assert not reserve(kv, seq, 30).entries


def test_scattered_free_pages_are_not_used() -> None:
    kv = allocator(12)
    first, second, third = (request(uid, 1, limit=4 * PAGE) for uid in (1, 2, 3))
    for seq in (first, second, third):
        reserve(kv, seq, 1)
    kv.release(first)
    kv.release(third)
    large = request(4, 1, limit=6 * PAGE)
    assert kv.stats().free == 8
    assert kv.reserve(large, 1) is None
    kv.release(second)
    assert owned_pages(reserve(kv, large, 1)) == {0: [1, 2, 3, 4, 5, 6]}


def test_a_fork_copies_its_prompt_into_a_new_run() -> None:
    kv, parent, child = allocator(16), request(1, 7, limit=12), request(2, 7, limit=12)
    kv.acquire(parent)
    reserve(kv, parent, 7)
    kv.fork(parent, child, 6)
    made = reserve(kv, child, 7)
    assert owned_pages(made) == {0: [4, 5, 6]}
    assert made.ops == (PageOp(PageOpKind.COPY, 0, 1, 4), PageOp(PageOpKind.COPY, 0, 2, 5))
    assert not reserve(kv, parent, 8).ops, "it is the only owner of its run"


def test_a_sequence_that_outgrows_its_run_extends_it_or_moves() -> None:
    kv, seq, other = allocator(16), request(1, 8, limit=8), request(2, 4, limit=4)
    kv.acquire(seq)
    reserve(kv, seq, 8)
    assert owned_pages(reserve(kv, seq, 12)) == {0: [3]}
    reserve(kv, other, 4)
    made = reserve(kv, seq, 13)
    assert owned_pages(made) == {0: [5, 6, 7, 8]}
    assert [(op.src, op.dst) for op in made.ops] == [(1, 5), (2, 6), (3, 7)]
    kv.check()


def test_gaps_are_those_of_a_bitmap() -> None:
    """Random takes and drops against a set of pages: first fit, and no two gaps touch."""
    rng, runs, free = random.Random(0), PageRuns(GROUP, 60), set(range(1, 61))
    owned: list[int] = []
    for _ in range(2000):
        count = rng.randrange(1, 9)
        fits = [p for p in range(1, 61) if all(q in free for q in range(p, p + count))]
        found = runs.find(count)
        assert found == (range(fits[0], fits[0] + count) if fits else None)
        page = rng.randrange(1, 61)
        follows = page not in free and set(range(page + 1, page + 1 + count)) <= free
        assert bool(runs.after(page, count)) == follows or page in free
        if found and rng.random() < 0.5:
            runs.take_run(found)
            owned += found
            free -= set(found)
        for _ in range(min(len(owned), rng.randrange(5))):
            runs.drop(page := owned.pop(rng.randrange(len(owned))))
            free.add(page)
        assert set(runs.free_pages()) == free and runs.num_free == len(free)
        assert all(a.stop < b.start for a, b in zip(runs.gaps, runs.gaps[1:], strict=False))
