"""Detection of hung front-end processes. Each one counts the heartbeats of its event loop in shared memory, and the
supervisor checks the counters. A hung process would keep its connections and receive new ones, all unanswered."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import NoReturn

from dovetail.core.frontend.shared_counters import SharedCounters


def _interval(timeout: float) -> float:
    """Return the seconds between heartbeats, and between checks."""
    return min(1.0, timeout / 4)


async def heartbeat(counters: SharedCounters, timeout: float) -> NoReturn:
    """Increment this process's counter periodically, as long as its event loop runs."""
    while True:
        counters.heartbeat()
        await asyncio.sleep(_interval(timeout))


class Watchdog:
    """Reports front-end processes whose event loop is blocked."""

    def __init__(self, counters: SharedCounters, timeout: float, on_hang: Callable[[int, float], None]) -> None:
        """`on_hang` is called with a process's number and the seconds since its last heartbeat, at every check once
        they exceed `timeout`. A process without a first heartbeat is still starting and never counts as hung."""
        self._counters, self._timeout, self._on_hang = counters, timeout, on_hang
        self._heartbeats, self._stalled = [0] * counters.processes, [0.0] * counters.processes

    def run(self, stop: threading.Event) -> None:
        """Check periodically until `stop` is set, in a thread: the event loop may itself wait for a hung process."""
        interval = _interval(self._timeout)
        # A late check still counts as one interval: the whole server may have been suspended and resumed.
        while not stop.wait(interval):
            for process in range(1, self._counters.processes):
                self._check(process, interval)

    def _check(self, process: int, seconds: float) -> None:
        count = self._counters.heartbeats(process)
        stalled = self._stalled[process] + seconds if count and count == self._heartbeats[process] else 0.0
        self._heartbeats[process], self._stalled[process] = count, stalled
        if stalled >= self._timeout:
            self._on_hang(process, stalled)
