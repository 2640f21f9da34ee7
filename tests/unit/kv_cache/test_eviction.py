from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from dovetail import EvictionPolicy, Host, compose
from dovetail.core.errors import ConfigError, PluginError
from dovetail.core.memory.eviction import ATTENTION_PAGES, BUILT_IN, FIFO, LFU, LRU, CostAware, load_policy
from dovetail.plugins.kv_cache.config import POLICIES


def publish(policy: EvictionPolicy, *prefixes: Sequence[int]) -> None:
    """Publish pages of prefixes, first page first; they stay owned."""
    for prefix in prefixes:
        for depth, page in enumerate(prefix):
            policy.on_publish(page, depth, prefix[depth - 1] if depth else 0)


def release(policy: EvictionPolicy, *prefixes: Sequence[int]) -> None:
    for prefix in prefixes:
        for page in reversed(prefix):
            policy.on_release(page)


def use(policy: EvictionPolicy, *prefix: int) -> None:
    for page in prefix:
        policy.on_hit(page)
    release(policy, prefix)


def victims(policy: EvictionPolicy, count: int) -> list[int]:
    return [policy.victim() for _ in range(count)]


def cached(policy: EvictionPolicy, *prefixes: Sequence[int]) -> EvictionPolicy:
    publish(policy, *prefixes)
    release(policy, *prefixes)
    return policy


def test_lru_evicts_the_least_recently_used() -> None:
    policy = cached(LRU(), [1], [2], [3])
    use(policy, 1)
    assert victims(policy, 3) == [2, 3, 1]


def test_fifo_evicts_the_first_published_despite_hits() -> None:
    policy = cached(FIFO(), [1], [2], [3])
    use(policy, 1)
    assert victims(policy, 3) == [1, 2, 3]


def test_fifo_skips_owned_pages_and_keeps_their_place() -> None:
    policy = cached(FIFO(), [1], [2], [3])
    policy.on_hit(1)
    assert policy.victim() == 2
    policy.on_release(1)
    assert victims(policy, 2) == [1, 3]


def test_fifo_treats_a_republished_page_as_new() -> None:
    policy = cached(FIFO(), [1], [2])
    policy.on_hit(1)
    publish(policy, [1])
    policy.on_release(1)
    assert victims(policy, 2) == [2, 1]


def test_lfu_evicts_the_least_frequently_then_least_recently_used() -> None:
    policy = cached(LFU(), [1], [2], [3], [4])
    use(policy, 1)
    use(policy, 1)
    use(policy, 2)
    assert victims(policy, 4) == [3, 4, 2, 1]


def test_lfu_counts_hits_of_owned_pages() -> None:
    policy = LFU()
    publish(policy, [1], [2])
    policy.on_hit(1)
    release(policy, [1], [2])
    assert victims(policy, 2) == [2, 1]


def test_cost_evicts_what_is_cheap_to_recompute() -> None:
    deep = list(range(1, 21))
    policy = cached(CostAware(), deep, [101, 102])
    assert victims(policy, 3) == [102, 101, 20]


def test_cost_weighs_depth_by_uses() -> None:
    deep = list(range(1, ATTENTION_PAGES + 2))
    twice, thrice = [5001], [5002]
    policy = cached(CostAware(), deep, twice, thrice)
    use(policy, *twice)
    use(policy, *thrice)
    use(policy, *thrice)
    # Its last page costs as much as two at the start; ties go by age.
    assert victims(policy, 2) == [deep[-1], deep[-2]]
    assert victims(policy, len(deep) - 1)[-2:] == [1, *twice]


def test_cost_discounts_old_uses() -> None:
    policy = cached(CostAware(), [1])
    for _ in range(3):
        use(policy, 1)
    evicted = []
    for page in range(2, 8):
        cached(policy, [page])
        evicted.append(policy.victim())
        cached(policy, [page + 100])
        use(policy, page + 100)
    assert 1 in evicted


@pytest.mark.parametrize("policy", [name for name in BUILT_IN if name != "lru"])
def test_ranks_cost_no_memory(policy: str) -> None:
    made = cached(BUILT_IN[policy](), [1], [2])
    for _ in range(1000):
        use(made, 1)
    assert len(made._heap) < 100  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", BUILT_IN)
def test_a_prefix_goes_from_its_end(policy: str) -> None:
    """No reachable page is left behind an evicted one, whatever the pattern of use."""
    rng = random.Random(policy)
    made, parent = BUILT_IN[policy](), {}
    prefixes: list[list[int]] = []
    for page in range(1, 200):
        above = rng.choice(prefixes) if prefixes and rng.random() < 0.7 else []
        parent[page] = above[-1] if above else 0
        prefixes.append([*above, page])
        for found in above:
            made.on_hit(found)
        made.on_publish(page, len(above), parent[page])
        release(made, prefixes[-1])
        if rng.random() < 0.5:
            use(made, *rng.choice(prefixes))
    left = set(parent)
    for _ in range(len(parent)):
        left.remove(gone := made.victim())
        assert gone not in {parent[page] for page in left}


def test_a_policy_is_loaded_by_path() -> None:
    assert load_policy("dovetail.core.memory.eviction:FIFO") is FIFO


def test_the_config_knows_the_built_in_ones() -> None:
    assert tuple(BUILT_IN) == POLICIES


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("random", "lru, fifo, lfu, cost, or package.module:Class"),
        ("no_such_package_here:Policy", "no_such_package_here"),
        ("dovetail.core.memory.eviction:Clock", "Clock"),
        ("collections:OrderedDict", "lacks on_publish, on_release, on_hit, victim"),
    ],
)
def test_a_policy_that_cannot_be_loaded_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy(name)


def test_a_policy_is_loaded_before_weights_are() -> None:
    for kind in ("prefix_hash", "radix"):
        composition = compose([f"kv_cache={kind}", "kv_cache.eviction=no_such_package_here:Policy"])
        with pytest.raises(ConfigError, match="no_such_package_here"):
            composition.check(Host())


METHODS = """
class Policy:
    def on_publish(self, page, depth, parent): ...
    def on_release(self, page): ...
    def on_hit(self, page): ...
    def victim(self): ...
"""


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("1 / 0", PluginError, r"package faulty_\w+: .* does not load: ZeroDivisionError"),
        ("Policy = (", PluginError, "does not load: SyntaxError"),
        ("Policy = 3", ConfigError, "lacks on_publish"),
        (METHODS + "    def __init__(self, size): ...", PluginError, r"Policy\(\) failed: TypeError"),
        (METHODS.replace(", parent", ""), ConfigError, r"cannot be called as on_publish\(page, depth, parent\)"),
    ],
)
def test_a_faulty_policy_is_a_clear_error(
    source: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"faulty_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=message):
        load_policy(f"{module}:Policy")
