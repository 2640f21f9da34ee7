"""Memory of all ranks that all can write to: torch's symmetric memory without torch.distributed's global state."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

_EXCHANGE = timedelta(seconds=60)
"""For a few bytes between ranks that are all there."""
_POLL = 0.005


class NotSharedError(RuntimeError):
    """Memory that the ranks cannot make, or not write to."""


@dataclass(frozen=True)
class Block:
    words: torch.Tensor
    """int32 of this rank."""
    addresses: tuple[int, ...]
    """Where every rank has its own."""
    keep: object
    """By which the others' are reached."""


class SharedMemory:
    """Where the ranks' allocations meet."""

    def __init__(self, rank: int, size: int, store: Any, device: torch.device) -> None:
        # The kernels need no multicast object, which takes a fabric manager to make.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._rank, self._size, self._store, self._device = rank, size, store, device
        self._count = 0
        self._ended = threading.Event()
        with self._soon():
            self._name, self._group = _group(rank, size, store)

    def allocate(self, words: int, fill: int) -> Block:
        """A collective call. When it returns, all ranks have filled theirs, and may write to each other's for as long
        as they hold the block. NotSharedError where they cannot; RuntimeError after `stop`."""
        self._wait_for_all()
        with self._soon():
            try:
                memory = _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int32, self._device, self._name)
                memory.fill_(fill)
                torch.cuda.synchronize(self._device)
                # Returns when all ranks are here, so with their memory filled.
                handle = _SymmetricMemory.rendezvous(memory, self._name)
            except RuntimeError as error:
                raise NotSharedError(
                    f"{self._device} cannot make {4 * words} bytes that the other ranks' GPUs share ({error})"
                ) from error
        return Block(memory, tuple(handle.buffer_ptrs), handle)

    def stop(self) -> None:
        """From any thread: a rank has died, and those that wait for it end."""
        self._ended.set()

    def _wait_for_all(self) -> None:
        """In a loop that `stop` ends: within a step a rank may be late, or never come."""
        self._count += 1
        self._store.set(f"allocation/{self._count}/of {self._rank}", "")
        every = [f"allocation/{self._count}/of {rank}" for rank in range(self._size)]
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while not self._store.check(every):
            if self._ended.wait(_POLL):
                raise RuntimeError("a rank died before all ranks had made memory to share")
            if time.monotonic() > deadline:
                raise TimeoutError(f"a rank did not come within {self._store.timeout} to make memory to share")

    @contextmanager
    def _soon(self) -> Iterator[None]:
        patience = self._store.timeout
        self._store.set_timeout(_EXCHANGE)
        try:
            yield
        finally:
            self._store.set_timeout(patience)


def _group(rank: int, size: int, store: Any) -> tuple[Any, object]:
    """A name that leads torch's symmetric memory to the store, and what to keep while it shall. Some versions look for
    it in a table of their own, others in that of process groups, which holds none of them alive."""
    if rank == 0:
        store.set("name", f"dovetail-{uuid.uuid4().hex}")
    name: Any = store.get("name").decode()
    counted = CountedAnew(store)
    _SymmetricMemory.set_group_info(name, rank, size, counted)
    group = dist.ProcessGroup(counted, rank, size)
    _register_process_group(name, group)
    return name, (group, counted)


class CountedAnew(dist.Store):
    """A store whose exchanges count from 0, without gaps.

    torch numbers those of symmetric memory (keys NAME/TURN and NAME/TURN/...) through the life of a process. Rank 0's
    may have or have had other engines, and the other ranks' are new: they would wait for each other under different
    numbers.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._turns: dict[str, dict[str, int]] = {}
        """Name -> torch's number -> ours."""

    def _key(self, key: str) -> str:
        numbered = re.fullmatch(r"(.*?)/(\d+)(/.*)?", key)
        if numbered is None:
            return key
        name, turn, rest = numbered.groups()
        turns = self._turns.setdefault(name, {})
        return f"{name}/{turns.setdefault(turn, len(turns))}{rest or ''}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(self._key(key))
        return found

    def add(self, key: str, value: int) -> int:
        total: int = self._store.add(self._key(key), value)
        return total

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        several = [self._key(key) for key in keys]
        self._store.wait(several) if timeout is None else self._store.wait(several, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        there: bool = self._store.check([self._key(key) for key in keys])
        return there
