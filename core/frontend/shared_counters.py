"""What processes that send requests to the same engines know of one another: counts in shared memory, without locks.

The memory is an anonymous file whose descriptor they inherit: none is left behind, whatever way a process ends.

    int64 words, a row for each process, which alone writes it while it lives: 0 number of its next request; 1 how
    often its event loop has said that it turns; then, for each replica, its samples and its prompt tokens there
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

from dovetail.core.arithmetic import ceil_div
from dovetail.core.parallel.ring import anonymous_file

_LINE = 8
"""Words of 64 bytes: no two processes write to the same cache line."""
_TURNS, _LOADS = 1, 2


class Board:
    def __init__(self, processes: int, replicas: int, *, own: int = 0, fd: int | None = None) -> None:
        """`own`: which of the processes this one is. `fd`: of the board that another process made; else it is new."""
        self.processes, self.replicas, self.own = processes, replicas, own
        self._row = ceil_div(_LOADS + 2 * replicas, _LINE) * _LINE
        size = 8 * self._row * processes
        self.fd = -1 if fd is None else fd
        if processes == 1:
            self._words = memoryview(bytearray(size)).cast("q")
        else:
            if fd is None:
                self.fd = anonymous_file("dovetail-board")
                os.ftruncate(self.fd, size)
            self._words = memoryview(mmap.mmap(self.fd, size)).cast("q")
        if fd is None:
            for process in range(processes):
                self._words[process * self._row] = process

    def numbers(self) -> Iterator[int]:
        """Of this process's requests, rising. No other process has them, nor had a process in this one's place."""
        at = self.own * self._row
        while True:
            number = self._words[at]
            self._words[at] = number + self.processes
            yield number

    def load(self, replica: int) -> Load:
        return Load(self._words[_LOADS + 2 * replica :], self._row, self.own)

    def turn(self) -> None:
        """This process's event loop turns."""
        self._words[self.own * self._row + _TURNS] += 1

    def turns(self, process: int) -> int:
        """0: it has not begun."""
        return self._words[process * self._row + _TURNS]

    def clear(self, process: int) -> None:
        """It is gone, and so are its requests."""
        self._words[process * self._row + _TURNS] = 0
        for replica in range(self.replicas):
            Load(self._words[_LOADS + 2 * replica :], self._row, process).clear()


class Load:
    """What runs or waits on one replica."""

    def __init__(self, words: memoryview, row: int, own: int) -> None:
        self._samples, self._prompt_tokens = words[::row], words[1::row]
        self._own = own

    @property
    def samples(self) -> int:
        """Of all processes."""
        return sum(self._samples)

    @property
    def prompt_tokens(self) -> int:
        """Of requests that have no output yet; of all processes."""
        return sum(self._prompt_tokens)

    def add(self, samples: int, prompt_tokens: int) -> None:
        """To what this process has there."""
        self._samples[self._own] += samples
        self._prompt_tokens[self._own] += prompt_tokens

    def clear(self) -> None:
        """This process has nothing there any more."""
        self._samples[self._own] = self._prompt_tokens[self._own] = 0
