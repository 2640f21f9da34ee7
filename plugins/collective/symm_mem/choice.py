"""Which algorithm is quickest for a message of so many bytes: measured when the ranks connect, then looked up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

CALLS = 8
"""In a graph, so that launching does not count."""
REPLAYS = 3


@dataclass(frozen=True, slots=True)
class SizeTable:
    """Of sizes between two measured ones, what is quickest for the larger; beyond the last, what is quickest there."""

    sizes: tuple[int, ...]
    """Bytes, ascending."""
    names: tuple[str, ...]

    def pick(self, nbytes: int) -> str:
        return self.names[min(bisect_left(self.sizes, nbytes), len(self.names) - 1)]

    def __str__(self) -> str:
        """Only where the name changes: "one_shot up to 128 KiB, two_shot up to 4 MiB, nccl beyond"."""
        last = [i for i, name in enumerate(self.names) if i + 1 == len(self.names) or self.names[i + 1] != name]
        told = [f"{self.names[i]} up to {_size(self.sizes[i])}" for i in last[:-1]]
        return ", ".join([*told, f"{self.names[-1]} beyond" if told else self.names[-1]])


def quickest(sizes: Sequence[int], times: Mapping[str, Sequence[float]]) -> SizeTable:
    """`times`: of each algorithm at each size, inf where it cannot."""
    return SizeTable(tuple(sizes), tuple(min(times, key=lambda name: times[name][i]) for i in range(len(sizes))))


def measure(call: Callable[[], object]) -> float:
    """Seconds a call takes on the device, as one of many in a graph. A collective call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        call()
        # `torch.cuda.graph` would collect garbage first, which takes longer than all the rest.
        graph.capture_begin()
        for _ in range(CALLS):
            call()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The first replay brings the ranks together.
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
