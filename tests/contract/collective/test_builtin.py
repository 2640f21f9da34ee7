"""Contract suite for every built-in collective."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.core.interfaces import Collective, Partial
from dovetail.core.layers import RMSNorm
from dovetail.core.testing.collective import CollectiveContract
from dovetail.plugins.collective.config import NcclConfig, OrderedConfig
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.ordered import OrderedCollective


class TestNccl(CollectiveContract):
    """Uses gloo."""

    def make(self) -> Collective:
        return NcclCollective(NcclConfig())


class TestOrdered(CollectiveContract):
    def make(self) -> Collective:
        return OrderedCollective(OrderedConfig())


class OnThreads(CollectiveContract):
    """Runs gloo ranks on threads instead of processes."""

    def on_ranks(self, method: Callable[[int, int, str], object], may_die: tuple[int, ...] = ()) -> list[Any]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: method(rank, self.size, address), range(self.size)))


class NcclShards(OnThreads):
    def make(self) -> Collective:
        return NcclCollective(NcclConfig(shard_rows=1, timeout=60))


class OrderedShards(OnThreads):
    def make(self) -> Collective:
        return OrderedCollective(OrderedConfig(shard_rows=4, timeout=60))


@pytest.mark.parametrize(("kind", "size"), [(NcclShards, 2), (NcclShards, 4), (OrderedShards, 3)])
def test_edges_of_a_residual_that_lies_over_the_ranks(kind: type[OnThreads], size: int) -> None:
    suite = kind()
    suite.size = size
    suite.test_boundary_reduces_adds_and_norms()
    suite.test_boundaries_form_a_chain()


class Halves(OnThreads):
    size = 2

    def make(self) -> Collective:
        return NcclCollective(NcclConfig(shard_rows=4, timeout=60))

    def kept(self, rank: int, size: int, address: str) -> list[tuple[int, ...]]:
        """Return the shapes of the memory that two sums leave on a rank."""
        build: Any = SimpleNamespace(dtype=torch.float32, device=self.device)
        norm = RMSNorm("norm", build, 8, 1e-5)
        with self.connected(rank, size, address) as collective:
            kept = [collective.boundary(Partial(torch.ones(rows, 8)), None, norm)[1] for rows in (3, 5)]
            assert torch.equal(collective.whole(kept[1]), torch.full((5, 8), 2.0))
        return [tuple(kept[0].shape), tuple(kept[1].values.shape)]


def test_steps_of_few_rows_stay_on_every_rank() -> None:
    suite = Halves()
    assert suite.on_ranks(suite.kept) == [[(3, 8), (3, 8)]] * 2


def test_the_suite_must_be_given_a_collective() -> None:
    with pytest.raises(NotImplementedError):
        CollectiveContract().make()


def test_a_suite_inside_a_function_is_refused() -> None:
    class Hidden(CollectiveContract):
        pass

    with pytest.raises(ValueError, match="define it in a module"):
        Hidden().test_all_reduce_sums()
