"""Routing: a prompt goes to its cached prefix unless the queue there costs more."""

from __future__ import annotations

import random

import pytest

from dovetail.core.interfaces import Arrival, ReplicaLoad
from dovetail.plugins.router.config import LeastLoadedConfig, PrefixAwareConfig, RoundRobinConfig
from dovetail.plugins.router.load import LeastLoaded, PrefixAware
from dovetail.plugins.router.round_robin import RoundRobin

IDLE = [ReplicaLoad(r) for r in range(3)]


def router(**options: int) -> PrefixAware:
    return PrefixAware(PrefixAwareConfig(**options), 3)


def prompt(seed: int, tokens: int = 640) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(5000), k=tokens))


def test_a_conversation_stays_where_it_began() -> None:
    route = router().route
    first = [route(Arrival(prompt(seed)), IDLE) for seed in range(6)]
    assert first == [0, 1, 2, 0, 1, 2], "ties alternate between replicas"
    later = [route(Arrival(prompt(seed) + prompt(99, 200)), IDLE) for seed in range(6)]
    assert later == first


def test_a_queue_outweighs_a_prefix_when_it_is_longer() -> None:
    route = router(sample_tokens=100).route
    home = route(Arrival(prompt(1)), IDLE)
    busy = [ReplicaLoad(r, samples=6 if r == home else 0) for r in range(3)]
    assert route(Arrival(prompt(1)), busy) == home, "640 tokens are cached, and 600 are queued"
    busy = [ReplicaLoad(r, samples=7 if r == home else 0) for r in range(3)]
    assert route(Arrival(prompt(1)), busy) != home, "700 are queued"
    waiting = [ReplicaLoad(r, prompt_tokens=700 if r == home else 0) for r in range(3)]
    assert route(Arrival(prompt(1, 650)[:639]), waiting) != home


def test_many_requests_of_one_prefix_get_every_replica() -> None:
    """512 requests with a common prefix of 800 tokens: each replica computes it once, and all have equal load."""
    route = router().route
    sent, tokens = [0] * 3, [0] * 3
    for seed in range(512):
        loads = [ReplicaLoad(r, sent[r], tokens[r]) for r in range(3)]
        chosen = route(Arrival(prompt(1, 800) + prompt(seed, 200)), loads)
        sent[chosen] += 1
        tokens[chosen] += 1000
    assert max(sent) - min(sent) <= 2, sent


def test_salts_do_not_share() -> None:
    route = router().route
    first = route(Arrival(prompt(1), cache_salt="a"), IDLE)
    assert route(Arrival(prompt(1), cache_salt="b"), IDLE) != first
    assert route(Arrival(prompt(1), cache_salt="a"), IDLE) == first


def test_a_prefix_is_compared_in_whole_blocks() -> None:
    route = router(block_tokens=64).route
    home = route(Arrival(prompt(1, 63)), IDLE)
    elsewhere = [ReplicaLoad(r, samples=r == home) for r in range(3)]
    assert route(Arrival(prompt(1, 63)), elsewhere) != home, "a prompt shorter than a block is not remembered"


def test_forgotten_and_dropped_prefixes_do_not_count() -> None:
    some = router()
    home = some.route(Arrival(prompt(1)), IDLE)
    some.forget(home)
    nudge = [ReplicaLoad(r, prompt_tokens=r == home) for r in range(3)]
    assert some.route(Arrival(prompt(1)), nudge) != home

    small = router(blocks=10)
    home = small.route(Arrival(prompt(1)), IDLE)
    for seed in range(2, 5):
        small.route(Arrival(prompt(seed)), IDLE)
    assert len(small._seen) == 30
    nudge = [ReplicaLoad(r, prompt_tokens=r == home) for r in range(3)]
    assert small.route(Arrival(prompt(1)), nudge) != home


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ([ReplicaLoad(0, 2), ReplicaLoad(1, 1), ReplicaLoad(2, 3)], 1),
        ([ReplicaLoad(0, 1, 2000), ReplicaLoad(2, 2, 100)], 2),
        ([ReplicaLoad(1, 1), ReplicaLoad(2, 1)], 1),
    ],
)
def test_least_loaded(loads: list[ReplicaLoad], chosen: int) -> None:
    assert LeastLoaded(LeastLoadedConfig(), 3).route(Arrival((1,)), loads) == chosen


def test_round_robin_skips_unavailable_replicas() -> None:
    route = RoundRobin(RoundRobinConfig(), 3).route
    assert [route(Arrival((1,)), IDLE) for _ in range(4)] == [0, 1, 2, 0]
    assert [route(Arrival((1,)), [IDLE[0], IDLE[2]]) for _ in range(3)] == [2, 0, 2]
