"""Memory of every rank that every rank can write to: torch's symmetric memory without torch.distributed's global state.

Layout, in 32-bit words: a box for each program of one_shot, then one for each program of two_shot, then, where they are
asked for, one for what each program of sharded gathers. kernels.py says what a box holds.
"""

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
from dovetail.plugins.collective.symm_mem.kernels import BOX_WORDS, EMPTY

_EXCHANGE = timedelta(seconds=60)
"""For a few bytes between ranks that are all there."""


class Mailbox:
    """Written by kernels of all ranks, except where it says otherwise."""

    def __init__(self, rank: int, size: int, store: Any, device: torch.device, gathers: bool = False) -> None:
        self.boxes: int = torch.cuda.get_device_properties(device).multi_processor_count
        """Of each kind: as many programs of one launch as are certain to be resident."""
        one_shot, two_shot = (self.boxes * 2 * size * BOX_WORDS, self.boxes * 2 * 2 * BOX_WORDS)
        gather = one_shot if gathers else 0
        # The kernels need no multicast object, which takes a fabric manager to make.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        patience = store.timeout
        name, group = _group(rank, size, store)
        try:
            memory = _SymmetricMemory.empty_strided_p2p(
                (one_shot + two_shot + gather,), (1,), torch.int32, device, name
            )
            memory.fill_(EMPTY)
            torch.cuda.synchronize(device)
            # Returns when all ranks are here, so with their mailboxes empty.
            handle = _SymmetricMemory.rendezvous(memory, name)
        except RuntimeError as error:
            raise CapabilityError(
                [
                    f"collective=symm_mem: {device} cannot share its memory with the other ranks' GPUs ({error}). They "
                    "must be GPUs of one host with peer access to each other: choose collective=nccl"
                ]
            ) from error
        finally:
            store.set_timeout(patience)
        self._keep = memory, handle, group
        self.one_shot, self.two_shot = memory[:one_shot], memory[one_shot : one_shot + two_shot]
        self.gather = memory[one_shot + two_shot :] if gathers else None
        addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64)
        self.one_shot_peers = addresses.to(device)
        self.two_shot_peers = (addresses + 4 * one_shot).to(device)
        self.gather_peers = (addresses + 4 * (one_shot + two_shot)).to(device)
        self.one_shot_turns, self.two_shot_turns = torch.zeros(2, self.boxes, dtype=torch.int32, device=device)
        """Written by this rank's kernels."""
        self.stopped = torch.zeros(1, dtype=torch.int32, device=device)
        """Written by `stop`."""
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)
        # Streams of one priority share a few queues, and kernels that wait run on those of the usual one and, where
        # halves of a step take turns (core.layers.interleave), of the next.
        self._side = torch.cuda.Stream(device, priority=-2)
        torch.cuda.synchronize(device)

    def stop(self) -> None:
        """Ends the waiting of all kernels, now and later; from any thread. A copy engine does it, since the kernels may
        hold every multiprocessor."""
        with torch.cuda.stream(self._side):
            self.stopped.copy_(self._one, non_blocking=True)


def _group(rank: int, size: int, store: Any) -> tuple[Any, object]:
    """A name that leads torch's symmetric memory to the store, and what to keep while it shall. Some versions look for
    it in a table of their own, others in that of process groups, which holds none of them alive."""
    store.set_timeout(_EXCHANGE)
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
