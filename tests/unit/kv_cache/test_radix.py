from __future__ import annotations

import random

import pytest

from dovetail.core.interfaces import KVGroup, PageOp, PageOpKind
from dovetail.core.testing.kv_model import TokenSequence, layout, live, owned_pages, reserve, sequence, write
from dovetail.core.testing.suite import lines_run
from dovetail.plugins.kv_cache import radix
from dovetail.plugins.kv_cache.config import RadixConfig
from dovetail.plugins.kv_cache.radix import RadixAllocator

PAGE = 4


def allocator(pages: int = 32, **options: object) -> RadixAllocator:
    return RadixAllocator(RadixConfig.model_validate(options), (KVGroup(0, (0,), page_tokens=PAGE),), {0: pages})


def served(kv: RadixAllocator, uid: int, tokens: list[int], salt: str = "") -> dict[int, list[int]]:
    """Write, publish and release a sequence; return its pages."""
    seq = TokenSequence(uid, tokens, salt)
    pages = write(kv, seq)
    kv.release(seq)
    kv.check()
    return pages


def nodes(kv: RadixAllocator) -> int:
    """Count the nodes without roots."""
    found = [node for root in kv._pages[0].roots.values() for node in root.children.values()]
    for node in found:
        found += node.children.values()
    return len(found)


def test_a_hit_that_ends_inside_a_page_copies_it() -> None:
    kv = allocator()
    first = served(kv, 1, list(range(12)))
    seq = TokenSequence(2, [*range(10), 50, 51, 52])
    hit = kv.acquire(seq)
    assert (hit.tokens, owned_pages(hit), hit.ops) == (10, first, ())
    made = reserve(kv, seq, 13)
    assert made.ops == (PageOp(PageOpKind.COPY, 0, first[0][2], made.entries[0][2]),)
    assert [index for _, index, _ in made.entries] == [2, 3]
    assert kv.peek(sequence(3, 13)) == 12, "the copied page is still what it was"
    kv.check()


def test_hits_are_whole_pages_without_exact() -> None:
    kv = allocator(exact=False)
    served(kv, 1, list(range(12)))
    assert kv.peek(TokenSequence(2, [*range(10), 50])) == 8


def test_without_a_page_for_the_copy_the_cached_one_is_overwritten() -> None:
    kv = allocator(pages=3)
    served(kv, 1, list(range(12)))
    seq = TokenSequence(2, [*range(10), 50, 51])
    kv.acquire(seq)
    assert reserve(kv, seq, 12).entries == ()
    assert kv.peek(sequence(3, 13)) == 8
    kv.check()


def test_prompts_that_diverge_inside_a_page_share_their_prefix() -> None:
    kv = allocator()
    common = list(range(6))
    served(kv, 1, [*common, 10, 11])
    served(kv, 2, [*common, 20, 21, 22, 23, 24, 25])
    served(kv, 3, [*common, 20, 30])
    assert nodes(kv) == 5
    for tail, found in (([10, 11], 8), ([20, 21, 22], 9), ([20, 30], 8), ([20, 40], 7), ([50], 6)):
        assert kv.peek(TokenSequence(9, [*common, *tail, 99])) == found
    assert kv.stats().cached == 1 + 1 + 2 + 1


def test_a_decoding_sequence_grows_its_leaf() -> None:
    kv, seq = allocator(), sequence(1, 6)
    write(kv, seq)
    while len(seq.tokens) < 30:
        seq.tokens.append(len(seq.tokens))
        reserve(kv, seq, len(seq.tokens))
        kv.publish(seq, len(seq.tokens) - 1)
    assert nodes(kv) == 1
    assert kv.peek(sequence(2, 31)) == 28


def test_equal_prompts_at_once_end_up_on_one_copy() -> None:
    kv = allocator()
    first, second = sequence(1, 9), sequence(2, 9)
    for seq in (first, second):
        kv.acquire(seq)
        reserve(kv, seq, 9)
    kv.publish(first, 9)
    kv.publish(second, 9)
    assert kv.stats().owned == 6
    second.tokens += [50, 51, 52, 53]
    made = reserve(kv, second, 13)
    assert sorted(index for _, index, _ in made.entries) == [0, 1, 3]
    assert kv.stats().owned == 5
    kv.publish(second, 12)
    assert kv.peek(TokenSequence(3, [*second.tokens, 0])) == 12
    kv.check()


def test_what_a_duplicate_had_written_is_kept_on_release() -> None:
    kv = allocator()
    first, second = sequence(1, 8), TokenSequence(2, [*range(8), 50, 51, 52, 53])
    for seq in (first, second):
        kv.acquire(seq)
        reserve(kv, seq, len(seq.tokens))
        kv.publish(seq, len(seq.tokens))
    kv.release(first)
    kv.release(second)
    kv.check()
    assert kv.peek(TokenSequence(3, [*second.tokens, 0])) == 12
    assert kv.stats().cached == 3, "the duplicates are free"


def test_leaves_are_evicted_before_their_parents() -> None:
    kv = allocator(pages=8)
    served(kv, 1, [*range(8), 10, 11, 12, 13])
    served(kv, 2, [*range(8), 20, 21, 22, 23])
    reserve(kv, sequence(3, 1), 5 * PAGE)
    kv.check()
    assert kv.stats().evictions == 1
    assert kv.peek(TokenSequence(4, [*range(8), 10, 11, 12, 13, 0])) == 8
    assert kv.peek(TokenSequence(4, [*range(8), 20, 21, 22, 23, 0])) == 12


