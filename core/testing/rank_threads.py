"""Tensor-parallel ranks as threads of one process, with collectives over a shared list instead of a transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from dovetail.core.testing.model_driver import Alone

T = TypeVar("T")


class Meeting:
    """State shared by the threads of one group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadCollective(Alone):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(None)
        self.rank, self.size, self.meeting = rank, meeting.size, meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=-1)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        return self._exchange(x.clone())[root]

    def barrier(self) -> None:
        self.meeting.barrier.wait()

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.meeting.slots[self.rank] = x
        self.meeting.barrier.wait()
        all_ranks = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return all_ranks


def on_threads(size: int, work: Callable[[ThreadCollective], T]) -> list[T]:
    """Run work(collective) on every rank and return the results in rank order."""
    meeting = Meeting(size)

    def one(rank: int) -> T:
        try:
            return work(ThreadCollective(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        # A failed rank breaks the barrier of the others, so its own error is raised first.
        errors = [future.exception() for future in futures]
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
