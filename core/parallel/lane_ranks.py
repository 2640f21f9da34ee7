"""Collective of the ranks of all lanes. Its errors say that another lane may be their cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from dovetail.core.errors import DovetailError
from dovetail.core.interfaces import Collective
from dovetail.core.parallel.lanes import LOST


class LaneLost(DovetailError):
    """A call among the ranks of all lanes failed."""


class LaneRanks(Collective):
    """Passes each call on to a collective that connects the ranks of all lanes."""

    def __init__(self, ranks: Collective) -> None:
        super().__init__(ranks.config)
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size

    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        with _lost():
            self._ranks.connect(rank, size, address, device)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        with _lost():
            return self._ranks.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        with _lost():
            return self._ranks.all_gather(x)

    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        with _lost():
            return self._ranks.broadcast(x, root)

    def gather_rows(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with _lost():
            return self._ranks.gather_rows(parts)

    def reduce_rows(self, x: torch.Tensor) -> torch.Tensor:
        with _lost():
            return self._ranks.reduce_rows(x)

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with _lost():
            return self._ranks.all_to_all(parts)

    def barrier(self) -> None:
        with _lost():
            self._ranks.barrier()

    def abort(self) -> None:
        self._ranks.abort()

    def close(self) -> None:
        self._ranks.close()


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except DovetailError:
        raise
    except Exception as error:
        raise LaneLost(f"{LOST}: {type(error).__name__}: {error}") from error
