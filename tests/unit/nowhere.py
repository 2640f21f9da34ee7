"""Parts of a rank of collective=symm_mem whose peers are not there, for tests that launch kernels without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dovetail.plugins.collective.symm_mem.copies import CopiedRows
from dovetail.plugins.collective.symm_mem.memory import SharedBlock
from dovetail.plugins.collective.symm_mem.reduce import Reducer


class Nowhere:
    """SharedMemory and Driver."""

    def allocate(self, words: int, fill: int) -> SharedBlock:
        return SharedBlock(torch.empty(words, dtype=torch.int32, device="cuda"), (0,) * 8, None)

    def copies(self, moves: object) -> None: ...

    def copy(self, copies: object, start: int = 0) -> None: ...

    def operations(self, each: object) -> None: ...

    def operate(self, operations: object, value: int) -> None: ...


def lone_reducer(rank: int, size: int) -> Reducer:
    words, peers = (torch.empty(size, dtype=dtype, device="cuda") for dtype in (torch.int32, torch.int64))
    mail: Any = SimpleNamespace(boxes=132, one_shot=words, two_shot=words, gather=words, stopped=words)
    mail.one_shot_peers = mail.two_shot_peers = mail.gather_peers = peers
    mail.one_shot_halves = mail.two_shot_halves = words
    return Reducer(mail, rank, size)


def lone_copies(rank: int, size: int) -> CopiedRows:
    nowhere: Any = Nowhere()
    return CopiedRows(nowhere, nowhere, rank, size)
