"""Detection of hung front-end processes. Each one counts its event-loop iterations in shared memory (the board), and
the supervisor checks the counters. A hung process would keep its connections and receive new ones, all unanswered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import NoReturn

from dovetail.core.frontend.shared_counters import Board


def _interval(timeout: float) -> float:
    """Return the seconds between heartbeats, and between checks."""
    return min(1.0, timeout / 4)


async def heartbeat(board: Board, timeout: float) -> NoReturn:
    """Increment this process's counter periodically, as long as its event loop runs."""
    while True:
        board.turn()
        await asyncio.sleep(_interval(timeout))


class Watchdog:
    """Reports front-end processes whose event loop is blocked."""

    def __init__(self, board: Board, timeout: float, on_hang: Callable[[int, float], None]) -> None:
        """`on_hang` is called with a process's number and the seconds since its last heartbeat, at every check once
        they exceed `timeout`. A process without a first heartbeat is still starting and never counts as hung."""
        self._board, self._timeout, self._on_hang = board, timeout, on_hang
        self._turns, self._stalled = [0] * board.processes, [0.0] * board.processes

    def run(self, stop: threading.Event) -> None:
        """Check periodically until `stop` is set, in a thread: the event loop may itself wait for a hung process."""
        interval = _interval(self._timeout)
        # A late check still counts as one interval: the whole server may have been suspended and resumed.
        while not stop.wait(interval):
            for process in range(1, self._board.processes):
                self._check(process, interval)

    def _check(self, process: int, seconds: float) -> None:
        turns = self._board.turns(process)
        stalled = self._stalled[process] + seconds if turns and turns == self._turns[process] else 0.0
        self._turns[process], self._stalled[process] = turns, stalled
        if stalled >= self._timeout:
            self._on_hang(process, stalled)
