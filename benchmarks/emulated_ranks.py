"""Emulates a rank of N on fewer GPUs: two processes do what two of N tensor-parallel ranks do.

    python benchmarks/profile_step.py 1 64 256 --emulate -- +preset=h200_fp8_tp8 engine.max_len=1024
    python benchmarks/allreduce.py --emulate 8
    python benchmarks/layer.py --ranks 8

Each process holds the shard of one rank and sends the other process everything it would send to each of the N - 1
others. It takes the other's data for that of all absent ranks. So a GPU computes, reads, sends and receives what a rank
does, over as many links, and the engine's steps can be timed and profiled. The results are not a model's output, and
what N GPUs do to each other, late ranks above all, is not in the figures.

It serves collective=symm_mem and rows of 8192 channels in 16 bits. NCCL is left out: its sums and its edges by rows are
not among the algorithms that are measured.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dovetail.core.compose import Composition
from dovetail.core.compose.selected import Selected
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ActFormat, Progress
from dovetail.core.worker.loader import LoadedRank, load_rank
from dovetail.plugins.collective.config import SymmMemConfig
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.symm_mem import kernels, mailbox, reduce, sharded_kernels
from dovetail.plugins.collective.symm_mem.collective import COLUMNS, SymmMemCollective
from dovetail.plugins.collective.symm_mem.copies import CopiedRows, barrier_operations
from dovetail.plugins.collective.symm_mem.mailbox import Mailbox
from dovetail.plugins.collective.symm_mem.memory import SharedBlock, SharedMemory
from dovetail.plugins.executor.multiproc import MultiprocExecutor

GPUS = 2
"""GPUs, and processes, that emulate any number of ranks."""
WORD = 4
ROW = COLUMNS * 2 // WORD
"""Words of a row."""


def emulate(composition: Composition) -> Composition:
    """Return the same composition with its engine.tp ranks emulated by two processes."""
    ranks, names = composition.engine.tp, [composition.part(kind).name for kind in ("executor", "collective")]
    if ranks <= GPUS or ROW % ranks or names != ["multiproc", "symm_mem"]:
        raise ConfigError(
            f"engine.tp={ranks} with executor={names[0]} and collective={names[1]}: two GPUs emulate 4, 8 or 16 ranks "
            "of executor=multiproc and collective=symm_mem"
        )
    return _with(composition, "executor", "emulated_ranks:Executor")


def launch_ranks(count: int) -> None:
    """Run this command in `count` processes, each with `--rank INDEX ADDRESS` added, and exit with their status. When
    one fails the others are killed: they would wait for it forever."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = [subprocess.Popen([sys.executable, *sys.argv, "--rank", str(i), address]) for i in range(count)]
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            for process in ranks:
                process.kill()
        time.sleep(0.2)
    sys.exit(int(any(process.returncode for process in ranks)))


