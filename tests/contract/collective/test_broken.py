"""Collectives with one fault each; the suite must reject them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from dovetail.core.interfaces import PLAIN, ActFormat, Bundle, Collective, Partial, Residual
from dovetail.core.testing.collective import CollectiveContract
from dovetail.core.testing.suite import failures
from dovetail.plugins.collective.config import OrderedConfig
from dovetail.plugins.collective.ordered import OrderedCollective


class Sound(OrderedCollective):
    timeout = 15.0

    def __init__(self) -> None:
        super().__init__(OrderedConfig(timeout=self.timeout))


class Averages(Sound):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return (super().all_reduce(x.double()) / self.size).to(x.dtype)


class StartsWithItsOwn(Sound):
    """Adds in a different order on every rank, which no tolerance detects."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        parts = list(self._stacked(x))
        total = parts.pop(self.rank)
        for part in parts:
            total = total + part
        return total


class SumsInMemoryOrder(Sound):
    """Reads a transposed tensor in memory order."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x.as_strided(x.shape, torch.empty(x.shape).stride()))


class GathersRows(Sound):
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else torch.cat(self._stacked(x).unbind(0), dim=0)


class GathersBackwards(Sound):
    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.size == 1 else torch.cat(self._stacked(x).unbind(0)[::-1], dim=-1)


class HasOneRoot(Sound):
    def broadcast(self, x: torch.Tensor, root: int = 0) -> torch.Tensor:
        return super().broadcast(x, 0)


class GreetsOnce(Sound):
    """Has a barrier that works only the first time."""

    met = False

    def barrier(self) -> None:
        if not self.met:
            super().barrier()
        self.met = True


class RepeatsItself(Sound):
    """Returns the previous result for a call of the same shape."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = super().all_reduce(x)
        if x.shape == (4,):
            total, self.last = getattr(self, "last", total), total
        return total


class TakesTheLastOfEquals(Sound):
    def argmax(self, value_N: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
        return -super().argmax(value_N, -index_N)


class SumsWhatIsWhole(Sound):
    def reduce(self, x: torch.Tensor | Partial) -> torch.Tensor:
        return super().reduce(x if isinstance(x, Partial) else Partial(x))


class ForgetsTheResidual(Sound):
    def boundary(
        self,
        x: torch.Tensor | Partial,
        residual: torch.Tensor | None,
        norm: Any,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> tuple[Bundle, torch.Tensor]:
        return super().boundary(x, None, norm, emit)


class NormsBeforeItSums(Sound):
    def boundary(
        self,
        x: torch.Tensor | Partial,
        residual: torch.Tensor | None,
        norm: Any,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> tuple[Bundle, torch.Tensor]:
        if not isinstance(x, Partial):
            return super().boundary(x, residual, norm, emit)
        bundle, _ = norm(x.values, residual, emit)
        return bundle, super().boundary(x, residual, norm, emit)[1]


class EmitsOneFormat(Sound):
    def boundary(
        self,
        x: torch.Tensor | Partial,
        residual: torch.Tensor | None,
        norm: Any,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> tuple[Bundle, torch.Tensor]:
        return super().boundary(x, residual, norm, emit[:1])


class Shards(Sound):
    def __init__(self) -> None:
        OrderedCollective.__init__(self, OrderedConfig(timeout=self.timeout, shard_rows=1))


class TakesItsRowsForAll(Shards):
    def whole(self, residual: Residual) -> torch.Tensor:
        return super().whole(residual) if isinstance(residual, torch.Tensor) else residual.values


class ForgetsTheResidualOfATap(Shards):
    """Drops the residual at a boundary whose input is not a Partial."""

    def boundary(
        self,
        x: torch.Tensor | Partial | Residual,
        residual: Residual | None,
        norm: Any,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> tuple[Bundle, Residual]:
        lost = isinstance(x, torch.Tensor) and not isinstance(residual, torch.Tensor)
        return super().boundary(x, None if lost else residual, norm, emit)


class DoublesAlone(Sound):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x) * (2 if self.size == 1 else 1)


class ClosesOnce(Sound):
    def close(self) -> None:
        if self._group is None and self.size > 1:
            raise RuntimeError("closed already")
        super().close()


class DoesNotSayWhoItIs(Sound):
    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        super().connect(rank, size, address, device)
        self.rank = 0


class ServesAnything(Sound):
    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        super().connect(rank, size, address, torch.device("cpu"))


class IsDeafToAbort(Sound):
    timeout = 3.5

    def abort(self) -> None:
        """Do nothing, so that connect waits until its timeout."""


class HidesDeaths(Sound):
    """Returns the input of a call that failed."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().all_reduce(x)
        except RuntimeError:
            time.sleep(0.1)
            return x


LAST = "test_calls_end_when_a_rank_dies"
"""Slow: it starts new processes each time."""

BROKEN: dict[type[Collective], str] = {
    Averages: "test_all_reduce_sums",
    StartsWithItsOwn: "test_all_reduce_sums",
    SumsInMemoryOrder: "test_all_reduce_sums",
    GathersRows: "test_all_gather_joins_the_last_dimension_in_rank_order",
    GathersBackwards: "test_all_gather_joins_the_last_dimension_in_rank_order",
    HasOneRoot: "test_broadcast_from_each_root",
    GreetsOnce: "test_a_barrier_waits_for_every_rank",
    RepeatsItself: "test_calls_match_in_order",
    TakesTheLastOfEquals: "test_argmax_takes_the_largest_and_of_equals_the_first",
    SumsWhatIsWhole: "test_boundary_reduces_adds_and_norms",
    ForgetsTheResidual: "test_boundary_reduces_adds_and_norms",
    NormsBeforeItSums: "test_boundary_reduces_adds_and_norms",
    EmitsOneFormat: "test_boundary_reduces_adds_and_norms",
    TakesItsRowsForAll: "test_boundaries_form_a_chain",
    ForgetsTheResidualOfATap: "test_boundaries_form_a_chain",
    DoublesAlone: "test_one_rank_alone_changes_nothing",
    ClosesOnce: "test_close_is_idempotent",
    DoesNotSayWhoItIs: "test_connect_sets_rank_and_size",
    ServesAnything: "test_a_device_it_cannot_serve_is_refused",
    IsDeafToAbort: "test_abort_ends_a_connect_that_waits",
    HidesDeaths: LAST,
}


class Suite(CollectiveContract):
    """Passes its collective by name, since it is created in other processes."""

    patience = 2.5

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self) -> Collective:
        made: Collective = globals()[self.name]()
        return made


def test_the_unbroken_one_passes() -> None:
    assert failures(Suite("Sound"), skip=(LAST,)) == {}


@pytest.mark.parametrize(("broken", "test"), BROKEN.items(), ids=[broken.__name__ for broken in BROKEN])
def test_the_suite_rejects(broken: type[Collective], test: str) -> None:
    others = tuple(name for name in dir(CollectiveContract) if name != test)
    assert test in failures(Suite(broken.__name__), skip=others), "the suite accepts it"
