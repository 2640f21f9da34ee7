"""Routers with one fault each; the suite must reject each by the named test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from dovetail.core.interfaces import Arrival, ReplicaLoad, Router
from dovetail.core.testing.router import RouterContract
from dovetail.core.testing.suite import failures

from ..faults import each, rejects, suite, variant


class Sound(Router):
    """Correct."""

    def __init__(self, replicas: int) -> None:
        super().__init__(None, replicas)
        self.routed: list[Arrival] = []

    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        return min(loads, key=lambda load: load.samples).replica


fault = partial(variant, Sound)


class Sorts(Sound):
    def route(self, arrival: Arrival, loads: Sequence[ReplicaLoad]) -> int:
        loads.sort(key=lambda load: load.samples)  # type: ignore[attr-defined]
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


BROKEN: dict[str, list[type[Sound]]] = {
    "test_it_chooses_an_available_replica": [
        # Also returns replicas that are not in `loads`.
        fault("AnyReplica", route=lambda self, arrival, loads: len(arrival.prompt_ids) % self.replicas),
        fault(
            "PlaceInTheList", route=lambda self, arrival, loads: min(range(len(loads)), key=lambda i: loads[i].samples)
        ),
    ],
    "test_equal_calls_give_equal_choices": [
        fault("Draws", route=lambda self, arrival, loads: random.choice(loads).replica)
    ],
    "test_it_does_not_change_its_arguments": [Sorts],
    "test_every_replica_gets_work_when_none_ends": [
        # Follows the prefix regardless of the queue length.
        fault(
            "StaysWithAPrefix",
            route=lambda self, arrival, loads: loads[sum(arrival.prompt_ids[:64]) % len(loads)].replica,
        ),
        fault("FirstComeFirstBurdened", route=lambda self, arrival, loads: loads[0].replica),
    ],
    "test_a_restarted_replica_gets_work": [NeverForgives],
    "test_cost_does_not_grow_with_routed_requests": [ReadsItAllAgain],
}


def suite_of(router: type[Sound]) -> RouterContract:
    return suite(RouterContract, make=lambda self, replicas: router(replicas))


@each(BROKEN)
def test_the_suite_rejects(broken: type[Sound], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}
