"""Workloads with one fault each; the suite must reject each by the named test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import TimedRequest, Workload, WorkloadContext
from dovetail.core.testing.suite import failures
from dovetail.core.testing.workload import WorkloadContract


class Sound(Workload):
    """Correct."""

    def __init__(self) -> None:
        super().__init__(None)

    def rates(self) -> Sequence[float | None]:
        return (4.0, 8.0)

    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        if ctx.max_len < 10:
            raise ConfigError(f"10 tokens do not fit into {ctx.max_len}")
        assert ctx.rate is not None
        rng, clock, found = self.rng(ctx), 0.0, []
        for _ in range(200):
            found.append(TimedRequest(tuple(rng.choices(range(ctx.vocab), k=6)), 4, clock))
            clock += rng.expovariate(ctx.rate)
        return found

    def rng(self, ctx: WorkloadContext) -> random.Random:
        return random.Random(ctx.seed)


class NoRate(Sound):
    def rates(self) -> Sequence[float | None]:
        return ()


class NothingToDo(Sound):
    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        return []


class OneIdTooMany(Sound):
    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        return [replace(r, prompt_ids=(*r.prompt_ids[1:], ctx.vocab)) for r in super().requests(ctx)]


class OwnVocabulary(Sound):
    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        return super().requests(replace(ctx, vocab=100))


class EmptyOutput(Sound):
    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        first, *others = super().requests(ctx)
        return [replace(first, output_tokens=0), *others]


class Backwards(Sound):
    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        return list(super().requests(ctx))[::-1]


class TwiceAsFast(Sound):
    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        return [replace(r, arrival=r.arrival / 3) for r in super().requests(ctx)]


class GlobalDraws(Sound):
    def rng(self, ctx: WorkloadContext) -> random.Random:
        return random._inst  # type: ignore[attr-defined]


class Remembers(Sound):
    """Continues from the previous call."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = random.Random(0)

    def rng(self, ctx: WorkloadContext) -> random.Random:
        return self.kept


class AnyLength(Sound):
    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        return super().requests(replace(ctx, max_len=10))


BROKEN: dict[type[Workload], str] = {
    NoRate: "test_there_is_a_run",
    NothingToDo: "test_there_is_a_run",
    OneIdTooMany: "test_every_request_can_run",
    OwnVocabulary: "test_ids_stay_in_a_small_vocabulary",
    EmptyOutput: "test_every_request_can_run",
    Backwards: "test_requests_come_in_order",
    TwiceAsFast: "test_the_rate_is_the_requested_one",
    GlobalDraws: "test_equal_seeds_give_equal_requests",
    Remembers: "test_equal_seeds_give_equal_requests",
    AnyLength: "test_too_long_requests_are_refused",
}


def suite_of(workload: type[Sound]) -> WorkloadContract:
    class Suite(WorkloadContract):
        def make(self) -> Workload:
            return workload()

    return Suite()


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_the_suite_rejects(broken: type[Sound], test: str) -> None:
    assert test in failures(suite_of(broken))


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}
