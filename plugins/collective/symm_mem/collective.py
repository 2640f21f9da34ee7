"""collective=symm_mem: reduces by kernels of our own between GPUs with peer access, NCCL for what they do not serve."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import PLAIN, ActFormat, Bundle, Partial, Residual
from dovetail.core.layers import RMSNorm
from dovetail.core.ops import rms_norm
from dovetail.plugins.collective.config import SymmMemConfig
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.sharded import RowShard, edge, own_rows
from dovetail.plugins.collective.symm_mem.choice import SizeTable, measure, quickest
from dovetail.plugins.collective.symm_mem.copies import CopiedRows
from dovetail.plugins.collective.symm_mem.driver import Driver
from dovetail.plugins.collective.symm_mem.kernels import encode_fp8
from dovetail.plugins.collective.symm_mem.mailbox import Mailbox
from dovetail.plugins.collective.symm_mem.memory import NotSharedError, SharedMemory
from dovetail.plugins.collective.symm_mem.reduce import Reducer

if TYPE_CHECKING:
    from dovetail.core.interfaces.collective import Norm

log = logging.getLogger(__name__)

ALGORITHMS = ("one_shot", "two_shot", "nccl")
SHARDED = ("sharded", "nccl_sharded")
"""Edges that leave the residual with the ranks by rows."""
SUM_OF = {"sharded": "two_shot", "nccl_sharded": "nccl"}
"""How a sum is made that is no edge."""
FP8 = ActFormat("fp8", torch.float8_e4m3fn, group="token", scale_layout="row", encode=encode_fp8)
COLUMNS = 8192
"""Of the bfloat16 rows that are measured."""
EPS = 1e-5
HEAD_START = 0.5
"""Seconds that copies get to end their waiting before NCCL's kernels are ended; less than the executor waits for an
abort."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MOST_ROWS = 8192
"""Measured, too, where residuals may lie over the ranks: that is for many rows."""


Edges = dict[bool, SizeTable]
"""By whether values of 8 bits alone are emitted."""


