"""The collective seam: how tensor-parallel ranks sum, gather and agree. Rank counts and groups come from
core.parallel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Bundle, Partial

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Norm = Callable[..., tuple[Bundle, torch.Tensor]]
    """norm(x, residual, emit) -> (bundle of norm(x + residual), x + residual); norms behind layers that leave their
    scales to them take scale=Partial.scale, too. It treats each row by itself, so a component may call it on some."""

Residual = Any
"""The sum of all blocks so far, as the component keeps it: every row [T, C], or a form of its own. Models hand it on as
it is, and ask `Collective.whole` where they want to read it."""


class Collective(ABC):
    """One per rank. Every method is a collective call: all ranks make it in the same order. Identity at size 1.

    On CUDA a call enqueues on the current stream. That may be another one than the last call's, which is done before
    anything of this one begins there."""

    overlapped = False
    """Set by the engine, on every rank alike, while products of other tokens run beside the calls
    (`engine.overlap_tokens`): a component does well to take few multiprocessors from them. Meanwhile the
    bundle that `boundary` makes of a Partial may be overwritten by the second such call from there."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.rank, self.size = 0, 1

    @abstractmethod
    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        """Join the group; address is "host:port" of rank 0. Raises CapabilityError when the transport cannot serve the
        device."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may write into x. The same bits on every rank."""

    @abstractmethod
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate along the last dimension in rank order."""

    def argmax(self, value_N: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        """Of each row the index_N (int64, under 2^31) of the rank with the largest value_N (float32); of equal ones the
        least index. The same on every rank; NaN never wins."""
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
        """The root's x, on every rank."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called, on the host."""

    def abort(self) -> None:
        """Called from another thread, perhaps several times, when a rank died: end the calls that wait for it,
        `connect` included. Their results no longer count. Transports whose calls fail by themselves need nothing."""
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
    ) -> tuple[Bundle, Residual]:
        """The edge between two blocks: sum a Partial over ranks, add the residual, norm, emit. This is the one place
        where row-parallel layers reduce, so that a component can fuse all four.

        `residual` is None, every row, or what an earlier edge of the same pass returned; so may x be, where a block
        norms that twice. The bundle has every row and the same bits on every rank."""
        if isinstance(x, Partial) and x.scale is not None:
            return norm(x.values, residual, emit, scale=x.scale)
        return norm(self.reduce(x), residual, emit)

    def whole(self, residual: Residual) -> torch.Tensor:
        """Every row [T, C] of what `boundary` returned, the same bits on every rank. Leaves it as it is."""
        rows: torch.Tensor = residual
        return rows

    def reduce(self, x: torch.Tensor | Partial) -> torch.Tensor:
        """A Partial to its sum over ranks; a tensor as it is."""
        if not isinstance(x, Partial):
            return x
        return self.all_reduce(x.values) if self.size > 1 else x.scaled()
