from __future__ import annotations

import pytest

from dovetail.core.errors import ConfigError
from dovetail.core.memory.eviction import FIFO, LRU, EvictionPolicy, load_policy


def released(policy: EvictionPolicy, *pages: int) -> None:
    for depth, page in enumerate(pages):
        policy.on_publish(page, depth)
    for page in pages:
        policy.on_release(page)


def test_lru_forgets_whoever_was_used_longest_ago() -> None:
    policy = LRU()
    released(policy, 1, 2, 3)
    policy.on_hit(1)
    policy.on_release(1)
    assert [policy.victim() for _ in range(3)] == [2, 3, 1]


def test_fifo_forgets_whoever_was_published_first_despite_hits() -> None:
    policy = FIFO()
    released(policy, 1, 2, 3)
    policy.on_hit(1)
    policy.on_release(1)
    assert [policy.victim() for _ in range(3)] == [1, 2, 3]


def test_fifo_skips_owned_pages_and_keeps_their_place() -> None:
    policy = FIFO()
    released(policy, 1, 2, 3)
    policy.on_hit(1)
    assert policy.victim() == 2
    policy.on_release(1)
    assert [policy.victim(), policy.victim()] == [1, 3]


def test_fifo_counts_a_republished_page_anew() -> None:
    policy = FIFO()
    released(policy, 1, 2)
    policy.on_hit(1)
    policy.on_publish(1, 0)
    policy.on_release(1)
    assert [policy.victim(), policy.victim()] == [2, 1]


def test_fifo_does_not_grow_with_hits() -> None:
    policy = FIFO()
    released(policy, 1, 2)
    for _ in range(100):
        policy.on_hit(1)
        policy.on_release(1)
    assert len(policy._heap) == 2


def test_a_policy_is_loaded_by_path() -> None:
    assert load_policy("dovetail.core.memory.eviction:FIFO") is FIFO


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("random", "lru, fifo, or package.module:Class"),
        ("no_such_package_here:Policy", "no_such_package_here"),
        ("dovetail.core.memory.eviction:Clock", "Clock"),
        ("collections:OrderedDict", "lacks on_publish, on_release, on_hit, victim"),
    ],
)
def test_a_policy_that_cannot_be_loaded_is_named(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_policy(name)
