"""Queue of a PolicyScheduler: sequences that have no slot, by rank or else in order of arrival."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Any

from dovetail.core.interfaces import KVAllocator, SchedulerLimits, Sequence

STALE = 64
"""Stale entries of the heap that are tolerated, besides as many as sequences wait."""


class WaitingQueue:
    def __init__(self, rank: Callable[[Sequence], Any]) -> None:
        """`rank`: PolicyScheduler.rank."""
        self.new: dict[int, Sequence] = {}
        """Sequences that have never run, in order of arrival."""
        self.preempted: dict[int, Sequence] = {}
        """In order of preemption."""
        self._rank = rank
        self._ranked: list[tuple[Any, int, int, Sequence]] = []
        """Heap of (rank, uid, epoch, sequence) if the policy ranks. Stale entries are dropped when they are popped."""

    def __len__(self) -> int:
        return len(self.new) + len(self.preempted)

    def add(self, seq: Sequence, *, preempted: bool = False) -> None:
        (self.preempted if preempted else self.new)[seq.uid] = seq
        if (rank := self._rank(seq)) is None:
            return
        heapq.heappush(self._ranked, (rank, seq.uid, seq.epoch, seq))
        if len(self._ranked) > 2 * len(self) + STALE:
            self._ranked = [entry for entry in self._ranked if self._waits(entry)]
            heapq.heapify(self._ranked)

    def remove(self, uid: int) -> None:
        """Remove a sequence, if it waits."""
        self.new.pop(uid, None)
        self.preempted.pop(uid, None)

    def by_rank(self) -> Generator[Sequence, None, None]:
        """Yield every sequence, by rank or else preempted ones first, then by arrival. Close the generator: it then
        restores the heap."""
        if not self._ranked:
            yield from self.preempted.values()
            yield from self.new.values()
            return
        taken = []
        try:
            while self._ranked:
                entry = heapq.heappop(self._ranked)
                if self._waits(entry):
                    taken.append(entry)
                    yield entry[-1]
        finally:
            for entry in taken:
                heapq.heappush(self._ranked, entry)

    def _waits(self, entry: tuple[Any, int, int, Sequence]) -> bool:
        _, uid, epoch, seq = entry
        return seq.epoch == epoch and (uid in self.new or uid in self.preempted)


def never_fits(seq: Sequence, limits: SchedulerLimits, kv: KVAllocator) -> str | None:
    """Return why a sequence can never run, or None."""
    if seq.known_len >= limits.max_len:
        limit = limits.max_len
        return f"prompt of {seq.known_len} tokens leaves no room in a context of {limit} (engine.max_len)"
    for group, pages in kv.pages_needed(seq.limit, limits.ahead).items():
        have = kv.num_pages[group]
        if pages > have:
            return (
                f"{seq.limit} tokens need {pages} KV pages and the cache has {have}: lower max_tokens, shorten the "
                "prompt, or raise engine.kv_pages or engine.memory_fraction"
            )
    return None
