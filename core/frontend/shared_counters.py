"""Counters in shared memory, without locks, for the processes that send requests to the same engines.

The memory is an anonymous file whose descriptor the processes inherit, so nothing is left behind however they end. It
holds int64 words, one row per process, which only that process writes while it runs:

    0 number of its next request; 1 heartbeats of its event loop; then, per replica, its samples and prompt tokens
"""

from __future__ import annotations

import mmap
import os

from dovetail.core.arithmetic import ceil_div
from dovetail.core.parallel.ring import anonymous_file

_LINE = 8
"""Words per cache line. Rows are multiples of it, so that no two processes write to the same line."""
_HEARTBEATS, _LOADS = 1, 2


class SharedCounters:
    def __init__(self, processes: int, replicas: int, *, own: int = 0, fd: int | None = None) -> None:
        """`own`: number of this process. `fd`: file with the counters of another process; None = create it."""
        self.processes, self.replicas, self.own = processes, replicas, own
        self._row = ceil_div(_LOADS + 2 * replicas, _LINE) * _LINE
        size = 8 * self._row * processes
        self.fd = -1 if fd is None else fd
        if processes == 1:
            self._words = memoryview(bytearray(size)).cast("q")
        else:
            if fd is None:
                self.fd = anonymous_file("dovetail-counters")
                os.ftruncate(self.fd, size)
            self._words = memoryview(mmap.mmap(self.fd, size)).cast("q")
        if fd is None:
            for process in range(processes):
                self._words[process * self._row] = process

    def next_number(self) -> int:
        """Return a number for a request. Numbers rise and are unique over all processes and their restarts."""
        at = self.own * self._row
        number = self._words[at]
        self._words[at] = number + self.processes
        return number

    def load(self, replica: int) -> Load:
        return Load(self._words[_LOADS + 2 * replica :], self._row, self.own)

    def heartbeat(self) -> None:
        """Count one heartbeat of this process."""
        self._words[self.own * self._row + _HEARTBEATS] += 1

    def heartbeats(self, process: int) -> int:
        """Return the heartbeats of a process; 0 = it is still starting."""
        return self._words[process * self._row + _HEARTBEATS]

    def clear(self, process: int) -> None:
        """Reset the heartbeats and loads of a process that has ended. Its request numbers continue."""
        self._words[process * self._row + _HEARTBEATS] = 0
        for replica in range(self.replicas):
            Load(self._words[_LOADS + 2 * replica :], self._row, process).clear()


class Load:
    """Samples and prompt tokens that run or wait on one replica."""

    def __init__(self, words: memoryview, row: int, own: int) -> None:
        self._samples, self._prompt_tokens = words[::row], words[1::row]
        self._own = own

    @property
    def samples(self) -> int:
        """Sum over all processes."""
        return sum(self._samples)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of requests without output; sum over all processes."""
        return sum(self._prompt_tokens)

    def add(self, samples: int, prompt_tokens: int) -> None:
        """Add to the counts of this process."""
        self._samples[self._own] += samples
        self._prompt_tokens[self._own] += prompt_tokens

    def clear(self) -> None:
        """Set the counts of this process to 0."""
        self._samples[self._own] = self._prompt_tokens[self._own] = 0
