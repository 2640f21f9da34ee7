"""Collectives with one fault each; the suite must reject them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.core.interfaces import PLAIN, Collective, Partial, Residual
from dovetail.core.testing.collective import CollectiveContract
from dovetail.core.testing.suite import failures
from dovetail.plugins.collective.config import OrderedConfig
from dovetail.plugins.collective.ordered import OrderedCollective

pytestmark = pytest.mark.nightly


class Sound(OrderedCollective):
    timeout = 15.0

    def __init__(self) -> None:
        super().__init__(OrderedConfig(timeout=self.timeout))


def fault(name: str, **members: Any) -> type[Sound]:
    return type(name, (Sound,), members)


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


class NormsBeforeItSums(Sound):
    def boundary(self, x, residual, norm, emit=(PLAIN,), after=None):  # type: ignore[no-untyped-def]
        if not isinstance(x, Partial):
            return super().boundary(x, residual, norm, emit, after)
        bundle, _ = norm(x.values, residual, emit)
        return bundle, super().boundary(x, residual, norm, emit, after)[1]


class NormsWhatItHasAdded(Sound):
    """Applies `after` to the sum of x and the residual."""

    def boundary(self, x, residual, norm, emit=(PLAIN,), after=None):  # type: ignore[no-untyped-def]
        if after is None or residual is None:
            return super().boundary(x, residual, norm, emit, after)
        return super().boundary(self.reduce(x) + self.whole(residual), None, norm, emit, after)


class Shards(Sound):
    def __init__(self) -> None:
        OrderedCollective.__init__(self, OrderedConfig(timeout=self.timeout, shard_rows=1))


class TakesItsRowsForAll(Shards):
    def whole(self, residual: Residual) -> torch.Tensor:
        return super().whole(residual) if isinstance(residual, torch.Tensor) else residual.values


class ForgetsTheResidualOfATap(Shards):
    """Drops the residual at a boundary whose input is not a Partial."""

    def boundary(self, x, residual, *rest):  # type: ignore[no-untyped-def]
        lost = isinstance(x, torch.Tensor) and not isinstance(residual, torch.Tensor)
        return super().boundary(x, None if lost else residual, *rest)


class GivesTheNextRanksRows(Sound):
    def reduce_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        rows, other = len(x) // self.size, (self.rank + 1) % self.size
        return self.all_reduce(x)[other * rows : (other + 1) * rows]


class GathersSeveralTwice(Sound):
    """Returns the first part for each."""

    def gather_rows(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = super().gather_rows(parts)
        return [found[0]] * len(found)


class ForgetsPadding(Sound):
    """Gives a rank fewer rows if there are none left."""

    def own_boundary(self, x, residual, norm, emit=(PLAIN,), after=None):  # type: ignore[no-untyped-def]
        bundle, residual = super().boundary(x, residual, norm, emit, after)
        items = tuple(replace(item, values=item.values.tensor_split(self.size)[self.rank]) for item in bundle.items)
        return replace(bundle, items=items), residual


class ClosesOnce(Sound):
    def close(self) -> None:
        if self._group is None and self.size > 1:
            raise RuntimeError("closed already")
        super().close()


class DoesNotSayWhoItIs(Sound):
    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        super().connect(rank, size, address, device)
        self.rank = 0


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

BROKEN: dict[str, list[type[Sound]]] = {
    "test_all_reduce_sums": [
        fault("Averages", all_reduce=lambda self, x: (Sound.all_reduce(self, x.double()) / self.size).to(x.dtype)),
        StartsWithItsOwn,
        SumsInMemoryOrder,
    ],
    "test_all_gather_joins_the_last_dimension_in_rank_order": [
        fault("GathersRows", all_gather=lambda self, x: x if self.size == 1 else torch.cat(list(self._stacked(x)))),
        fault(
            "GathersBackwards",
            all_gather=lambda self, x: x if self.size == 1 else torch.cat(self._stacked(x).unbind(0)[::-1], dim=-1),
        ),
    ],
    "test_rows_are_gathered_scattered_and_exchanged": [
        GivesTheNextRanksRows,
        GathersSeveralTwice,
        fault("ExchangesNothing", all_to_all=lambda self, parts: list(parts)),
    ],
    "test_rows_of_a_layer_pass_its_boundaries": [
        ForgetsPadding,
        fault("NormsHalves", reduce=lambda self, x: x.values if self.size > 1 else Sound.reduce(self, x)),
    ],
    "test_broadcast_from_each_root": [
        fault("HasOneRoot", broadcast=lambda self, x, root=0: Sound.broadcast(self, x, 0))
    ],
    "test_a_barrier_waits_for_every_rank": [GreetsOnce],
    "test_calls_match_in_order": [RepeatsItself],
    "test_argmax_takes_the_largest_and_of_equals_the_first": [
        fault("TakesTheLastOfEquals", argmax=lambda self, value_N, index_N: -Sound.argmax(self, value_N, -index_N))
    ],
    "test_boundary_reduces_adds_and_norms": [
        fault(
            "SumsWhatIsWhole", reduce=lambda self, x: Sound.reduce(self, x if isinstance(x, Partial) else Partial(x))
        ),
        fault("ForgetsTheResidual", boundary=lambda self, x, residual, *rest: Sound.boundary(self, x, None, *rest)),
        NormsBeforeItSums,
        NormsWhatItHasAdded,
        fault("ForgetsTheFirstNorm", boundary=lambda self, *args: Sound.boundary(self, *args[:4])),
        fault(
            "EmitsOneFormat",
            boundary=lambda self, x, residual, norm, emit=(PLAIN,), *rest: Sound.boundary(
                self, x, residual, norm, emit[:1], *rest
            ),
        ),
    ],
    "test_boundaries_form_a_chain": [TakesItsRowsForAll, ForgetsTheResidualOfATap],
    "test_one_rank_alone_changes_nothing": [
        fault("DoublesAlone", all_reduce=lambda self, x: Sound.all_reduce(self, x) * (2 if self.size == 1 else 1)),
        fault(
            "NormsHalfOfABlock",
            boundary=lambda self, x, residual, norm, emit=(PLAIN,), *rest: Sound.boundary(
                self, replace(x, plus=None) if isinstance(x, Partial) else x, residual, norm, emit, *rest
            ),
        ),
    ],
    "test_close_is_idempotent": [ClosesOnce],
    "test_connect_sets_rank_and_size": [DoesNotSayWhoItIs],
    "test_a_device_it_cannot_serve_is_refused": [
        fault("ServesAnything", connect=lambda self, *args: Sound.connect(self, *args[:3], torch.device("cpu")))
    ],
    # Its connect waits until its timeout.
    "test_abort_ends_a_connect_that_waits": [fault("IsDeafToAbort", timeout=3.5, abort=lambda self: None)],
    LAST: [HidesDeaths],
}
CASES = {broken.__name__: (broken, test) for test, faults in BROKEN.items() for broken in faults}


class Suite(CollectiveContract):
    """Passes its collective by name: other processes load this file by its path and create it there."""

    patience = 2.5

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self) -> Collective:
        return CASES[self.name][0]() if self.name in CASES else Sound()


def test_the_unbroken_one_passes() -> None:
    assert failures(Suite("Sound"), skip=(LAST,)) == {}


@pytest.mark.parametrize("name", CASES)
def test_the_suite_rejects(name: str) -> None:
    test = CASES[name][1]
    assert test in failures(Suite(name), skip=tuple(other for other in dir(CollectiveContract) if other != test))
