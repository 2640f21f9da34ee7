"""Detection of hung processes, with a fake clock."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from dovetail.core.frontend.shared_counters import Board
from dovetail.plugins.app.serve.watchdog import Watchdog

LOOKS = 4
"""Number of checks without a heartbeat after which a process counts as hung."""


class Clock:
    """Fake threading.Event: time advances in `wait`, by more than requested if the script yields a delay."""

    def __init__(self, script: Iterator[float]) -> None:
        self.now, self._script = 1000.0, script

    def wait(self, seconds: float) -> bool:
        late = next(self._script, None)
        self.now += seconds + (late or 0.0)
        return late is None


def hung(board: Board, script: Iterator[float], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    clock, found = Clock(script), []
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    Watchdog(board, 3.0, lambda process, seconds: found.append((process, seconds))).run(clock)
    return found


def test_a_process_hangs_if_its_heartbeats_stop_but_not_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(4, 1)
    first, second = (Board(4, 1, own=own, fd=board.fd) for own in (1, 2))

    def script() -> Iterator[float]:
        second.turn()
        for _ in range(1 + LOOKS):
            first.turn()
            yield 0.0

    assert hung(board, script(), monkeypatch) == [(2, 3.0)], "1 turns, 3 never began"


def test_a_new_life_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(2, 1)
    only = Board(2, 1, own=1, fd=board.fd)

    def script() -> Iterator[float]:
        for _ in range(3):
            only.turn()
            yield from [0.0] * LOOKS
            board.clear(1)
            yield from [0.0] * 2 * LOOKS

    assert hung(board, script(), monkeypatch) == []


def test_no_process_counts_as_hung_if_all_were_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(2, 1)
    only = Board(2, 1, own=1, fd=board.fd)

    def script() -> Iterator[float]:
        only.turn()
        yield 0.0
        yield 3600.0
        only.turn()
        yield 0.0

    assert hung(board, script(), monkeypatch) == []
