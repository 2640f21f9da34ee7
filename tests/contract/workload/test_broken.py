"""Workloads with one fault each; the suite must reject each by the named test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import SamplingParams, TimedRequest, Workload, WorkloadContext
from dovetail.core.testing.suite import failures
from dovetail.core.testing.workload import WorkloadContract

from ..faults import each, rejects, suite, variant


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


fault = partial(variant, Sound)


class EmptyOutput(Sound):
    def requests(self, ctx: WorkloadContext) -> Sequence[TimedRequest]:
        first, *others = super().requests(ctx)
        return [replace(first, output_tokens=0), *others]


class Remembers(Sound):
    """Continues from the previous call."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = random.Random(0)

    def rng(self, ctx: WorkloadContext) -> random.Random:
        return self.kept


BROKEN: dict[str, list[type[Sound]]] = {
    "test_there_is_a_run": [
        fault("NoRate", rates=lambda self: ()),
        fault("NothingToDo", requests=lambda self, ctx: []),
    ],
    "test_every_request_can_run": [
        fault(
            "OneIdTooMany",
            requests=lambda self, ctx: [
                replace(r, prompt_ids=(*r.prompt_ids[1:], ctx.vocab)) for r in Sound.requests(self, ctx)
            ],
        ),
        fault(
            "Embeds",
            requests=lambda self, ctx: [replace(r, pooling="last") for r in Sound.requests(self, ctx)],
        ),
        fault(
            "StopsEarly",
            requests=lambda self, ctx: [
                replace(r, sampling=SamplingParams(stop=("a",))) for r in Sound.requests(self, ctx)
            ],
        ),
        EmptyOutput,
    ],
    "test_conversations_follow_earlier_requests_and_fit": [
        fault(
            "ContinuesItself",
            requests=lambda self, ctx: [replace(r, continues=0) for r in Sound.requests(self, ctx)],
        ),
        fault(
            "GrowsWithoutEnd",
            requests=lambda self, ctx: [
                replace(r, continues=i - 1 if i else None) for i, r in enumerate(list(Sound.requests(self, ctx)) * 5)
            ],
        ),
    ],
    "test_ids_stay_in_a_small_vocabulary": [
        fault("OwnVocabulary", requests=lambda self, ctx: Sound.requests(self, replace(ctx, vocab=100)))
    ],
    "test_requests_come_in_order": [
        fault("Backwards", requests=lambda self, ctx: list(Sound.requests(self, ctx))[::-1])
    ],
    "test_the_rate_is_the_requested_one": [
        fault(
            "TwiceAsFast",
            requests=lambda self, ctx: [replace(r, arrival=r.arrival / 3) for r in Sound.requests(self, ctx)],
        )
    ],
    "test_equal_seeds_give_equal_requests": [
        fault("GlobalDraws", rng=lambda self, ctx: random._inst),  # type: ignore[attr-defined]
        Remembers,
    ],
    "test_too_long_requests_are_refused": [
        fault("AnyLength", requests=lambda self, ctx: Sound.requests(self, replace(ctx, max_len=10)))
    ],
}


def suite_of(workload: type[Sound]) -> WorkloadContract:
    return suite(WorkloadContract, make=lambda self: workload())


@each(BROKEN)
def test_the_suite_rejects(broken: type[Sound], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Sound)) == {}
