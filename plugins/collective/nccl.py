"""NCCL on CUDA, gloo on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import distributed_c10d as c10d

from dovetail.core.interfaces import PLAIN, ActFormat, Bundle, Collective, Partial, Residual
from dovetail.core.interfaces.rows import RowShard
from dovetail.plugins.collective.config import NcclConfig
from dovetail.plugins.collective.process_group import Rendezvous
from dovetail.plugins.collective.sharded import sharded_boundary, whole

if TYPE_CHECKING:
    from dovetail.core.interfaces.collective import Norm


class NcclCollective(Collective):
    """NCCL on CUDA, gloo on the CPU. CUDA calls enqueue and return; later work on the current stream sees results."""

    config: NcclConfig

    def __init__(self, config: NcclConfig) -> None:
        super().__init__(config)
        self._timeout = timedelta(seconds=config.timeout)
        self._rendezvous = Rendezvous()
        self._group: Any = None
        self._ending = threading.Lock()
        self._device = torch.device("cpu")

    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        if self._group is not None:
            raise ValueError(f"rank {self.rank} of {self.size} is already connected")
        self.rank, self.size, self._device = rank, size, device
        if size > 1:
            self._group = self._rendezvous.meet(rank, size, address, device, self._timeout)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        x = x.contiguous()
        self._wait(self._group.allreduce([x], _in_stream(c10d.AllreduceOptions())))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        return torch.cat(self._stacked(x).unbind(0), dim=-1)

    def _stacked(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of all ranks: [size, *x.shape], in rank order."""
        stacked = x.new_empty(self.size * x.numel())
        self._wait(self._group._allgather_base(stacked, x.reshape(-1), _in_stream(c10d.AllgatherOptions())))
        return stacked.view(self.size, *x.shape)

    def boundary(
        self,
        x: torch.Tensor | Partial | Residual,
        residual: Residual | None,
        norm: Norm,
        emit: tuple[ActFormat, ...] = (PLAIN,),
        after: Norm | None = None,
    ) -> tuple[Bundle, Residual]:
        if isinstance(x, RowShard) or isinstance(residual, RowShard) or self._shards_residual(x):
            return sharded_boundary(self, x, residual, norm, emit, after)
        return super().boundary(x, residual, norm, emit, after)

    def own_boundary(
        self,
        x: torch.Tensor | Partial | Residual,
        residual: Residual | None,
        norm: Norm,
        emit: tuple[ActFormat, ...] = (PLAIN,),
        after: Norm | None = None,
    ) -> tuple[Bundle, Residual]:
        if self.size == 1:
            return super().own_boundary(x, residual, norm, emit, after)
        return sharded_boundary(self, x, residual, norm, emit, after, own=True)

    def _shards_residual(self, x: torch.Tensor | Partial) -> bool:
        """Whether a boundary of `x` starts to shard the residual. Only sums do: a tensor needs no communication."""
        least = self.config.shard_rows
        return self.size > 1 and least is not None and isinstance(x, Partial) and len(x.values) >= least

    def whole(self, residual: Residual) -> torch.Tensor:
        return whole(self, residual) if isinstance(residual, RowShard) else residual

    def reduce_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        x = x.contiguous()
        out = x.new_empty(len(x) // self.size, *x.shape[1:])
        self._wait(self._group._reduce_scatter_base(out, x, _in_stream(c10d.ReduceScatterOptions())))
        return out

    def gather_rows(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.size == 1:
            return list(parts)
        options = _in_stream(c10d.AllgatherOptions())
        return self._exchanged(parts, self.size, lambda into, part: self._group._allgather_base(into, part, options))

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self.size == 1:
            return list(parts)
        options = _in_stream(c10d.AllToAllOptions())
        return self._exchanged(parts, 1, lambda into, part: self._group.alltoall_base(into, part, [], [], options))

    def _exchanged(
        self, parts: Sequence[torch.Tensor], times: int, call: Callable[[torch.Tensor, torch.Tensor], Any]
    ) -> list[torch.Tensor]:
        """Call `call` with each part and an output of `times` as many rows: together where the transport can."""
        # As bytes: the transport may not support the dtypes of encoded rows.
        mine = [part.contiguous().view(torch.uint8) for part in parts]
        every = [part.new_empty(times * len(part), *part.shape[1:]) for part in mine]
        together = len(parts) > 1 and self._group.supports_coalescing
        if together:
            self._group._start_coalescing()
        for into, part in zip(every, mine, strict=True):
            work = call(into, part)
            if not together:
                self._wait(work)
        if together:
            self._wait(self._group._end_coalescing())
        return [into.view(part.dtype) for into, part in zip(every, parts, strict=True)]

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        if self.size == 1:
            return x
        x = x.contiguous()
        options = _in_stream(c10d.BroadcastOptions())
        options.rootRank, options.rootTensor = root, 0
        self._wait(self._group.broadcast([x], options))
        return x

    def barrier(self) -> None:
        """Block the host until every rank has called and this device's earlier work is done."""
        if self.size > 1:
            self.all_reduce(torch.zeros(1, device=self._device)).item()

    def abort(self) -> None:
        self._rendezvous.abort()
        # On a CPU closed connections end the calls; NCCL kernels would wait for the dead rank forever.
        if self._device.type == "cuda":
            group = self._take_group()
            if group is not None:
                group.abort()

    def close(self) -> None:
        group = self._take_group()
        if group is not None:
            group.shutdown()

    def _take_group(self) -> Any:
        """Return the group to the first caller and None to later ones, from any thread."""
        with self._ending:
            group, self._group = self._group, None
        return group

    @staticmethod
    def _wait(work: Any) -> None:
        # NCCL returns None for a call that runs on the current stream itself.
        if work is not None:
            work.wait()


def _in_stream(options: Any) -> Any:
    """Make a call run on the current stream."""
    options.asyncOp = False
    return options
