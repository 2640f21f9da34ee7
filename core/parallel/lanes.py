"""Lanes: replicas that share routed experts, so that each runs a step when all do (data-parallel attention,
DeepSeek-V3, 2024). Before each launch they agree on the bounds of the step through memory that they share. A lane
without rows then launches a plan without rows. Once no lane has work, all sleep; a byte in a lane's pipe wakes it.

A round ends when each lane has written its entry. Entries of consecutive rounds have separate places, and a lane begins
a round after it has read the previous one, so no entry is overwritten before it is read.

    int64 words: one that ends all waits; for each lane the number of rounds that it has begun, then two entries of
    (whether the lane has work, its StepShape)
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import StepShape
from dovetail.core.parallel.channel import ChannelClosed
from dovetail.core.parallel.ring import anonymous_file, wait_until

LOST = "lost the connection to the other lanes"
"""Part of the message of an error that the end of another lane may have caused."""
_LINE = 8
"""Words between two lanes' counters: 64 bytes, so that no two share a cache line."""
_ENDED, _FIRST = 0, _LINE
_FIELDS = 1 + len(StepShape._fields)
_ENTRY = ceil_div(_FIELDS, _LINE) * _LINE
_ENTRIES = _LINE + 2 * _ENTRY
"""Words of a lane: its counter, and two entries."""


class _Memory:
    def __init__(self, fd: int, count: int) -> None:
        self.fd, self.count = fd, count
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("q")
        self._fence = threading.Lock()
        self._fence.acquire()

    def _counter(self, lane: int) -> int:
        """Return the index of the lane's counter."""
        return _FIRST + lane * _ENTRIES

    def _entry(self, lane: int, round: int) -> slice:
        first = self._counter(lane) + _LINE + round % 2 * _ENTRY
        return slice(first, first + _FIELDS)

    def _order(self) -> None:
        """Full memory barrier between the accesses before and after it, on ARM too."""
        self._fence.release()
        self._fence.acquire()

    def close(self) -> None:
        """Release the memory. Idempotent."""
        if self.fd >= 0:
            self._words.release()
            self._bytes.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1


class LaneBoard(_Memory):
    """The shared memory and the pipes, made by the process that starts the lanes."""

    def __init__(self, count: int) -> None:
        fd = anonymous_file("dovetail-lanes")
        os.ftruncate(fd, 8 * (_FIRST + count * _ENTRIES))
        super().__init__(fd, count)
        self._pipes = [os.pipe() for _ in range(count)]
        for pipe in self._pipes:
            for end in pipe:
                os.set_blocking(end, False)

    def order(self, lane: int) -> dict[str, Any]:
        """Return the arguments of one lane's Lanes, for a process that inherits `descriptors`."""
        others = [pipe[1] for other, pipe in enumerate(self._pipes) if other != lane]
        return {"fd": self.fd, "number": lane, "count": self.count, "alarm": self._pipes[lane][0], "alarms": others}

    def descriptors(self, lane: int) -> tuple[int, ...]:
        order = self.order(lane)
        return (order["fd"], order["alarm"], *order["alarms"])

    def end(self) -> None:
        """End all waits of lanes for each other, now and later."""
        if self.fd >= 0:
            self._words[_ENDED] = 1

    def late(self) -> list[int]:
        """Return the lanes for which the others wait."""
        begun = [self._words[self._counter(lane)] for lane in range(self.count)]
        return [lane for lane, rounds in enumerate(begun) if rounds < max(begun)]

    def close(self) -> None:
        self.end()
        super().close()
        for pipe in self._pipes:
            for end in pipe:
                os.close(end)
        self._pipes = []


class Lanes(_Memory):
    """One lane's access. Used by its engine's thread."""

    def __init__(
        self,
        *,
        fd: int,
        number: int,
        count: int,
        alarm: int,
        alarms: Sequence[int],
        idle: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take ownership of the descriptors. `alarm`: pipe that wakes this lane; `alarms`: those of the others. `idle`:
        see ring.Idle."""
        super().__init__(fd, count)
        self.number, self.alarm, self._alarms, self._idle = number, alarm, tuple(alarms), idle
        self._others = [self._counter(lane) for lane in range(count) if lane != number]
        self._round = 0
        self._awake = False

    @property
    def awake(self) -> bool:
        """Whether a round is due: one has begun elsewhere, or the last one had work."""
        return self._awake or any(self._words[other] > self._round for other in self._others)

    def agree(self, shape: StepShape, active: bool) -> StepShape | None:
        """Wait until every lane has called this, and return the greatest bounds of all; None = no lane is active, and
        all sleep. `active`: this lane has work, even if it has no rows now. Raises ChannelClosed once the lanes end."""
        words, round = self._words, self._round
        words[self._entry(self.number, round)] = array("q", (int(active), *shape))
        self._order()
        words[self._counter(self.number)] = round + 1
        if not self._awake:
            self._wake()
        wait_until(lambda: all(words[other] > round for other in self._others), self._pause)
        self._order()
        found = [tuple(words[self._entry(lane, round)]) for lane in range(self.count)]
        self._round, self._awake = round + 1, any(each[0] for each in found)
        return StepShape.greatest(StepShape(*each[1:]) for each in found) if self._awake else None

    def _wake(self) -> None:
        """Wake lanes that sleep. Those that are awake read their pipe when they next sleep."""
        for alarm in self._alarms:
            try:
                os.write(alarm, b"\0")
            except (BlockingIOError, BrokenPipeError):
                pass  # A full pipe wakes too. The end of a lane is detected by the process that started it.

    def silence(self) -> None:
        """Empty the pipe, which `awake` makes redundant."""
        try:
            os.read(self.alarm, 4096)
        except BlockingIOError:
            pass

    def _pause(self, seconds: float) -> None:
        if self._words[_ENDED]:
            raise ChannelClosed
        self._idle(seconds)

    def close(self) -> None:
        if self.fd >= 0:
            super().close()
            for end in (self.alarm, *self._alarms):
                os.close(end)
