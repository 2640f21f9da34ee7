"""Tensor-parallel ranks as threads of one process: sums and gathers over a shared list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from .driver import Alone


class Meeting:
    """What the threads of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[torch.Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)


class ThreadCollective(Alone):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(None)
        self.rank, self.size, self.meeting = rank, meeting.size, meeting

    def all_reduce(self, x):
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x):
        return torch.cat(self._exchange(x), dim=-1)

    def _exchange(self, x):
        self.meeting.slots[self.rank] = x
        self.meeting.barrier.wait()
        everyone = list(self.meeting.slots)
        self.meeting.barrier.wait()
        return everyone


def on_ranks(size: int, work: Callable[[ThreadCollective], object]) -> list:
    """work(collective) on every rank; results in rank order."""
    meeting = Meeting(size)

    def one(rank: int):
        try:
            return work(ThreadCollective(rank, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        return [future.result() for future in futures]
