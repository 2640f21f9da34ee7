"""Table of the fastest algorithm per message size, measured when the ranks connect."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

CALLS = 8
"""Calls per CUDA graph: a graph excludes launch overhead from the time."""
REPLAYS = 3


@dataclass(frozen=True, slots=True)
class SizeTable:
    """Fastest algorithm per message size. Unmeasured sizes take the next larger entry, or else the last."""

    sizes: tuple[int, ...]
    """Bytes, ascending."""
    names: tuple[str, ...]

    def pick(self, nbytes: int) -> str:
        return self.names[min(bisect_left(self.sizes, nbytes), len(self.names) - 1)]

    def __str__(self) -> str:
        """List the sizes at which the name changes: "one_shot up to 128 KiB, two_shot up to 4 MiB, nccl beyond"."""
        last = [i for i, name in enumerate(self.names) if i + 1 == len(self.names) or self.names[i + 1] != name]
        ranges = [f"{self.names[i]} up to {_size(self.sizes[i])}" for i in last[:-1]]
        return ", ".join([*ranges, f"{self.names[-1]} beyond" if ranges else self.names[-1]])


def fastest(sizes: Sequence[int], times: Mapping[str, Sequence[float]]) -> SizeTable:
    """Build the table from each algorithm's time at each size, inf where it is unsupported."""
    return SizeTable(tuple(sizes), tuple(min(times, key=lambda name: times[name][i]) for i in range(len(sizes))))


def measure(call: Callable[[], object]) -> float:
    """Return the device time of one call in seconds, averaged over CUDA graph replays. A collective call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        call()
        # Not `torch.cuda.graph`: it collects garbage first, which takes longer than the measurement.
        graph.capture_begin()
        for _ in range(CALLS):
            call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The first replay synchronizes the ranks.
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / (1000 * CALLS * REPLAYS)


def _size(nbytes: int) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}"
    return f"{nbytes} B"