class SymmMemCollective(NcclCollective):
    """Calls must come from one stream at a time: the mailboxes serve one call after the other."""

    config: SymmMemConfig
    reducer: Reducer | None = None
    copies: CopiedRows | None = None
    """For edges beside products, once there was one."""
    sums: SizeTable
    edges: SizeTable
    """For `all_reduce` and for `boundary`."""
    sharded_edges: Edges
    """For a `boundary` that may shard the residual."""
    _dead = False
    _memory: SharedMemory | None = None

    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        if device.type != "cuda":
            raise CapabilityError(
                [f"collective=symm_mem serves cuda, not {device}: choose collective=nccl (gloo on a CPU) or ordered"]
            )
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().connect(rank, size, address, device)
        if size > 1:
            self._memory = SharedMemory(rank, size, dist.PrefixStore("symm_mem", self._rendezvous.store), device)
            self.reducer = Reducer(self._made_mailbox(self._memory), rank, size)
            self._choose()

    def _made_mailbox(self, memory: SharedMemory) -> Mailbox:
        gathers = self._shards_from is not None or self.config.algorithm == "sharded"
        try:
            return Mailbox(memory, self.size, self._device, gathers)
        except NotSharedError as error:
            raise CapabilityError(
                [
                    f"collective=symm_mem: {error}. They must be GPUs of one host with peer access to each other: "
                    "choose collective=nccl"
                ]
            ) from error

    def _choose(self) -> None:
        algorithm = self.config.algorithm
        if algorithm == "measured":
            self.sums, self.edges, self.sharded_edges = self.measured(self._shards_from is not None)
            if self.rank == 0:
                log.info("all-reduce: %s; with norm: %s", self.sums, self.edges)
                for narrow, table in self.sharded_edges.items():
                    log.info("with norm, residual by rows, %s: %s", "8 bits" if narrow else "16 bits", table)
        else:
            self.sums = SizeTable((0,), (SUM_OF.get(algorithm, algorithm),))
            self.edges, self.sharded_edges = SizeTable((0,), (algorithm,)), {}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        self._check()
        algorithm = "nccl" if self._beside_products else self.sums.pick(x.nbytes)
        if algorithm != "nccl" and self.reducer.serves(x):
            return self.reducer.reduce(x.contiguous(), algorithm)
        return super().all_reduce(x)

    def boundary(
        self,
        x: torch.Tensor | Partial | Residual,
        residual: Residual | None,
        norm: Norm,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> tuple[Bundle, Residual]:
        if self.size == 1 or not isinstance(x, Partial):
            return super().boundary(x, residual, norm, emit)
        self._check()
        if self._beside_products and self.config.beside == "copies":
            copies = self._made_copies()
            if type(norm) is not RMSNorm or not copies.shares(emit):
                return edge(copies, x, residual, norm, emit)
            own = None if residual is None else own_rows(self, residual)
            bundle, summed = copies.share(x.values, own, norm.weight, norm.eps, emit)
            return bundle, RowShard(summed, len(x.values))
        if type(norm) is not RMSNorm:
            return super().boundary(x, residual, norm, emit)
        # A residual that lies over the ranks stays there to the end of the pass.
        algorithm = self._edge(x.values, emit)
        if isinstance(residual, RowShard):
            algorithm = algorithm if algorithm in SHARDED else "nccl_sharded"
        elif algorithm == "sharded" and not self.reducer.shares(x.values, emit):
            algorithm = self.edges.pick(x.values.nbytes)
        if algorithm == "sharded" and self.reducer.shares(x.values, emit):
            own = None if residual is None else own_rows(self, residual)
            bundle, summed = self.reducer.share(x.values, own, norm.weight, norm.eps, emit)
            return bundle, RowShard(summed, len(x.values))
        if algorithm in SHARDED:
            return edge(self, x, residual, norm, emit)
        if algorithm == "nccl" or not self.reducer.fuses(x.values):
            return norm(NcclCollective.all_reduce(self, x.values), residual, emit)
        return self.reducer.boundary(x.values, residual, norm.weight, norm.eps, emit, algorithm)

    def _made_copies(self) -> CopiedRows:
        """By the first call that needs them, which all ranks make together."""
        if self.copies is None:
            self.copies = CopiedRows(self._memory, Driver(self._device, self.size), self.rank, self.size)
        return self.copies

    def _edge(self, x: torch.Tensor, emit: tuple[ActFormat, ...]) -> str:
        if self._beside_products:
            return "nccl"
        least = self._shards_from
        if least is None or len(x) < least:
            return self.edges.pick(x.nbytes)
        narrow = all(fmt.dtype is not None and fmt.dtype.itemsize == 1 for fmt in emit)
        return self.sharded_edges[narrow].pick(x.nbytes)

    @property
    def _shards_from(self) -> int | None:
        """Rows; None = what was asked for by name serves all."""
        return self.config.shard_rows if self.config.algorithm == "measured" else None

    @property
    def _beside_products(self) -> bool:
        """Kernels of ours hold every multiprocessor while they wait, and NCCL's edges by rows take turns with the
        products: copies run beside them, or NCCL's sums. An algorithm that was asked for by name serves there, too."""
        return self.overlapped and self.config.algorithm == "measured"

    def _shards(self, x: torch.Tensor | Partial) -> bool:
        """Whether NCCL's edges do, for norms that the kernels do not know."""
        if self.size == 1 or not isinstance(x, Partial):
            return False
        return self._edge(x.values, (PLAIN,)) == "nccl_sharded" or self.config.algorithm == "sharded"

    def argmax(self, value_N: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or not 0 < len(index_N) <= self.reducer.most_argmax:
            return super().argmax(value_N, index_N)
        self._check()
        return self.reducer.argmax(value_N.contiguous(), index_N.contiguous())

    def abort(self) -> None:
        self._dead = True
        memory, reducer, copies = self._memory, self.reducer, self.copies  # `close` may come meanwhile.
        if memory is not None:
            memory.stop()
        if reducer is not None:
            reducer.mail.stop()
        if copies is not None:
            copies.stop()
            # What ends their waiting may itself wait for a kernel of NCCL's, which `super` ends; that may wait for one
            # of these, and hold what the other needs. So these first, but not for long.
            copies.told.wait(HEAD_START)
        super().abort()

    def close(self) -> None:
        super().close()
        if self.copies is not None:
            self.copies.close()
        self.reducer = self.copies = self._memory = None

    def _check(self) -> None:
        if self._dead:
            raise RuntimeError("a rank died: the sums of the others no longer count")

    def measured(self, shards: bool = False) -> tuple[SizeTable, SizeTable, Edges]:
        """Rank 0's times, for all ranks: of sums, of edges, and of edges that may shard the residual."""
        several = (*ROWS, MOST_ROWS) if shards else ROWS
        sizes = [rows * COLUMNS * torch.bfloat16.itemsize for rows in several]
        names = ALGORITHMS + SHARDED
        times = torch.full((3, len(names), len(several)), torch.inf, dtype=torch.float64)
        for at, rows in enumerate(several):
            for (kind, name), call in self._candidates(rows, shards).items():
                times[kind, names.index(name), at] = measure(call)
        # What the others emit hardly counts: their kernels write it to their own memory.
        times[2, : len(ALGORITHMS)] = times[1, : len(ALGORITHMS)]
        times = self.broadcast(times.to(self._device)).cpu()
        sums, wide, narrow = (dict(zip(names, kind.tolist(), strict=True)) for kind in times)
        edges = quickest(sizes, {name: wide[name] for name in ALGORITHMS})
        if not shards:
            return quickest(sizes, sums), edges, {}
        return quickest(sizes, sums), edges, {False: quickest(sizes, wide), True: quickest(sizes, narrow)}

    def _candidates(self, rows: int, shards: bool) -> dict[tuple[int, str], Callable[[], object]]:
        """(0 for the sum alone, 1 for the whole boundary or 2 for one that emits 8 bits, algorithm) -> a call."""
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
        if shards:
            kept = own_rows(self, residual_TC)

            def norm(
                x: torch.Tensor, residual: torch.Tensor, emit: tuple[ActFormat, ...]
            ) -> tuple[Bundle, torch.Tensor]:
                return rms_norm(x, residual, weight_C, EPS, emit)

            for kind, emit in ((1, (PLAIN,)), (2, (FP8,))):
                found[kind, "sharded"] = partial(reducer.share, x_TC, kept, weight_C, EPS, emit)
                found[kind, "nccl_sharded"] = partial(edge, self, Partial(x_TC), RowShard(kept, rows), norm, emit)
        return found
