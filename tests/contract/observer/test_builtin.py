"""Contract suite for the built-in observers and a plain one, and the engine's side of the contract."""

from __future__ import annotations

import logging

import pytest

from dovetail.core.interfaces import Observer, StepRecord
from dovetail.core.testing.observer import ObserverContract, observed_engine, serve
from dovetail.plugins.observer.config import PrometheusConfig
from dovetail.plugins.observer.prometheus import Prometheus


class Recorder(Observer):
    def __init__(self) -> None:
        super().__init__(None)
        self.records: list[StepRecord] = []
        self.closed = 0

    def step(self, record: StepRecord) -> None:
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1


class FailsAt(Recorder):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.last = step

    def step(self, record: StepRecord) -> None:
        super().step(record)
        if record.step == self.last:
            raise OSError("the disk is full")


class FailsToClose(Recorder):
    def close(self) -> None:
        super().close()
        raise OSError("the disk is full")


class TestRecorder(ObserverContract):
    def make(self) -> Observer:
        return Recorder()


class TestPrometheus(ObserverContract):
    def make(self) -> Observer:
        return Prometheus(PrometheusConfig(port=0))


def test_every_step_is_seen_once_in_order() -> None:
    recorder = Recorder()
    engine = observed_engine({"recorder": recorder})
    outputs = serve(engine)
    seen, counters = recorder.records, engine.counters
    assert [r.step for r in seen] == list(range(counters.steps))
    assert sorted(r.clock for r in seen) == [r.clock for r in seen]
    assert sum(r.sampled for r in seen) == counters.output_tokens >= sum(map(len, outputs.values()))
    assert sum(r.drafted for r in seen) == counters.drafted > 0
    assert sum(r.accepted for r in seen) == counters.accepted > 0
    for r in seen:
        assert 0 < r.rows <= 4 and r.rows <= r.tokens <= 16
        assert 0 <= r.accepted <= r.drafted
        assert 0 <= r.kv_used <= 1
        assert r.waiting >= 0 and r.running >= 0 and r.schedule_seconds >= 0 and r.device_seconds >= 0
    assert max(r.waiting for r in seen) > 0 and max(r.kv_used for r in seen) > 0
    engine.shutdown()
    assert recorder.closed == 1


def test_a_failing_observer_is_named_once_and_removed(caplog: pytest.LogCaptureFixture) -> None:
    before, failing, after = Recorder(), FailsAt(3), Recorder()
    engine = observed_engine({"before": before, "failing": failing, "after": after})
    with caplog.at_level(logging.WARNING):
        outputs = serve(engine)
    (message,) = caplog.records
    assert "failing" in message.getMessage()
    assert message.exc_info is not None and "the disk is full" in str(message.exc_info[1])
    assert [r.step for r in failing.records] == [0, 1, 2, 3]
    assert before.records == after.records and len(after.records) == engine.counters.steps > 4
    assert list(engine.observers) == ["before", "after"]
    alone = observed_engine({})
    assert serve(alone) == outputs


def test_an_observer_that_fails_to_close_stops_nothing() -> None:
    failing, after = FailsToClose(), Recorder()
    engine = observed_engine({"failing": failing, "after": after})
    serve(engine)
    stopped: list[bool] = []
    engine.executor.shutdown = lambda: stopped.append(True)  # type: ignore[method-assign]
    engine.shutdown()
    assert (failing.closed, after.closed, stopped) == (1, 1, [True])
