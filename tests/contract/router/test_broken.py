"""Routers with one fault each; the suite must reject each by the named test."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from dovetail.core.interfaces import Arrival, ReplicaLoad, Router
from dovetail.core.testing.router import RouterContract
from dovetail.core.testing.suite import failures


class Sound(Router):
    """Correct."""

    def __init__(self, replicas: int) -> None:
        super().__init__(None, replicas)
        self.routed: list[Arrival] = []

    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        return min(loads, key=lambda load: load.samples).replica


class AnyReplica(Sound):
    """Also returns replicas that are not in `loads`."""

    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        return len(arrival.prompt_ids) % self.replicas


class PlaceInTheList(Sound):
    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        return min(range(len(loads)), key=lambda i: loads[i].samples)


class Draws(Sound):
    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        return random.choice(loads).replica


class Sorts(Sound):
    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        loads.sort(key=lambda load: load.samples)  # type: ignore[attr-defined]
        return loads[0].replica


class StaysWithAPrefix(Sound):
    """Follows the prefix regardless of the queue length."""

    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        return loads[sum(arrival.prompt_ids[:64]) % len(loads)].replica


class FirstComeFirstBurdened(Sound):
    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        return loads[0].replica


class NeverForgives(Sound):
    """Avoids a replica for good after `forget`."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.away: set[int] = set()

    def forget(self, replica: int) -> None:
        self.away.add(replica)

    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        return min(loads, key=lambda load: (load.replica in self.away, load.samples)).replica


class ReadsItAllAgain(Sound):
    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        self.routed.append(arrival)
        for other in self.routed:
            if other.prompt_ids == arrival.prompt_ids:
                break
        return super().route(arrival, loads)


BROKEN: dict[type[Sound], str] = {
    AnyReplica: "test_it_chooses_an_available_replica",
    PlaceInTheList: "test_it_chooses_an_available_replica",
    Draws: "test_equal_calls_give_equal_choices",
    Sorts: "test_it_does_not_change_its_arguments",
    StaysWithAPrefix: "test_every_replica_gets_work_when_none_ends",
    FirstComeFirstBurdened: "test_every_replica_gets_work_when_none_ends",
    NeverForgives: "test_a_restarted_replica_gets_work",
    ReadsItAllAgain: "test_cost_does_not_grow_with_routed_requests",
}


def suite_of(router: type[Sound]) -> RouterContract:
    class Suite(RouterContract):
        def make(self, replicas: int) -> Router:
            return router(replicas)

    return Suite()


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_the_suite_rejects(broken: type[Sound], test: str) -> None:
    assert test in failures(suite_of(broken))


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}