class MRU:
    """A policy that evicts the start of a prefix first."""

    def __init__(self) -> None:
        self.pages: dict[int, None] = {}

    def on_publish(self, page: int, depth: int, parent: int) -> None: ...

    def on_release(self, page: int) -> None:
        self.pages[page] = None

    def on_hit(self, page: int) -> None:
        self.pages.pop(page, None)

    def victim(self) -> int:
        return self.pages.popitem()[0]


def test_continuations_of_a_victim_are_evicted_with_it() -> None:
    kv = allocator(pages=6, eviction=f"{__name__}:MRU")
    served(kv, 1, list(range(16)))
    served(kv, 2, list(range(100, 108)))
    reserve(kv, sequence(3, 1), 1)
    assert (kv.peek(sequence(4, 17)), kv.peek(sequence(5, 9, first=100))) == (16, 0)
    kv.check()
    assert (kv.stats().evictions, kv.stats().free) == (2, 1)


def test_roots_of_forgotten_salts_are_gone() -> None:
    kv = allocator()
    for uid in range(5):
        served(kv, uid, list(range(8)), salt=f"tenant {uid}")
    assert kv.stats().cached == 10
    kv.reset()
    assert not kv._pages[0].roots
    assert kv.stats().evictions == 0


def test_hits_are_the_least_over_groups_of_any_page_size() -> None:
    mixed = layout(a=(4, 16), b=(8, 16))
    kv = RadixAllocator(RadixConfig(), mixed.groups, mixed.num_pages)
    write(kv, sequence(1, 20))
    hit = kv.acquire(sequence(2, 21))
    assert (hit.tokens, [len(pages) for pages in owned_pages(hit).values()]) == (16, [4, 2])
    hit = kv.acquire(TokenSequence(3, [*range(13), 99]))
    assert (hit.tokens, [len(pages) for pages in owned_pages(hit).values()]) == (13, [4, 2])


def test_token_bytes_of_waiting_sequences_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix, "WAITING", 10)
    kv = allocator()
    for uid in range(30):
        kv.peek(sequence(uid, 9))
    assert len(kv._waiting) == 10


@pytest.mark.parametrize("eviction", ["lru", "lfu", "cost"])
def test_a_hit_is_the_longest_prefix_ever_served(eviction: str) -> None:
    """Against a plain model without eviction: the set of all prefixes of earlier prompts, up to whole pages."""
    rng, kv = random.Random(1), allocator(pages=4000, eviction=eviction)
    known: set[tuple[int, ...]] = {()}
    prompts: list[list[int]] = [[]]
    for uid in range(200):
        start = rng.choice(prompts)
        prompt = [*start[: rng.randrange(len(start) + 1)], *(rng.randrange(3) for _ in range(rng.randrange(1, 20)))]
        expected = max(n for n in range(len(prompt)) if tuple(prompt[:n]) in known)
        assert kv.peek(TokenSequence(uid, prompt)) == expected
        served(kv, uid, prompt)
        full = len(prompt) // PAGE * PAGE
        known |= {tuple(prompt[:n]) for n in range(full + 1)}
        prompts.append(prompt)


def test_cost_is_independent_of_what_is_cached() -> None:
    """The work of equal calls and of evictions, in lines of Python, does not grow with the cache."""
    lines = []
    for cached in (100, 20_000):
        kv = allocator(pages=cached + 8)
        for number in range(cached // 50):
            served_quietly(kv, 10 + number, 50 * PAGE, first=1000 + 50 * PAGE * number)
        assert kv.stats().cached == cached
        seq, child, large = sequence(1, 41), sequence(2, 41), sequence(3, 1)
        lines.append(lines_run(lambda: (live(kv, seq, child), reserve(kv, large, 40 * PAGE))))  # noqa: B023
        assert kv.stats().evictions > 30
    assert lines[0] == lines[1]


def served_quietly(kv: RadixAllocator, uid: int, tokens: int, first: int) -> None:
    write(kv, seq := sequence(uid, tokens, first=first))
    kv.release(seq)


def test_a_long_prompt_is_compared_in_runs() -> None:
    """Lookup work does not grow with the length of a run, and with its logarithm where the prompt differs."""
    equal, differing = [], []
    for length in (800, 8000):
        kv = allocator(pages=2100)
        served_quietly(kv, 1, length, first=0)
        seq, differs = sequence(2, length + 1), TokenSequence(3, [*range(length - 223), *range(500)])
        equal.append(lines_run(lambda: kv.peek(seq)))  # noqa: B023
        differing.append(lines_run(lambda: kv.peek(differs)))  # noqa: B023
        assert kv.peek(differs) == length - 223
    assert equal[0] == equal[1] and differing[1] < 1.5 * differing[0], (equal, differing)


def test_a_decode_step_costs_the_same_at_any_length() -> None:
    lines = []
    for length in (6, 4002):
        kv, seq = allocator(pages=1200), sequence(1, length)
        write(kv, seq)
        seq.tokens.append(6)
        lines.append(lines_run(lambda: (kv.reserve(seq, length + 1), kv.publish(seq, length))))  # noqa: B023
    assert lines[0] == lines[1]
