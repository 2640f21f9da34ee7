"""The contract suite of routers. Subclass RouterContract in a test module and override `make`."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy

from dovetail.core.interfaces import Arrival, ReplicaLoad, Router
from dovetail.core.testing.suite import lines_run

Call = tuple[Arrival, list[ReplicaLoad]]


class RouterContract:
    """Every sentence of dovetail.core.interfaces.Router. `make` is the only thing that must be overridden."""

    replicas = 4
    """For which routers are made."""

    def make(self, replicas: int) -> Router:
        """A fresh router for so many replicas."""
        raise NotImplementedError("return your router: MyRouter(MyConfig(...), replicas)")

    # Drivers.

    def calls(self, number: int, seed: int = 1) -> list[Call]:
        """Requests of every sort, some with a prefix in common, while any of the replicas may be missing."""
        rng = random.Random(seed)
        prefixes = [tuple(rng.choices(range(1000), k=rng.randint(1, 700))) for _ in range(5)]
        made: list[Call] = []
        for _ in range(number):
            own = tuple(rng.choices(range(1000), k=rng.randint(1, 300)))
            arrival = Arrival(
                rng.choice([*prefixes, ()]) + own,
                samples=rng.randint(1, 3),
                cache_salt=rng.choice(["", "team-a", "\ud800"]),
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
        """Requests per replica when all arrive and none ends."""
        router, sent, tokens = self.make(self.replicas), Counter[int](), Counter[int]()
        for ids in prompts:
            loads = [ReplicaLoad(r, sent[r], tokens[r]) for r in range(self.replicas)]
            chosen = router.route(Arrival(ids, cache_salt=salt), loads)
            sent[chosen] += 1
            tokens[chosen] += len(ids)
        return sent

    # Tests.

    def test_it_chooses_one_that_takes_requests(self) -> None:
        router = self.make(self.replicas)
        for arrival, loads in self.calls(200):
            chosen = router.route(arrival, loads)
            there = [load.replica for load in loads]
            assert type(chosen) is int and chosen in there, f"replica {chosen!r} of {there}"

    def test_equal_calls_give_equal_choices(self) -> None:
        """Whatever was drawn before, and from whatever global generator."""
        first, again = self.make(self.replicas), self.make(self.replicas)
        calls = self.calls(200)
        random.seed(1)
        expected = [first.route(*call) for call in calls]
        random.seed(2)
        assert [again.route(*call) for call in calls] == expected

    def test_it_changes_nothing_that_it_is_given(self) -> None:
        router = self.make(self.replicas)
        for call in self.calls(30):
            before = deepcopy(call)
            router.route(*call)
            assert call == before

    def test_every_replica_gets_work_when_none_ends(self) -> None:
        """Prompts that have nothing in common, and prompts that have everything: one replica is never left with all of
        them."""
        rng = random.Random(3)
        unlike = [tuple(rng.choices(range(1000), k=200)) for _ in range(40 * self.replicas)]
        for prompts in (unlike, [unlike[0]] * len(unlike)):
            sent = self.spread(prompts)
            assert len(sent) == self.replicas, f"of {len(prompts)} requests the replicas got {dict(sent)}"
            assert max(sent.values()) <= len(prompts) / 2, f"of {len(prompts)} requests the replicas got {dict(sent)}"

    def test_a_replica_that_comes_back_gets_work(self) -> None:
        """It was away, and forgotten, and nothing else is free."""
        router = self.make(self.replicas)
        calls = self.calls(60, seed=4)
        for arrival, loads in calls:
            router.route(arrival, loads)
        for replica in range(self.replicas):
            router.forget(replica)
            router.forget(replica)
            busy = [
                ReplicaLoad(r, 0 if r == replica else 200, 0 if r == replica else 50_000) for r in range(self.replicas)
            ]
            chosen = Counter(router.route(arrival, busy) for arrival, _ in calls)
            assert chosen[replica], f"replica {replica} is idle and got none of {len(calls)} requests"

    def test_work_does_not_grow_with_what_was_routed(self) -> None:
        """A server routes millions of requests."""
        router = self.make(self.replicas)
        early, late = self.calls(20, seed=5), self.calls(20, seed=8)
        for arrival, loads in self.calls(100, seed=6):
            router.route(arrival, loads)
        before = lines_run(lambda: [router.route(*call) for call in early])
        for arrival, loads in self.calls(2000, seed=7):
            router.route(arrival, loads)
        after = lines_run(lambda: [router.route(*call) for call in late])
        assert after < 3 * before + 100, f"{before} lines for 20 requests, and {after} after 2000 more"

    def test_it_needs_no_torch(self) -> None:
        module = type(self.make(self.replicas)).__module__
        code = f"import sys, {module}; raise SystemExit('torch' in sys.modules)"
        if module.rpartition(".")[2].startswith("test_"):
            return  # a test's own; what it imports is its business
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr or f"importing {module} loads torch"
