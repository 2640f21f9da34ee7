"""Memory that all ranks can write to: torch's symmetric memory without torch.distributed's global state."""

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

_EXCHANGE_TIMEOUT = timedelta(seconds=60)
"""Timeout of exchanges between ranks that have all arrived."""
_POLL = 0.005


class NotSharedError(RuntimeError):
    """The ranks cannot allocate shared memory or cannot write to each other's."""


@dataclass(frozen=True)
class SharedBlock:
    """An allocation on every rank."""

    words: torch.Tensor
    """This rank's memory, int32."""
    addresses: tuple[int, ...]
    """Address of every rank's memory."""
    keep: object
    """Handle that keeps the other ranks' memory mapped."""


class SharedMemory:
    """Allocator of memory that all ranks can write to."""

    def __init__(self, rank: int, size: int, store: Any, device: torch.device) -> None:
        # The kernels use no multicast object, which would need a fabric manager.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._rank, self._size, self._store, self._device = rank, size, store, device
        self._count = 0
        self._stopped = threading.Event()
        with self._short_timeout():
            self._name, self._group = _group(rank, size, store)

    def allocate(self, words: int, fill: int) -> SharedBlock:
        """Allocate on all ranks; a collective call. On return all ranks have filled their memory and may write to each
        other's while they hold the block. Raises NotSharedError without peer access, RuntimeError after `stop`."""
        self._wait_for_all()
        with self._short_timeout():
            try:
                memory = _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int32, self._device, self._name)
                memory.fill_(fill)
                torch.cuda.synchronize(self._device)
                # Returns once all ranks have arrived, so their memory is filled.
                handle = _SymmetricMemory.rendezvous(memory, self._name)
            except RuntimeError as error:
                raise NotSharedError(
                    f"{self._device} cannot allocate {4 * words} bytes shared with the other ranks' GPUs ({error})"
                ) from error
        return SharedBlock(memory, tuple(handle.buffer_ptrs), handle)

    def stop(self) -> None:
        """End `allocate` because a rank died. May be called from any thread."""
        self._stopped.set()

    def _wait_for_all(self) -> None:
        """Poll until all ranks have arrived, or `stop`: within a step a rank may be late, or dead."""
        self._count += 1
        self._store.set(f"allocation/{self._count}/of {self._rank}", "")
        every = [f"allocation/{self._count}/of {rank}" for rank in range(self._size)]
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        while not self._store.check(every):
            if self._stopped.wait(_POLL):
                raise RuntimeError("a rank died before all ranks had allocated shared memory")
            if time.monotonic() > deadline:
                raise TimeoutError(f"a rank did not allocate shared memory within {self._store.timeout}")

    @contextmanager
    def _short_timeout(self) -> Iterator[None]:
        patience = self._store.timeout
        self._store.set_timeout(_EXCHANGE_TIMEOUT)
        try:
            yield
        finally:
            self._store.set_timeout(patience)


def _group(rank: int, size: int, store: Any) -> tuple[Any, object]:
    """Register the store with torch's symmetric memory. Return its name, and the objects to keep alive. Some versions
    of torch look the name up in their own table, others among process groups, which are weak references."""
    if rank == 0:
        store.set("name", f"dovetail-{uuid.uuid4().hex}")
    name: Any = store.get("name").decode()
    counted = RenumberedStore(store)
    _SymmetricMemory.set_group_info(name, rank, size, counted)
    group = dist.ProcessGroup(counted, rank, size)
    _register_process_group(name, group)
    return name, (group, counted)


class RenumberedStore(dist.Store):
    """A store that renumbers torch's exchanges from 0, without gaps.

    torch numbers the exchanges of symmetric memory (keys NAME/NUMBER and NAME/NUMBER/...) per process. The process of
    rank 0 may have run other engines, while those of the other ranks are new: they would wait under different numbers.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._numbers: dict[str, dict[str, int]] = {}
        """Name -> torch's number -> ours."""

    def _key(self, key: str) -> str:
        numbered = re.fullmatch(r"(.*?)/(\d+)(/.*)?", key)
        if numbered is None:
            return key
        name, number, rest = numbered.groups()
        numbers = self._numbers.setdefault(name, {})
        return f"{name}/{numbers.setdefault(number, len(numbers))}{rest or ''}"

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
