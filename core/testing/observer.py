"""Contract suite for observers. Subclass ObserverContract in a test module and override `make`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from dovetail.core.compose import EngineConfig
from dovetail.core.engine.engine import Engine, start_engine
from dovetail.core.engine.policy import PolicyScheduler
from dovetail.core.interfaces import KVGroup, Observer, SamplingParams, StepRecord
from dovetail.core.testing.reference import default_allocator
from dovetail.core.testing.suite import lines_run
from dovetail.core.testing.toy import ToyComposition, ToyDevice

EMPTY = StepRecord(**dict.fromkeys((field.name for field in fields(StepRecord)), 0))


def records(count: int, seed: int = 0, first: int = 0) -> Iterator[StepRecord]:
    """Yield records of an idle, busy or full engine with a rising clock."""
    rng = random.Random(seed)
    clock = 1000.0 + first
    for step in range(first, first + count):
        clock += rng.choice([1e-6, 1e-3, 0.5])
        rows, drafted = rng.randrange(1, 300), rng.choice([0, 0, 40])
        yield StepRecord(
            step=step,
            clock=clock,
            rows=rows,
            tokens=rows + rng.choice([0, drafted, 8000]),
            sampled=rng.randrange(rows + drafted + 1),
            drafted=drafted,
            accepted=rng.randrange(drafted + 1),
            waiting=rng.choice([0, 0, 1, 10_000]),
            running=rows,
            kv_used=rng.choice([0.0, 1.0, rng.random()]),
            schedule_seconds=rng.choice([0.0, 1e-6, 0.2]),
            device_seconds=rng.choice([0.0, 1e-6, 0.2]),
        )


class ObservedComposition(ToyComposition):
    """ToyComposition with observers."""

    def __init__(self, observers: Mapping[str, Observer], *, lookahead: int = 2, depth: int = 2) -> None:
        groups = (KVGroup(0, (0,), page_tokens=4),)
        config = EngineConfig(token_budget=16, max_seqs=4, max_len=64, depth=depth)
        device = ToyDevice(groups, {0: 60}, max_seqs=4, max_len=64, lookahead=lookahead, delay=depth - 1)
        super().__init__(lambda limits, kv: PolicyScheduler(None, limits, kv), default_allocator, device, config)
        self.parts = {"observer": {name: _Built(observer) for name, observer in observers.items()}}

    def many(self, kind: str) -> Any:
        return self.parts[kind]


class _Built:
    def __init__(self, observer: Observer) -> None:
        self.observer = observer

    def build(self) -> Observer:
        return self.observer


def observed_engine(observers: Mapping[str, Observer]) -> Engine:
    return start_engine(ObservedComposition(observers))  # type: ignore[arg-type]


def serve(engine: Engine) -> dict[int, list[int]]:
    """Run five requests to completion and return their outputs by uid."""
    outputs: dict[int, list[int]] = {}
    for i in range(5):
        for seq in engine.add([1 + i, 2, 3] * (i + 1), SamplingParams(temperature=0, max_tokens=12)):
            outputs[seq.uid] = []
    while engine.has_work:
        for event in engine.step():
            outputs[event.uid] += event.tokens
    return outputs


class ObserverContract:
    """Tests of the rules of dovetail.core.interfaces.Observer. Only `make` must be overridden."""

    def make(self) -> Observer:
        raise NotImplementedError("return your observer: MyObserver(MyConfig())")

    def test_records_come_in_order_and_stay_as_they_are(self) -> None:
        """Records are shared by all observers, which may keep but not change them."""
        observer = self.make()
        for record in records(200):
            before = asdict(record)
            assert observer.step(record) is None, "step must return None"
            assert asdict(record) == before, "an observer must not change a record; others read it too"
        observer.close()

    def test_any_number_may_be_zero_or_large(self) -> None:
        """device_seconds is 0 if it is not measured, an idle engine has no rows, and a clock need not advance."""
        observer = self.make()
        numbers = [name for name in asdict(EMPTY) if name != "step"]
        steps = iter(range(1000))
        for record in (EMPTY, *(replace(EMPTY, **{name: value}) for name in numbers for value in (0, 1, 2**40))):
            observer.step(replace(record, step=next(steps)))
        observer.close()

    def test_close_is_idempotent(self) -> None:
        """close works with and without earlier steps, and twice."""
        for steps in (0, 1, 30):
            observer = self.make()
            for record in records(steps):
                observer.step(record)
            observer.close()
            observer.close()

    def test_observers_share_nothing(self) -> None:
        """Two engines in one process have one observer each; closing one must not affect the other."""
        first, second = self.make(), self.make()
        for record in records(20):
            first.step(record)
            second.step(replace(record, step=record.step + 500))
        first.close()
        for record in records(20, first=520):
            second.step(record)
        second.close()

    def test_a_step_costs_little(self) -> None:
        """The engine waits for step. Only the median counts, so some steps may take longer to write buffered data."""
        observer = self.make()
        seconds = []
        for record in records(100):
            began = time.perf_counter()
            observer.step(record)
            seconds.append(time.perf_counter() - began)
        observer.close()
        median = 1000 * statistics.median(seconds)
        assert median < 5, f"the engine waits for step: expected a median below 5 ms, got {median:.1f} ms"

    def test_a_step_costs_no_more_after_many(self) -> None:
        """Count lines of Python, a machine-independent measure."""
        observer = self.make()
        costs = []
        for first in (0, 3000):
            lines = [lines_run(lambda r=record: observer.step(r)) for record in records(31, 1, first)]  # type: ignore[misc]
            costs.append(statistics.median(lines))
            for record in records(3000 - 31, 2, first + 31):
                observer.step(record)
        observer.close()
        assert costs[1] <= 2 * costs[0] + 10, f"a step runs {costs[0]:.0f} lines, but {costs[1]:.0f} after 3000 steps"

    def test_the_engine_keeps_it_and_outputs_do_not_change(self) -> None:
        """The engine removes an observer that fails."""
        observer = self.make()
        engine = observed_engine({"mine": observer})
        outputs = serve(engine)
        assert engine.observers == {"mine": observer}, "the engine removed the observer because it failed (see the log)"
        engine.shutdown()
        engine.shutdown()
        alone = observed_engine({})
        assert outputs == serve(alone), "an observer must not change the engine's outputs"
        alone.shutdown()
