"""Detection of hung processes, with a fake clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from dovetail.core.frontend.shared_counters import SharedCounters
from dovetail.plugins.app.serve.watchdog import Watchdog

LOOKS = 4
"""Number of checks without a heartbeat after which a process counts as hung."""


class Clock:
    """Fake threading.Event. `wait` advances the time, by more than requested if the script yields a delay."""

    def __init__(self, script: Iterator[float]) -> None:
        self.now, self._script = 1000.0, script

    def wait(self, seconds: float) -> bool:
        delay = next(self._script, None)
        self.now += seconds + (delay or 0.0)
        return delay is None


def hung(counters: SharedCounters, script: Iterator[float], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    clock, found = Clock(script), []
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    Watchdog(counters, 3.0, lambda process, seconds: found.append((process, seconds))).run(clock)
    return found


def test_a_process_hangs_if_its_heartbeats_stop_but_not_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = SharedCounters(4, 1)
    first, second = (SharedCounters(4, 1, own=own, fd=counters.fd) for own in (1, 2))

    def script() -> Iterator[float]:
        second.heartbeat()
        for _ in range(1 + LOOKS):
            first.heartbeat()
            yield 0.0

    assert hung(counters, script(), monkeypatch) == [(2, 3.0)], "1 has heartbeats, 3 is still starting"


def test_a_restarted_process_is_timed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = SharedCounters(2, 1)
    only = SharedCounters(2, 1, own=1, fd=counters.fd)

    def script() -> Iterator[float]:
        for _ in range(3):
            only.heartbeat()
            yield from [0.0] * LOOKS
            counters.clear(1)
            yield from [0.0] * 2 * LOOKS

    assert hung(counters, script(), monkeypatch) == []


def test_no_process_counts_as_hung_if_all_were_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = SharedCounters(2, 1)
    only = SharedCounters(2, 1, own=1, fd=counters.fd)

    def script() -> Iterator[float]:
        only.heartbeat()
        yield 0.0
        yield 3600.0
        only.heartbeat()
        yield 0.0

    assert hung(counters, script(), monkeypatch) == []
