"""Contract suite for routers. Subclass RouterContract in a test module and override `make`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy

from dovetail.core.interfaces import Arrival, ReplicaLoad, Router
from dovetail.core.testing.suite import assert_torch_free, lines_run

Call = tuple[Arrival, list[ReplicaLoad]]


class RouterContract:
    """Tests of the rules of dovetail.core.interfaces.Router. Only `make` must be overridden."""

    replicas = 4
    """Number of replicas."""

    def make(self, replicas: int) -> Router:
        """Return a fresh router for this number of replicas."""
        raise NotImplementedError("return your router: MyRouter(MyConfig(...), replicas)")

    # Drivers

    def calls(self, number: int, seed: int = 1) -> list[Call]:
        """Return random requests, some with a common prefix, each with the loads of some of the replicas."""
        rng = random.Random(seed)
        prefixes = [tuple(rng.choices(range(1000), k=rng.randint(1, 700))) for _ in range(5)]
        made: list[Call] = []
        for _ in range(number):
            own = tuple(rng.choices(range(1000), k=rng.randint(1, 300)))
            arrival = Arrival(
                rng.choice([*prefixes, ()]) + own,
                samples=rng.randint(1, 3),
                cache_salt=rng.choice(["", "team-a", "\u00e9"]),
                user=rng.choice(["", "ann", "bob"]),
                priority=rng.randint(-1, 1),
                hints=rng.choice([{}, {"length": 0.5}]),
            )
            there = sorted(rng.sample(range(self.replicas), rng.randint(1, self.replicas)))
            made.append((arrival, [self.load(replica, rng) for replica in there]))
        return made

    @staticmethod
    def load(replica: int, rng: random.Random) -> ReplicaLoad:
        samples = rng.choice([0, 1, rng.randint(0, 300)])
        return ReplicaLoad(replica, samples, rng.randint(0, 500) * samples, rng.random() if samples else 0.0)

    def spread(self, prompts: Sequence[tuple[int, ...]], salt: str = "") -> Counter[int]:
        """Return the number of requests per replica when all arrive and none ends."""
        router, sent, tokens = self.make(self.replicas), Counter[int](), Counter[int]()
        for ids in prompts:
            loads = [ReplicaLoad(r, sent[r], tokens[r]) for r in range(self.replicas)]
            chosen = router.route(Arrival(ids, cache_salt=salt), loads)
            sent[chosen] += 1
            tokens[chosen] += len(ids)
        return sent

    # Tests

    def test_it_chooses_an_available_replica(self) -> None:
        router = self.make(self.replicas)
        for arrival, loads in self.calls(200):
            chosen = router.route(arrival, loads)
            there = [load.replica for load in loads]
            assert type(chosen) is int and chosen in there, f"route must return one of {there}, got {chosen!r}"

    def test_equal_calls_give_equal_choices(self) -> None:
        """Choices do not depend on global random generators."""
        first, again = self.make(self.replicas), self.make(self.replicas)
        calls = self.calls(200)
        random.seed(1)
        expected = [first.route(*call) for call in calls]
        random.seed(2)
        assert [again.route(*call) for call in calls] == expected, "equal calls must give equal choices"

    def test_it_does_not_change_its_arguments(self) -> None:
        router = self.make(self.replicas)
        for call in self.calls(30):
            before = deepcopy(call)
            router.route(*call)
            assert call == before, "route must not change its arguments"

    def test_every_replica_gets_work_when_none_ends(self) -> None:
        """Requests are spread over replicas, for prompts with nothing in common as well as for equal ones."""
        rng = random.Random(3)
        unlike = [tuple(rng.choices(range(1000), k=200)) for _ in range(40 * self.replicas)]
        for prompts in (unlike, [unlike[0]] * len(unlike)):
            sent = self.spread(prompts)
            fair = len(sent) == self.replicas and max(sent.values()) <= len(prompts) / 2
            assert fair, f"each replica must get some and at most half of {len(prompts)} requests, got {dict(sent)}"

    def test_a_restarted_replica_gets_work(self) -> None:
        """It has been forgotten and is idle while all others are busy."""
        router = self.make(self.replicas)
        calls = self.calls(60, seed=4)
        for arrival, loads in calls:
            router.route(arrival, loads)
        for replica in range(self.replicas):
            router.forget(replica)
            router.forget(replica)
            busy = [ReplicaLoad(r, *((0, 0) if r == replica else (200, 50_000))) for r in range(self.replicas)]
            chosen = Counter(router.route(arrival, busy) for arrival, _ in calls)
            assert chosen[replica], f"replica {replica} is idle, the others are busy, but it got no request: {chosen}"

    def test_cost_does_not_grow_with_routed_requests(self) -> None:
        """Count lines of Python, since a server routes millions of requests."""
        router = self.make(self.replicas)
        early, late = self.calls(20, seed=5), self.calls(20, seed=8)
        for arrival, loads in self.calls(100, seed=6):
            router.route(arrival, loads)
        before = lines_run(lambda: [router.route(*call) for call in early])
        for arrival, loads in self.calls(2000, seed=7):
            router.route(arrival, loads)
        after = lines_run(lambda: [router.route(*call) for call in late])
        assert after < 3 * before + 100, f"20 requests cost {before} lines, and {after} after 2000 more requests"

    def test_it_needs_no_torch(self) -> None:
        module = type(self.make(self.replicas)).__module__
        if not module.rpartition(".")[2].startswith("test_"):  # a test module may import torch
            assert_torch_free(module)
