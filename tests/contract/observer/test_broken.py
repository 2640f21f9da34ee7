"""Observers with one fault each; the suite must reject them."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest

from dovetail.core.interfaces import Observer, StepRecord
from dovetail.core.testing.observer import ObserverContract
from dovetail.core.testing.suite import failures


class Speed(Observer):
    """Correct: tokens per second since the first step."""

    speed = 0.0

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.tokens = 0
        self.began: float | None = None

    def step(self, record: StepRecord) -> None:
        if self.began is None:
            self.began = record.clock
        self.tokens += record.sampled
        if record.clock > self.began:
            self.speed = self.tokens / (record.clock - self.began)


class DividesByTheDevice(Speed):
    def step(self, record: StepRecord) -> None:
        super().step(record)
        self.rate = record.sampled / record.device_seconds


class CountsInItsRecords(Speed):
    def step(self, record: StepRecord) -> None:
        super().step(record)
        object.__setattr__(record, "sampled", self.tokens)


class ClosesOnce(Speed):
    def close(self) -> None:
        del self.tokens


class ClosesWhatIsOpen(Speed):
    """Opens its file at the first step; close fails without one."""

    def step(self, record: StepRecord) -> None:
        super().step(record)
        self.file: list[StepRecord] = []

    def close(self) -> None:
        self.file.clear()


class SharesItsState(Speed):
    open: ClassVar[set[str]] = set()

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.open.add("file")

    def step(self, record: StepRecord) -> None:
        super().step(record)
        assert self.open, "the file is closed"

    def close(self) -> None:
        self.open.clear()


class Waits(Speed):
    def step(self, record: StepRecord) -> None:
        super().step(record)
        time.sleep(0.01)


class AddsUpAnew(Speed):
    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)
        total = 0
        for known in self.records:
            total += known.sampled
        self.tokens = total


class Answers(Speed):
    def step(self, record: StepRecord) -> None:
        super().step(record)
        return self.speed  # type: ignore[return-value]


class FailsInTheEngine(Speed):
    """Fails on values that only a real engine produces."""

    def step(self, record: StepRecord) -> None:
        super().step(record)
        assert not 1 <= record.running <= 4


BROKEN: dict[type[Observer], str] = {
    DividesByTheDevice: "test_any_number_may_be_zero_or_large",
    CountsInItsRecords: "test_records_come_in_order_and_stay_as_they_are",
    Answers: "test_records_come_in_order_and_stay_as_they_are",
    ClosesOnce: "test_close_is_idempotent",
    ClosesWhatIsOpen: "test_close_is_idempotent",
    SharesItsState: "test_observers_share_nothing",
    Waits: "test_a_step_costs_little",
    AddsUpAnew: "test_a_step_costs_no_more_after_many",
    FailsInTheEngine: "test_the_engine_keeps_it_and_outputs_do_not_change",
}


def suite_of(observer: type[Observer]) -> ObserverContract:
    class Suite(ObserverContract):
        def make(self) -> Observer:
            return observer(None)

    return Suite()


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_the_suite_rejects(broken: type[Observer], test: str) -> None:
    others = tuple(name for name in dir(ObserverContract) if name != test)
    assert test in failures(suite_of(broken), skip=others), f"the suite accepts it: {broken.__doc__}"


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Speed)) == {}
