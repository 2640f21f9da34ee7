"""Collective contract: how tensor-parallel ranks sum, gather and agree. Ranks and groups come from core.parallel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Bundle, Partial
from dovetail.core.interfaces.rows import RowShard, share_of, share_of_bundle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Norm = Callable[..., tuple[Bundle, torch.Tensor]]
    """norm(x, residual, emit) -> (bundle of norm(x + residual), x + residual). A norm that follows a layer which defers
    its scales also takes scale=Partial.scale, one between parallel blocks plus=Partial.plus, and one behind a block
    whose output is normalized after=that norm: (bundle of norm(after(x) + residual), after(x) + residual). Rows are
    independent, so a component may norm a subset of them."""

Residual = Any
"""Sum of all blocks so far, in the component's own form or as all rows [T, C]. Models pass it on unchanged and read it
through `Collective.whole`."""


class Collective(ABC):
    """Communication of one rank with the others. Every method is a collective call: all ranks make the same calls in
    the same order. Identity at size 1.

    On CUDA a call enqueues work on the current stream. If that stream differs from the previous call's, the previous
    call is complete before this one begins on the device.
    """

    overlapped = False
    """Written by the engine, equally on every rank. True while matmuls of the other half-batch run concurrently
    (`engine.overlap_tokens`): prefer a transport that uses few SMs. While it is true, `boundary` may reuse the memory
    of a Partial's bundle at the second such call after it."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.rank, self.size = 0, 1

    @abstractmethod
    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        """Join the group. `address` is "host:port" of rank 0. Raises CapabilityError for an unsupported device."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; bit-identical on every rank. May write into x."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate along the last dimension in rank order."""

    def argmax(self, value_N: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        """For each row, return the index_N (int64, below 2^31) of the rank with the largest value_N (float32), the same
        on every rank. Ties go to the smallest index. NaN never wins."""
        if self.size == 1:
            return index_N
        import torch

        mine_N2 = torch.stack((value_N.view(torch.int32), index_N.int()), -1)
        all_N2S = self.all_gather(mine_N2).view(len(index_N), self.size, 2).mT
        value_NS = all_N2S[:, 0].contiguous().view(torch.float32)
        value_NS = torch.where(value_NS.isnan(), float("-inf"), value_NS)
        wins_NS = value_NS == value_NS.amax(-1, keepdim=True)
        return torch.where(wins_NS, all_N2S[:, 1].long(), 2**31).amin(-1)

    @abstractmethod
    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Return the root's x on every rank."""

    def gather_rows(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Concatenate each part along the first dimension in rank order. The parts have any dtypes and equally many
        rows on every rank. The default makes an `all_gather` of bytes for each part."""
        if self.size == 1:
            return list(parts)
        import torch

        rows = (self.all_gather(part.contiguous().view(torch.uint8).reshape(1, -1)) for part in parts)
        return [row.view(part.dtype).view(-1, *part.shape[1:]) for row, part in zip(rows, parts, strict=True)]

    def reduce_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks and return this rank's rows, from rank * rows / size on. `size` divides the rows. May write
        into x. The default makes an `all_reduce`."""
        return x if self.size == 1 else share_of(self.all_reduce(x), self.rank, self.size)

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Exchange rows: a part has `size` equal groups of rows, of which group r goes to rank r. Return the received
        groups of each part in rank order. Shapes and dtypes are equal on every rank. The default gathers all rows."""
        if self.size == 1:
            return list(parts)
        found = self.gather_rows(parts)
        grouped = [x.view(self.size, self.size, -1, *x.shape[1:])[:, self.rank] for x in found]
        return [mine.reshape(part.shape) for mine, part in zip(grouped, parts, strict=True)]

    @abstractmethod
    def barrier(self) -> None:
        """Block the host until every rank has called this."""

    def abort(self) -> None:
        """Unblock all pending calls, `connect` included, because a rank died; their results are discarded. Called from
        another thread, possibly several times. A transport whose calls fail by themselves need not implement it."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Leave the group. May be called again."""

    def boundary(
        self,
        x: torch.Tensor | Partial | Residual,
        residual: Residual | None,
        norm: Norm,
        emit: tuple[ActFormat, ...] = (PLAIN,),
        after: Norm | None = None,
    ) -> tuple[Bundle, Residual]:
        """Connect two blocks: sum a Partial over ranks, add the residual, apply the norm, emit. Row-parallel layers
        reduce only here, so that a component can fuse all operations.

        `after`: norm of the sum before the residual is added (Gemma 2, 2024). It is passed on to `norm`.

        `residual` is None, all rows, or the residual that an earlier boundary of the same forward returned. So is `x`
        in a block that norms the residual twice. `x` is a RowShard after a layer that gave each rank's rows to it
        (`own_boundary`). The bundle has all rows, bit-identical on every rank.
        """
        if after is not None:
            norm = partial(norm, after=after)
        if isinstance(x, Partial) and x.scale is not None:
            return norm(x.values, residual, emit, scale=x.scale)
        if isinstance(x, Partial) and x.plus is not None:
            return norm(x.values, residual, emit, plus=x.plus)
        return norm(self.reduce(x), residual, emit)

    def own_boundary(
        self,
        x: torch.Tensor | Partial | Residual,
        residual: Residual | None,
        norm: Norm,
        emit: tuple[ActFormat, ...] = (PLAIN,),
        after: Norm | None = None,
    ) -> tuple[Bundle, Residual]:
        """Like `boundary`, but the bundle has this rank's rows alone, as a RowShard has, padding included. A component
        that keeps the residual by rows need not gather."""
        bundle, residual = self.boundary(x, residual, norm, emit, after)
        return share_of_bundle(bundle, self.rank, self.size), residual

    def whole(self, residual: Residual) -> torch.Tensor:
        """Return all rows [T, C] of a residual from `boundary`, bit-identical on every rank. Does not change it."""
        rows: torch.Tensor = residual
        return rows

    def reduce(self, x: torch.Tensor | Partial | RowShard) -> torch.Tensor:
        """Sum a Partial over ranks; gather a RowShard; return a tensor unchanged."""
        if isinstance(x, RowShard):
            return self.gather_rows([x.values])[0][: x.tokens]
        if not isinstance(x, Partial):
            return x
        return self.all_reduce(x.values) if self.size > 1 else x.completed()


class Alone(Collective):
    """Collective of a single rank: each call is the identity. A layer that is built with it has all channels."""

    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None: ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        return x

    def barrier(self) -> None: ...

    def close(self) -> None: ...