def connect(rank: int, ranks: int, address: str, emulated: bool, algorithm: str = "measured") -> SymmMemCollective:
    """Return the connected collective of one rank."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if emulated:
        shorten_boxes()
    collective = (Collective if emulated else SymmMemCollective)(SymmMemConfig(algorithm=algorithm))
    collective.connect(rank, ranks, address, device)
    return collective


class Executor(MultiprocExecutor):
    loader = "emulated_ranks:load"
    size = GPUS  # type: ignore[assignment]


def load(composition: Composition, progress: Progress, *, size: int, **place: Any) -> LoadedRank:
    """Load one of engine.tp ranks; `size` of them are processes."""
    shorten_boxes()
    with_ours = _with(composition, "collective", "emulated_ranks:Collective")
    return load_rank(with_ours, progress, size=composition.engine.tp, **place)


class Collective(SymmMemCollective):
    """Sums this rank's summand and, for each of the other ranks, that of the other process."""

    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        NcclCollective.connect(self, rank, GPUS, address, device)
        self.size = size
        self._memory: Any = Memory(self._shared_memory(), rank, size)
        self.reducer = reduce.Reducer(self._make_mailbox(self._memory), rank, size)
        self._choose()

    def _shared_memory(self) -> SharedMemory:
        store = dist.PrefixStore("symm_mem", self._rendezvous.store)
        return SharedMemory(self.rank, GPUS, store, self._device)

    def _make_mailbox(self, memory: SharedMemory) -> Mailbox:
        mail = super()._make_mailbox(memory)
        steps = torch.tensor(steps_to_places(self.rank, self.size), device=self._device) * WORD
        mail.one_shot_peers += steps * ROW
        mail.gather_peers += steps * ROW
        mail.two_shot_peers += steps * (ROW // self.size)
        return mail

    def _ensure_copies(self) -> CopiedRows:
        first, copies = self.copies is None, super()._ensure_copies()
        if first:
            steps = steps_to_places(self.rank, self.size)
            words = [word + WORD * step for word, step in zip(copies._epochs.addresses, steps, strict=True)]
            copies._barrier_ops = copies._driver.operations(barrier_operations(words, self.rank, copies._others))
        return copies

    def _candidates(self, rows: int, shards: bool) -> dict[tuple[int, str], Callable[[], object]]:
        found = super()._candidates(rows, shards and rows % self.size == 0)
        return {key: call for key, call in found.items() if not key[1].startswith("nccl")}

    def _boundary_algorithm(self, x: torch.Tensor, emit: tuple[ActFormat, ...]) -> str:
        """Sharded boundaries only where each rank has equally many: nothing is sent for the row of an absent rank."""
        return super()._boundary_algorithm(x, emit) if len(x) % self.size == 0 else self.boundaries.pick(x.nbytes)

    def _stacked(self, x: torch.Tensor) -> torch.Tensor:
        size, self.size = self.size, GPUS
        two = super()._stacked(x)
        self.size = size
        return torch.stack([two[self.rank if rank == self.rank else 1 - self.rank] for rank in range(size)])

    def barrier(self) -> None:
        # Most ranks would send no part of a single number.
        NcclCollective.all_reduce(self, torch.zeros(1, device=self._device)).item()

    def reduce_rows(self, x_TC: torch.Tensor) -> torch.Tensor:
        return self.reducer.reduce(x_TC.contiguous(), "two_shot").view(self.size, -1, x_TC.shape[1])[self.rank]

    def gather_rows(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._stacked(part.contiguous().view(torch.uint8)).view(part.dtype).flatten(0, 1) for part in parts]


class Memory:
    """SharedMemory of `ranks`, in which the other process's memory replaces that of all other ranks."""

    def __init__(self, memory: SharedMemory, rank: int, ranks: int) -> None:
        self._memory, self._rank, self._ranks = memory, rank, ranks

    def stop(self) -> None:
        self._memory.stop()

    def allocate(self, words: int, fill: int) -> SharedBlock:
        block = self._memory.allocate(words, fill)
        own, other = block.addresses[self._rank], block.addresses[1 - self._rank]
        return replace(block, addresses=tuple(own if rank == self._rank else other for rank in range(self._ranks)))


def steps_to_places(rank: int, size: int) -> list[int]:
    """Distance from its own place at which a process writes, for each receiving rank. At the other process every place
    is filled by one write each, except that process's own."""
    other = 1 - rank
    return [0 if to in (rank, other) else to - rank for to in range(size)]


def shorten_boxes() -> None:
    """Make boxes one row long, also in flat sums, for the life of the process. Then the words of adjacent ranks are
    equally far apart in both hops of two_shot, and one table of addresses leads each word to its place."""
    kernels._BOX = sharded_kernels._BOX = kernels.tl.constexpr(ROW)
    mailbox.BOX_WORDS = reduce.BOX_WORDS = reduce.SMALL_ROW = reduce.LARGE_ROW = ROW


def _with(composition: Composition, kind: str, target: str) -> Composition:
    part = composition.part(kind)
    registered = replace(part.registered, component=replace(part.component, target=target))
    return replace(composition, parts={**composition.parts, kind: Selected(registered, part.config)})
