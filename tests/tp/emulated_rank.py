"""One of two processes that emulate many ranks (benchmarks/emulated_ranks.py), with kernels in Triton's interpreter.

python emulated_rank.py <rank> <ranks> <folder>
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import emulated_ranks
from symm_mem_rank import (
    BOXES,
    EPS,
    PROGRAMS,
    CopiesOfTheCpu,
    MappedMemory,
    mailbox,
    meeting,
    summand,
    together,
)

from dovetail.core.interfaces import PLAIN, Partial
from dovetail.core.interfaces.rows import RowShard
from dovetail.core.layers import RMSNorm
from dovetail.core.testing.interpreter import mend_interpreter, quicken
from dovetail.plugins.collective.config import SymmMemConfig
from dovetail.plugins.collective.symm_mem import collective as symm_mem
from dovetail.plugins.collective.symm_mem import kernels, sharded_kernels
from dovetail.plugins.collective.symm_mem.kernels import EMPTY
from dovetail.plugins.collective.symm_mem.size_table import SizeTable
from dovetail.plugins.quant.fp8.format import FP8_TOKEN


class Interpreted(emulated_ranks.Collective):
    """Keeps mailboxes and memory in files and uses gloo instead of NCCL."""

    def __init__(self, folder: Path) -> None:
        super().__init__(SymmMemConfig())
        self.folder = folder

    def _shared_memory(self) -> Any:
        return MappedMemory(self.folder, self.rank, emulated_ranks.GPUS)

    def _choose(self) -> None:
        self.sums = self.boundaries = SizeTable((0,), ("two_shot",))
        self.sharded_boundaries = {}


def emulated_mailbox(memory: emulated_ranks.Memory, size: int, device: torch.device, gathers: bool) -> SimpleNamespace:
    one_shot, two_shot = BOXES * 2 * size * emulated_ranks.ROW, PROGRAMS * 2 * 2 * emulated_ranks.ROW
    block = memory.allocate(2 * one_shot + two_shot, EMPTY)
    return mailbox(block.words, torch.tensor(block.addresses), (one_shot, two_shot), block)


def main(rank: int, ranks: int, folder: Path) -> None:
    mend_interpreter()
    quicken()
    kernels.fence = sharded_kernels.fence = lambda: None
    emulated_ranks.shorten_boxes()
    symm_mem.Driver = lambda *_: CopiesOfTheCpu(rank)  # type: ignore[misc,assignment]
    symm_mem.Mailbox = emulated_mailbox  # type: ignore[misc,assignment]
    collective = Interpreted(folder)
    collective.connect(rank, ranks, meeting(rank, folder), torch.device("cpu"))
    out: dict[str, torch.Tensor] = {}
    reducer, columns = collective.reducer, emulated_ranks.COLUMNS
    weight, whole = torch.ones(columns).half(), summand(91, (3, columns), torch.float16) * 0
    for turn in range(2):
        for algorithm in ("one_shot", "two_shot"):
            x = summand(rank, (3, columns), torch.float16)
            _, out[f"{algorithm} {turn}"] = reducer.boundary(x, whole, weight, EPS, (PLAIN,), algorithm)
            out[f"{algorithm} flat {turn}"] = reducer.reduce(summand(rank, (4, columns), torch.float16), algorithm)
        x = summand(rank, (2 * ranks, columns), torch.float16)
        out[f"sharded {turn}"] = reducer.sharded_boundary(x, None, weight, EPS, (FP8_TOKEN,))[1]
        out[f"argmax {turn}"] = collective.argmax(torch.tensor([1.0, rank]), torch.tensor([7 + rank, 50 + rank]))
    gathered = collective.all_gather(torch.tensor([[rank]]))
    assert gathered.tolist() == [[1 - rank if i != rank else rank for i in range(ranks)]]
    collective.overlapped = True
    build: Any = SimpleNamespace(dtype=torch.float16, device=torch.device("cpu"))
    norm = RMSNorm("norm", build, columns, EPS)
    norm.weight.fill_(1)
    residual: Any = None
    for rows in (3, 9, 20):
        residual = None
        for _ in range(3):
            bundle, residual = collective.boundary(Partial(torch.ones(rows, columns).half()), residual, norm, (PLAIN,))
        assert isinstance(residual, RowShard)
        assert bundle[PLAIN].values.shape == (rows, columns)
    torch.save(out, folder / f"{rank}.pt")
    together("done", rank, emulated_ranks.GPUS, folder)
    mail: Any = collective.reducer.mail
    left = [name for name in ("one_shot", "two_shot", "gather") if bool((getattr(mail, name) != EMPTY).any())]
    assert not left, f"player {rank} has words left in {left}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    # gloo's threads may wait for the GIL while the interpreter waits for them.
    os._exit(0)
