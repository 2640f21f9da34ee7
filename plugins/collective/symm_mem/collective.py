"""collective=symm_mem: own reduction kernels between GPUs with peer access, NCCL for everything else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import PLAIN, ActFormat, Bundle, Partial, Residual
from dovetail.core.interfaces.rows import RowShard
from dovetail.core.layers import RMSNorm
from dovetail.core.ops import rms_norm
from dovetail.core.startup_notes import note
from dovetail.plugins.collective.config import SymmMemConfig
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.sharded import own_rows, sharded_boundary
from dovetail.plugins.collective.symm_mem.copies import CopiedRows
from dovetail.plugins.collective.symm_mem.driver import Driver
from dovetail.plugins.collective.symm_mem.kernels import encode_fp8
from dovetail.plugins.collective.symm_mem.mailbox import Mailbox
from dovetail.plugins.collective.symm_mem.memory import NotSharedError, SharedMemory
from dovetail.plugins.collective.symm_mem.reduce import Reducer
from dovetail.plugins.collective.symm_mem.size_table import SizeTable, fastest, measure

if TYPE_CHECKING:
    from dovetail.core.interfaces.collective import Norm

log = logging.getLogger(__name__)

ALGORITHMS = ("one_shot", "two_shot", "nccl")
SHARDED = ("sharded", "nccl_sharded")
"""Algorithms of a boundary that keep the residual sharded by rows."""
SUM_OF = {"sharded": "two_shot", "nccl_sharded": "nccl"}
"""Algorithm of a plain sum when the configured one serves boundaries only."""
FP8 = ActFormat("fp8", torch.float8_e4m3fn, group="token", scale_layout="row", encode=encode_fp8)
COLUMNS = 8192
"""Columns of the measured bfloat16 rows."""
EPS = 1e-5
STOP_COPIES_TIMEOUT = 0.5
"""Seconds for copies to stop before NCCL's kernels are aborted. Must be less than the executor's abort limit."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MOST_ROWS = 8192
"""Also measured where the residual may be sharded, which pays off for many rows."""
BoundaryTables = dict[bool, SizeTable]
"""Tables for boundaries; the key is whether all emitted values have 8 bits."""


