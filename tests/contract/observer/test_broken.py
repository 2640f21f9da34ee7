"""Observers with one fault each; the suite must reject them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from dovetail.core.interfaces import Observer, StepRecord
from dovetail.core.testing.observer import ObserverContract
from dovetail.core.testing.suite import failures

from ..faults import each, rejects, suite, variant


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


def does(name: str, extra: Callable[[Speed, StepRecord], object]) -> type[Speed]:
    """Observer that does something more with each record."""

    def step(self: Speed, record: StepRecord) -> object:
        Speed.step(self, record)
        return extra(self, record)

    return variant(Speed, name, step=step)


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


class FailsInTheEngine(Speed):
    """Fails on values that only a real engine produces."""

    def step(self, record: StepRecord) -> None:
        super().step(record)
        assert not 1 <= record.running <= 4


BROKEN: dict[str, list[type[Observer]]] = {
    "test_any_number_may_be_zero_or_large": [
        does("DividesByTheDevice", lambda self, record: setattr(self, "rate", record.sampled / record.device_seconds))
    ],
    "test_records_come_in_order_and_stay_as_they_are": [
        does("CountsInItsRecords", lambda self, record: object.__setattr__(record, "sampled", self.tokens)),
        does("Answers", lambda self, record: self.speed),
    ],
    "test_close_is_idempotent": [
        variant(Speed, "ClosesOnce", close=lambda self: delattr(self, "tokens")),
        ClosesWhatIsOpen,
    ],
    "test_observers_share_nothing": [SharesItsState],
    "test_a_step_costs_little": [does("Waits", lambda self, record: time.sleep(0.01))],
    "test_a_step_costs_no_more_after_many": [AddsUpAnew],
    "test_the_engine_keeps_it_and_outputs_do_not_change": [FailsInTheEngine],
}


def suite_of(observer: type[Observer]) -> ObserverContract:
    return suite(ObserverContract, make=lambda self: observer(None))


@each(BROKEN)
def test_the_suite_rejects(broken: type[Observer], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_unbroken_one_passes() -> None:
    assert failures(suite_of(Speed)) == {}
