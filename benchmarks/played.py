"""Many ranks played by two GPUs: the steps of a rank of eight, where there are no eight.

Each of two processes holds the shard of one rank, and takes the other's words for those of all ranks that are not
there: what it would send to each of seven it sends seven times to the other GPU. So a GPU computes, reads, sends and
receives what a rank does, over as many links, and the engine's steps can be timed and profiled. What they compute is no
model's output; ranks that come late, and all else that eight GPUs do to each other, are not in the figures.

For collective=symm_mem and rows of 8192 channels in 16 bits, where NCCL takes no part: its sums and edges by rows are
not among those that are measured.

    python benchmarks/profile_step.py 1 64 256 --play -- +preset=h200_fp8_tp8 engine.max_len=1024
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dovetail.core.compose import Composition
from dovetail.core.compose.selected import Selected
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ActFormat
from dovetail.core.worker.runner import Runner as OneRank
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.symm_mem import kernels, mailbox, reduce, sharded_kernels
from dovetail.plugins.collective.symm_mem.collective import COLUMNS, SymmMemCollective
from dovetail.plugins.collective.symm_mem.copies import CopiedRows, barrier_operations
from dovetail.plugins.collective.symm_mem.mailbox import Mailbox
from dovetail.plugins.collective.symm_mem.memory import SharedBlock, SharedMemory
from dovetail.plugins.executor.multiproc import MultiprocExecutor

PLAYERS = 2
WORD = 4
ROW = COLUMNS * 2 // WORD
"""Words of a row."""


def play(composition: Composition) -> Composition:
    """The same, with engine.tp ranks played by two processes."""
    ranks, names = composition.engine.tp, [composition.part(kind).name for kind in ("executor", "collective")]
    if ranks <= PLAYERS or ROW % ranks or names != ["multiproc", "symm_mem"]:
        raise ConfigError(
            f"engine.tp={ranks} with executor={names[0]} and collective={names[1]}: two GPUs play 4, 8 or 16 ranks of "
            "executor=multiproc and collective=symm_mem"
        )
    return _with(composition, "executor", "played:Executor")


class Executor(MultiprocExecutor):
    runner_class = "played:Runner"
    size = PLAYERS  # type: ignore[assignment]


class Runner(OneRank):
    def __init__(self, composition: Composition, *, rank: int, size: int, address: str) -> None:
        shorten_boxes()
        with_ours = _with(composition, "collective", "played:Collective")
        super().__init__(with_ours, rank=rank, size=composition.engine.tp, address=address)


class Collective(SymmMemCollective):
    """The sum of a call: this rank's summand, and the other player's for each of the others."""

    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        NcclCollective.connect(self, rank, PLAYERS, address, device)
        self.size = size
        self._memory: Any = Peers(self._of_both(), rank, size)
        self.reducer = reduce.Reducer(self._make_mailbox(self._memory), rank, size)
        self._choose()

    def _of_both(self) -> SharedMemory:
        store = dist.PrefixStore("symm_mem", self._rendezvous.store)
        return SharedMemory(self.rank, PLAYERS, store, self._device)

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
        """By rows only where each rank has as many: of a rank's row that is not there nothing is sent."""
        return super()._boundary_algorithm(x, emit) if len(x) % self.size == 0 else self.boundaries.pick(x.nbytes)

    def _stacked(self, x: torch.Tensor) -> torch.Tensor:
        size, self.size = self.size, PLAYERS
        two = super()._stacked(x)
        self.size = size
        return torch.stack([two[self.rank if rank == self.rank else 1 - self.rank] for rank in range(size)])

    def barrier(self) -> None:
        # Of one number most ranks would send no part.
        NcclCollective.all_reduce(self, torch.zeros(1, device=self._device)).item()

    def reduce_rows(self, x_TC: torch.Tensor) -> torch.Tensor:
        return self.reducer.reduce(x_TC.contiguous(), "two_shot").view(self.size, -1, x_TC.shape[1])[self.rank]

    def gather_rows(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._stacked(part.contiguous().view(torch.uint8)).view(part.dtype).flatten(0, 1) for part in parts]


class Peers:
    """SharedMemory of `ranks`, where the other player's stands for that of all others."""

    def __init__(self, memory: SharedMemory, rank: int, ranks: int) -> None:
        self._memory, self._rank, self._ranks = memory, rank, ranks

    def stop(self) -> None:
        self._memory.stop()

    def allocate(self, words: int, fill: int) -> SharedBlock:
        block = self._memory.allocate(words, fill)
        own, other = block.addresses[self._rank], block.addresses[1 - self._rank]
        return replace(block, addresses=tuple(own if rank == self._rank else other for rank in range(self._ranks)))


def steps_to_places(rank: int, size: int) -> list[int]:
    """How many places behind its own a player writes, by the rank that it writes to: at the other player's every place
    is filled but that one's own, by one write each."""
    other = 1 - rank
    return [0 if to in (rank, other) else to - rank for to in range(size)]


def shorten_boxes() -> None:
    """To a row, also in flat sums: the words of a rank are as far from the next one's in both hops of two_shot then, so
    one table of addresses leads each to its place. For the life of the process."""
    kernels._BOX = sharded_kernels._BOX = kernels.tl.constexpr(ROW)
    mailbox.BOX_WORDS = reduce.BOX_WORDS = reduce.SMALL_ROW = reduce.LARGE_ROW = ROW


def _with(composition: Composition, kind: str, target: str) -> Composition:
    part = composition.part(kind)
    registered = replace(part.registered, component=replace(part.component, target=target))
    return replace(composition, parts={**composition.parts, kind: Selected(registered, part.config)})