class SymmMemCollective(NcclCollective):
    """Calls must come from one stream at a time, since they share the mailboxes."""

    config: SymmMemConfig
    reducer: Reducer | None = None
    copies: CopiedRows | None = None
    """Transport of boundaries that overlap with matmuls; created by the first one."""
    sums: SizeTable
    """Table for `all_reduce`."""
    boundaries: SizeTable
    """Table for a `boundary` that keeps the residual whole."""
    sharded_boundaries: BoundaryTables
    """Tables for a `boundary` that may shard the residual."""
    _aborted = False
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
            self.reducer = Reducer(self._make_mailbox(self._memory), rank, size)
            self._choose()

    def _make_mailbox(self, memory: SharedMemory) -> Mailbox:
        gathers = self._min_shard_rows is not None or self.config.algorithm == "sharded"
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
            self.sums, self.boundaries, self.sharded_boundaries = self.autotune(self._min_shard_rows is not None)
            if self.rank == 0:
                log.info("all-reduce: %s; with norm: %s", self.sums, self.boundaries)
                for narrow, table in self.sharded_boundaries.items():
                    log.info("with norm, residual by rows, %s: %s", "8 bits" if narrow else "16 bits", table)
        else:
            self.sums = SizeTable((0,), (SUM_OF.get(algorithm, algorithm),))
            self.boundaries, self.sharded_boundaries = SizeTable((0,), (algorithm,)), {}

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        self._check()
        algorithm = "nccl" if self._overlap_transport else self.sums.pick(x.nbytes)
        if algorithm != "nccl" and self.reducer.serves(x):
            return self.reducer.reduce(x.contiguous(), algorithm)
        return super().all_reduce(x)

    def boundary(
        self,
        x: torch.Tensor | Partial | Residual,
        residual: Residual | None,
        norm: Norm,
        emit: tuple[ActFormat, ...] = (PLAIN,),
        after: Norm | None = None,
    ) -> tuple[Bundle, Residual]:
        if self.size == 1 or not isinstance(x, Partial):
            return super().boundary(x, residual, norm, emit, after)
        self._check()
        fused: RMSNorm | None = None
        first: tuple[torch.Tensor, float] | None = None
        if type(norm) is RMSNorm and (after is None or type(after) is RMSNorm):
            fused, first = norm, None if after is None else (after.weight, after.eps)
        if self._overlap_transport and self.config.beside == "copies":
            copies = self._ensure_copies()
            if fused is None or not copies.serves(emit):
                return sharded_boundary(copies, x, residual, norm, emit, after)
            own = None if residual is None else own_rows(self, residual)
            bundle, summed = copies.boundary(x.values, own, fused.weight, fused.eps, emit, first)
            return bundle, RowShard(summed, len(x.values))
        if fused is None:
            note(f"collective=symm_mem: {type(norm).__name__} runs in a kernel of its own after sums over ranks")
            return super().boundary(x, residual, norm, emit, after)
        # A sharded residual stays sharded to the end of the forward pass.
        algorithm = self._boundary_algorithm(x.values, emit)
        if isinstance(residual, RowShard):
            algorithm = algorithm if algorithm in SHARDED else "nccl_sharded"
        elif algorithm == "sharded" and not self.reducer.serves_sharded(x.values, emit):
            algorithm = self.boundaries.pick(x.values.nbytes)
        if algorithm == "sharded" and self.reducer.serves_sharded(x.values, emit):
            own = None if residual is None else own_rows(self, residual)
            bundle, summed = self.reducer.sharded_boundary(x.values, own, fused.weight, fused.eps, emit, first)
            return bundle, RowShard(summed, len(x.values))
        if algorithm in SHARDED:
            return sharded_boundary(self, x, residual, norm, emit, after)
        if algorithm == "nccl" or not self.reducer.fuses(x.values):
            summed = NcclCollective.all_reduce(self, x.values)
            return super().boundary(summed, residual, norm, emit, after)
        return self.reducer.boundary(x.values, residual, fused.weight, fused.eps, emit, algorithm, first)

    def own_boundary(
        self,
        x: torch.Tensor | Partial | Residual,
        residual: Residual | None,
        norm: Norm,
        emit: tuple[ActFormat, ...] = (PLAIN,),
        after: Norm | None = None,
    ) -> tuple[Bundle, Residual]:
        if self.size > 1:
            note("collective=symm_mem: rows of layers that get each rank's own rows (experts) go over NCCL")
        return super().own_boundary(x, residual, norm, emit, after)

    def _ensure_copies(self) -> CopiedRows:
        """Return `copies`. The first call creates them, on all ranks together."""
        if self.copies is None:
            self.copies = CopiedRows(self._memory, Driver(self._device, self.size), self.rank, self.size)
        return self.copies

    def _boundary_algorithm(self, x: torch.Tensor, emit: tuple[ActFormat, ...]) -> str:
        if self._overlap_transport:
            return "nccl"
        least = self._min_shard_rows
        if least is None or len(x) < least:
            return self.boundaries.pick(x.nbytes)
        narrow = all(fmt.dtype is not None and fmt.dtype.itemsize == 1 for fmt in emit)
        return self.sharded_boundaries[narrow].pick(x.nbytes)

    @property
    def _min_shard_rows(self) -> int | None:
        """Minimum rows for sharded candidates; None where there are none or the algorithm was selected by name."""
        return self.config.shard_rows if self.config.algorithm == "measured" else None

    @property
    def _overlap_transport(self) -> bool:
        """Whether the transport for overlapped calls applies. While waiting, our kernels occupy every SM and NCCL's
        sharded boundaries do not overlap with matmuls. An algorithm selected by name is used in any case."""
        return self.overlapped and self.config.algorithm == "measured"

    def _shards_residual(self, x: torch.Tensor | Partial) -> bool:
        """Whether boundaries of norms that the kernels do not support shard the residual through NCCL."""
        if self.size == 1 or not isinstance(x, Partial):
            return False
        return self._boundary_algorithm(x.values, (PLAIN,)) == "nccl_sharded" or self.config.algorithm == "sharded"

    def argmax(self, value_N: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        if self.size == 1 or not 0 < len(index_N) <= self.reducer.most_argmax:
            return super().argmax(value_N, index_N)
        self._check()
        return self.reducer.argmax(value_N.contiguous(), index_N.contiguous())

    def abort(self) -> None:
        self._aborted = True
        memory, reducer, copies = self._memory, self.reducer, self.copies  # `close` may run concurrently.
        if memory is not None:
            memory.stop()
        if reducer is not None:
            reducer.mail.stop()
        if copies is not None:
            copies.stop()
            # Stopping copies may block behind an NCCL kernel, which `super` aborts; aborting NCCL may block behind
            # waiting copies. So copies go first, with a time limit.
            copies.stop_issued.wait(STOP_COPIES_TIMEOUT)
        super().abort()

    def close(self) -> None:
        super().close()
        if self.copies is not None:
            self.copies.close()
        self.reducer = self.copies = self._memory = None

    def _check(self) -> None:
        if self._aborted:
            raise RuntimeError("a rank died: sums are no longer valid")

    def autotune(self, shards: bool = False) -> tuple[SizeTable, SizeTable, BoundaryTables]:
        """Tables for sums, boundaries and boundaries that may shard the residual. All ranks use rank 0's times."""
        several = (*ROWS, MOST_ROWS) if shards else ROWS
        sizes = [rows * COLUMNS * torch.bfloat16.itemsize for rows in several]
        names = ALGORITHMS + SHARDED
        times = torch.full((3, len(names), len(several)), torch.inf, dtype=torch.float64)
        for at, rows in enumerate(several):
            for (kind, name), call in self._candidates(rows, shards).items():
                times[kind, names.index(name), at] = measure(call)
        # For the other algorithms the emitted format hardly matters: their kernels write it to local memory.
        times[2, : len(ALGORITHMS)] = times[1, : len(ALGORITHMS)]
        times = self.broadcast(times.to(self._device)).cpu()
        sums, wide, narrow = (dict(zip(names, kind.tolist(), strict=True)) for kind in times)
        boundaries = fastest(sizes, {name: wide[name] for name in ALGORITHMS})
        if not shards:
            return fastest(sizes, sums), boundaries, {}
        return fastest(sizes, sums), boundaries, {False: fastest(sizes, wide), True: fastest(sizes, narrow)}

    def _candidates(self, rows: int, shards: bool) -> dict[tuple[int, str], Callable[[], object]]:
        """Return (kind, algorithm) -> call. Kinds: 0 plain sum, 1 boundary, 2 boundary that emits 8 bits."""
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
            own_SC = own_rows(self, residual_TC)

            def norm(
                x: torch.Tensor, residual: torch.Tensor, emit: tuple[ActFormat, ...]
            ) -> tuple[Bundle, torch.Tensor]:
                return rms_norm(x, residual, weight_C, EPS, emit)

            for kind, emit in ((1, (PLAIN,)), (2, (FP8,))):
                found[kind, "sharded"] = partial(reducer.sharded_boundary, x_TC, own_SC, weight_C, EPS, emit)
                x, residual = Partial(x_TC), RowShard(own_SC, rows)
                found[kind, "nccl_sharded"] = partial(sharded_boundary, self, x, residual, norm, emit)
        return found
