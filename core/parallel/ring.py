"""Ring buffer of bytes in shared memory: one writer and several readers on one machine.

Every reader gets every message, in order, and has its own cursor; the writer waits for the slowest reader. A message
longer than the ring passes through it in pieces. The memory is an anonymous file whose descriptor the readers inherit:
names cannot clash, and nothing remains however a process ends.

    int64 words: 0 capacity, 8 bytes written so far, 16 + 8 i bytes that reader i has taken; then the bytes themselves
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable

Idle = Callable[[float], None]
"""idle(seconds): called while the ring is not ready. Waits about that long, or raises to end the wait."""

_WORD = 8
_LINE = 8
"""Words between two counters: 64 bytes, so that no two counters share a cache line."""
_CAPACITY, _HEAD, _CURSORS = 0, _LINE, 2 * _LINE
_LENGTH = struct.Struct("<Q")
_SPIN_SECONDS = 1e-3
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 2e-3
_SHARE = 50


class _Shared:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._memory = memoryview(self._map)
        self._words = self._memory.cast("q")
        self._fence = threading.Lock()
        self._fence.acquire()

    def _lay_out(self, readers: int) -> None:
        self.capacity = self._words[_CAPACITY]
        self._bytes = self._memory[-self.capacity :]
        self._cursor_words = [_CURSORS + _LINE * i for i in range(readers)]

    def _order(self) -> None:
        """Full memory barrier between the writes before and after it, on ARM too."""
        self._fence.release()
        self._fence.acquire()

    def close(self) -> None:
        """Release the memory. Idempotent."""
        if self.fd < 0:
            return
        self._words.release()
        self._bytes.release()
        self._memory.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1


class RingWriter(_Shared):
    def __init__(self, readers: int, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a ring needs room for a byte, not capacity={capacity}")
        capacity += -capacity % _WORD
        fd = anonymous_file("dovetail-ring")
        os.ftruncate(fd, _WORD * (_CURSORS + _LINE * readers) + capacity)
        super().__init__(fd)
        self._words[_CAPACITY] = capacity
        self._lay_out(readers)

    def send(self, message: bytes, idle: Idle = time.sleep) -> None:
        """Write a message. Blocks until all of it is in the ring, waiting for readers if needed."""
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        head = self._words[_HEAD]
        while rest:
            wait_until(lambda: self._slowest() + self.capacity > self._words[_HEAD], idle)
            n = min(len(rest), self._slowest() + self.capacity - head)
            at = head % self.capacity
            first = min(n, self.capacity - at)
            self._bytes[at : at + first] = rest[:first]
            self._bytes[: n - first] = rest[first:n]
            self._order()
            head += n
            self._words[_HEAD] = head
            rest = rest[n:]

    def _slowest(self) -> int:
        return min([self._words[i] for i in self._cursor_words], default=self._words[_HEAD])


class RingReader(_Shared):
    def __init__(self, fd: int, reader: int) -> None:
        """Take ownership of the descriptor. `reader` counts from 0; each process has a different one."""
        super().__init__(fd)
        self._lay_out(reader + 1)
        self._mine = self._cursor_words[reader]

    def recv(self, idle: Idle = time.sleep) -> bytes:
        """Wait for the next message and return it."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, idle))
        return bytes(self._take(length, idle))

    def _take(self, count: int, idle: Idle) -> bytearray:
        taken = bytearray(count)
        cursor = self._words[self._mine]
        done = 0
        while done < count:
            wait_until(lambda: self._words[_HEAD] > self._words[self._mine], idle)
            n = min(count - done, self._words[_HEAD] - cursor)
            self._order()
            at = cursor % self.capacity
            first = min(n, self.capacity - at)
            taken[done : done + first] = self._bytes[at : at + first]
            taken[done + first : done + n] = self._bytes[: n - first]
            self._order()
            cursor += n
            done += n
            self._words[self._mine] = cursor
        return taken


def wait_until(ready: Callable[[], bool], idle: Idle) -> None:
    """Yield the CPU, then sleep for a small fraction of the time waited: short delay after a step, low cost later."""
    if ready():
        return
    began = time.perf_counter()
    while (waited := time.perf_counter() - began) < _SPIN_SECONDS:
        if ready():
            return
        os.sched_yield()
    while not ready():
        idle(min(max(waited / _SHARE, _SHORTEST_PAUSE), _LONGEST_PAUSE))
        waited = time.perf_counter() - began


def anonymous_file(name: str) -> int:
    """Return the descriptor of an anonymous file, to be inherited by started processes. `name` is shown in /proc."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
