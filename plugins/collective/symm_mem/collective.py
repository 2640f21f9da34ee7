"""collective=symm_mem: reduces by kernels of our own between GPUs with peer access, NCCL for what they do not serve."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import PLAIN, ActFormat, Bundle, Partial
from dovetail.core.layers import RMSNorm
from dovetail.core.ops import rms_norm
from dovetail.plugins.collective.config import SymmMemConfig
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.symm_mem.choice import SizeTable, measure, quickest
from dovetail.plugins.collective.symm_mem.mailbox import Mailbox
from dovetail.plugins.collective.symm_mem.reduce import Reducer

if TYPE_CHECKING:
    from dovetail.core.interfaces.collective import Norm

log = logging.getLogger(__name__)

ALGORITHMS = ("one_shot", "two_shot", "nccl")
COLUMNS = 8192
"""Of the bfloat16 rows that are measured."""
EPS = 1e-5
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class SymmMemCollective(NcclCollective):
    """Calls must come from one stream at a time: the mailboxes serve one call after the other."""

    config: SymmMemConfig
    reducer: Reducer | None = None
    sums: SizeTable
    edges: SizeTable
    """For `all_reduce` and for `boundary`."""
    _dead = False

    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        if device.type != "cuda":
            raise CapabilityError(
                [f"collective=symm_mem serves cuda, not {device}: choose collective=nccl (gloo on a CPU) or ordered"]
            )
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().connect(rank, size, address, device)
        if size == 1:
            return
        store = dist.PrefixStore("symm_mem", self._rendezvous.store)
        self.reducer = Reducer(Mailbox(rank, size, store, device), rank, size)
        if self.config.algorithm == "measured":
            self.sums, self.edges = self.measured()
            if rank == 0:
                log.info("all-reduce: %s; with norm: %s", self.sums, self.edges)
        else:
            self.sums = self.edges = SizeTable((0,), (self.config.algorithm,))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        self._check()
        algorithm = self.sums.pick(x.nbytes)
        if algorithm != "nccl" and self.reducer.serves(x):
            return self.reducer.reduce(x.contiguous(), algorithm)
        return super().all_reduce(x)

    def boundary(
        self,
        x: torch.Tensor | Partial,
        residual: torch.Tensor | None,
        norm: Norm,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> tuple[Bundle, torch.Tensor]:
        if self.size == 1 or not isinstance(x, Partial) or type(norm) is not RMSNorm:
            return super().boundary(x, residual, norm, emit)
        self._check()
        algorithm = self.edges.pick(x.values.nbytes)
        if algorithm == "nccl" or not self.reducer.fuses(x.values):
            return norm(NcclCollective.all_reduce(self, x.values), residual, emit)
        return self.reducer.boundary(x.values, residual, norm.weight, norm.eps, emit, algorithm)

    def argmax(self, value_N: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or not 0 < len(index_N) <= self.reducer.most_argmax:
            return super().argmax(value_N, index_N)
        self._check()
        return self.reducer.argmax(value_N.contiguous(), index_N.contiguous())

    def abort(self) -> None:
        self._dead = True
        reducer = self.reducer  # `close` may come meanwhile.
        if reducer is not None:
            reducer.mail.stop()
        super().abort()

    def close(self) -> None:
        super().close()
        self.reducer = None

    def _check(self) -> None:
        if self._dead:
            raise RuntimeError("a rank died: the sums of the others no longer count")

    def measured(self) -> tuple[SizeTable, SizeTable]:
        """Rank 0's times, for all ranks."""
        sizes = [rows * COLUMNS * torch.bfloat16.itemsize for rows in ROWS]
        times = torch.full((2, len(ALGORITHMS), len(ROWS)), torch.inf, dtype=torch.float64)
        for at, rows in enumerate(ROWS):
            for (kind, name), call in self._candidates(rows).items():
                times[kind, ALGORITHMS.index(name), at] = measure(call)
        times = self.broadcast(times.to(self._device)).cpu()
        sums, edges = (quickest(sizes, dict(zip(ALGORITHMS, kind.tolist(), strict=True))) for kind in times)
        return sums, edges

    def _candidates(self, rows: int) -> dict[tuple[int, str], Callable[[], object]]:
        """(0 for the sum alone or 1 for the whole boundary, algorithm) -> a call."""
        x_TC, residual_TC = torch.zeros(2, rows, COLUMNS, dtype=torch.bfloat16, device=self._device)
        weight_C, reducer = torch.ones_like(x_TC[0]), self.reducer
        nccl = partial(NcclCollective.all_reduce, self, x_TC)
        found: dict[tuple[int, str], Callable[[], object]] = {
            (0, "nccl"): nccl,
            (1, "nccl"): lambda: rms_norm(nccl(), residual_TC, weight_C, EPS),
        }
        for name in ("one_shot", "two_shot"):
            if name == "two_shot" or rows <= reducer.mail.boxes:
                found[0, name] = partial(reducer.reduce, x_TC, name)
                found[1, name] = partial(reducer.boundary, x_TC, residual_TC, weight_C, EPS, (PLAIN,), name)
        return found
