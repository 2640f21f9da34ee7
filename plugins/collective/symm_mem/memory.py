"""Memory of all ranks that all can write to: torch's symmetric memory without torch.distributed's global state."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

from dovetail.core.errors import CapabilityError

_EXCHANGE = timedelta(seconds=60)
"""For a few bytes between ranks that are all there."""


class SharedMemory:
    """Where the ranks' allocations meet. Every method is a collective call."""

    def __init__(self, rank: int, size: int, store: Any, device: torch.device) -> None:
        # The kernels need no multicast object, which takes a fabric manager to make.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self._store, self._device = store, device
        self._patience = store.timeout
        store.set_timeout(_EXCHANGE)
        try:
            self._name, self._group = _group(rank, size, store)
        finally:
            store.set_timeout(self._patience)
        self._handles: list[Any] = []

    def allocate(self, words: int, fill: int) -> tuple[torch.Tensor, list[int]]:
        """(int32 of this rank, filled when all ranks return; addresses of every rank's). The other ranks may write
        there for as long as this object lives."""
        self._store.set_timeout(_EXCHANGE)
        try:
            memory = _SymmetricMemory.empty_strided_p2p((words,), (1,), torch.int32, self._device, self._name)
            memory.fill_(fill)
            torch.cuda.synchronize(self._device)
            # Returns when all ranks are here, so with their memory filled.
            handle = _SymmetricMemory.rendezvous(memory, self._name)
        except RuntimeError as error:
            raise CapabilityError(
                [
                    f"collective=symm_mem: {self._device} cannot share its memory with the other ranks' GPUs "
                    f"({error}). They must be GPUs of one host with peer access to each other: choose collective=nccl"
                ]
            ) from error
        finally:
            self._store.set_timeout(self._patience)
        self._handles.append((memory, handle))
        return memory, list(handle.buffer_ptrs)


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
    """A store whose exchanges count from 0.

    torch numbers those of symmetric memory (keys NAME/TURN and NAME/TURN/...) through the life of a process. Rank 0's
    may have had an engine before, and the other ranks' are new: they would wait for each other under different numbers.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}

    def _key(self, key: str) -> str:
        numbered = re.fullmatch(r"(.*?)/(\d+)(/.*)?", key)
        if numbered is None:
            return key
        name, turn, rest = numbered.groups()
        return f"{name}/{int(turn) - self._first.setdefault(name, int(turn))}{rest or ''}"

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
