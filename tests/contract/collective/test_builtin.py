"""Contract suite for every built-in collective."""

from __future__ import annotations

import os
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
    if "DOVETAIL_NIGHTLY" not in os.environ:
        # Its calls are those of gloo, whose test above ends the same way.
        test_calls_end_when_a_rank_dies = None  # type: ignore[assignment]

    def make(self) -> Collective:
        return OrderedCollective(OrderedConfig())


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


class OnThreads(CollectiveContract):
    """Runs gloo ranks on threads instead of processes."""

    def on_ranks(self, method: Callable[[int, int, str], object], may_die: tuple[int, ...] = ()) -> list[Any]:
        address = free_address()
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
            assert not torch.distributed.is_initialized(), "the default process group belongs to the user"
            kept = [collective.boundary(Partial(torch.ones(rows, 8)), None, norm)[1] for rows in (3, 5)]
            assert torch.equal(collective.whole(kept[1]), torch.full((5, 8), 2.0))
        return [tuple(kept[0].shape), tuple(kept[1].values.shape)]


def test_steps_of_few_rows_stay_on_every_rank() -> None:
    suite = Halves()
    assert suite.on_ranks(suite.kept) == [[(3, 8), (3, 8)]] * 2


class Bits(OnThreads):
    """Sums of values of very different magnitudes: the order of additions shows in the last bits."""

    def make(self) -> Collective:
        return OrderedCollective(OrderedConfig(timeout=60))

    def sums(self, rank: int, size: int, address: str) -> list[torch.Tensor]:
        with self.connected(rank, size, address) as collective:
            return [collective.all_reduce(summand(rank, dtype)) for dtype in DTYPES]


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)


def summand(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (100 * torch.randn(7, 96, generator=generator, dtype=torch.float64) * 10 ** (rank % 3)).to(dtype)


def in_rank_order(dtype: torch.dtype, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    first, *others = (summand(rank, dtype).to(wide) for rank in order)
    return sum(others, first).to(dtype)


def test_ordered_has_the_bits_of_the_sum_in_rank_order_on_every_rank() -> None:
    suite = Bits()
    for sums in suite.on_ranks(suite.sums):
        for dtype, found in zip(DTYPES, sums, strict=True):
            assert torch.equal(found, in_rank_order(dtype)), dtype
    assert not torch.equal(in_rank_order(torch.float32), in_rank_order(torch.float32, (2, 1, 0)))
    narrow = sum(summand(rank, torch.bfloat16) for rank in range(3))
    assert not torch.equal(narrow, in_rank_order(torch.bfloat16)), "the test could not fail"


def test_an_abort_before_connecting_ends_it() -> None:
    collective = NcclCollective(NcclConfig())
    collective.abort()
    with pytest.raises(RuntimeError, match="a rank died"):
        collective.connect(0, 2, free_address(), torch.device("cpu"))


def test_connecting_ends_after_its_time() -> None:
    with pytest.raises(TimeoutError, match="2 ranks should connect .*missing: 1$"):
        NcclCollective(NcclConfig(timeout=0.1)).connect(0, 2, free_address(), torch.device("cpu"))


def test_a_suite_inside_a_function_is_refused() -> None:
    class Hidden(CollectiveContract):
        pass

    with pytest.raises(ValueError, match="define it in a module"):
        Hidden().test_all_reduce_sums()
