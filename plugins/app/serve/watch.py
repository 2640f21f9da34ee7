"""Whether the event loops of the processes that answer turn: each says so on the board, and the one that started them
looks. One that hangs would keep its connections, and be given more, which nobody answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import NoReturn

from dovetail.core.frontend.shared_counters import Board


def _tick(timeout: float) -> float:
    """Seconds between two signs, and between two looks."""
    return min(1.0, timeout / 4)


async def turn(board: Board, timeout: float) -> NoReturn:
    """As long as the event loop of this process does."""
    while True:
        board.turn()
        await asyncio.sleep(_tick(timeout))


class Watch:
    def __init__(self, board: Board, timeout: float, on_hang: Callable[[int, float], None]) -> None:
        """`on_hang`: called with a process's number, and how many seconds it has not turned, at every look from
        `timeout` on. A start takes what it takes: who has not turned yet does not hang."""
        self._board, self._timeout, self._on_hang = board, timeout, on_hang
        self._turns, self._silent = [0] * board.processes, [0.0] * board.processes

    def run(self, over: threading.Event) -> None:
        """In a thread of its own: an event loop that talks to a process that hangs may have to wait for its end."""
        tick = _tick(self._timeout)
        # A look counts as one tick, however late it comes: all of the server may have been stopped and gone on.
        while not over.wait(tick):
            for process in range(1, self._board.processes):
                self._look(process, tick)

    def _look(self, process: int, seconds: float) -> None:
        turns = self._board.turns(process)
        silent = self._silent[process] + seconds if turns and turns == self._turns[process] else 0.0
        self._turns[process], self._silent[process] = turns, silent
        if silent >= self._timeout:
            self._on_hang(process, silent)
