"""The real engine on the toy device, with a clock that tests set."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dovetail.core.engine.engine import Engine
from dovetail.core.interfaces import RequestOptions, SamplingParams, Sequence, Status
from dovetail.core.testing.scheduler import SchedulerContract
from dovetail.core.testing.toy import expected_output


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """An engine and the outcome of its requests; a step takes one second."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine, self.clock = engine, clock
        engine.clock = clock
        self.sequences: dict[int, Sequence] = {}
        self.ended: dict[int, float] = {}
        self.rejected: dict[int, str] = {}

    def add(self, prompt: list[int], max_tokens: int = 4, **request: object) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        (seq,) = self.engine.add(prompt, params, RequestOptions(**request))  # type: ignore[arg-type]
        self.sequences[seq.uid] = seq
        return seq

    def step(self, times: int = 1) -> None:
        """Run engine steps; each launches a plan or collects a result."""
        for _ in range(times):
            self.clock.now += 1
            for event in self.engine.step():
                if event.detail:
                    self.rejected[event.uid] = event.detail
                if event.reason is not None:
                    self.ended[event.uid] = self.clock.now
            self.engine.kv.check()

    def run(self, limit: int = 5000) -> None:
        """Run to the end and compare every output with the toy model's."""
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work
        for uid, seq in self.sequences.items():
            assert seq.status is Status.FINISHED
            if uid not in self.rejected:
                prompt, params = list(seq.request.prompt_ids), seq.request.params
                limit_len = self.engine.limits.max_len
                assert seq.tokens[len(prompt) :] == expected_output(prompt, params.max_tokens, limit_len, True)

    @property
    def entries(self) -> list[int]:
        """Uids in order of admission, repeated after preemption."""
        return [join.uid for plan in self.engine.executor.plans for join in plan.joins]  # type: ignore[attr-defined]

    @property
    def preemptions(self) -> int:
        return self.engine.scheduler.stats().preemptions


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bench(clock: Clock) -> Callable[..., Bench]:
    """bench(SchedulerClass, config, **engine options of the contract suite)"""

    def build(scheduler: type, config: object, **limits: int) -> Bench:
        suite = SchedulerContract()
        suite.make = lambda limits, kv: scheduler(config, limits, kv)  # type: ignore[method-assign]
        return Bench(suite.engine(**limits), clock)

    return build
