"""The built-in collectives on three gloo processes, compared with sums computed here."""

from __future__ import annotations

import socket
import subprocess
import sys

import collective_rank
import pytest
import torch
from collective_rank import DTYPES, NAMES, summand

from dovetail.core.compose import compose
from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import Collective

SIZE = 3
Results = list[dict[tuple[str, str, torch.dtype], torch.Tensor]]


def free_ports(count: int) -> list[str]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    ports = free_ports(len(NAMES))
    command = [sys.executable, collective_rank.__file__]
    ranks = [subprocess.Popen([*command, str(rank), str(SIZE), str(folder), *ports]) for rank in range(SIZE)]
    try:
        assert [rank.wait(timeout=60) for rank in ranks] == [0] * SIZE
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [torch.load(folder / f"{rank}.pt") for rank in range(SIZE)]


def in_rank_order(dtype: torch.dtype, order: list[int]) -> torch.Tensor:
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = torch.zeros_like(summand(0, dtype), dtype=wide)
    for rank in order:
        total = total + summand(rank, dtype).to(wide)
    return total.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_sums_are_the_sum_and_equal_on_every_rank(results: Results, name: str, dtype: torch.dtype) -> None:
    expected = sum(summand(rank, dtype).double() for rank in range(SIZE))
    for what in ("all_reduce", "strided", "partial"):
        sums = [result[name, what, dtype] for result in results]
        assert all(torch.equal(total, sums[0]) for total in sums)
        tolerance = 0 if dtype == torch.int64 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(sums[0].double(), expected, rtol=tolerance, atol=100 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ordered_has_the_bits_of_the_sum_in_rank_order(results: Results, dtype: torch.dtype) -> None:
    assert torch.equal(results[0]["ordered", "all_reduce", dtype], in_rank_order(dtype, [0, 1, 2]))


def test_other_orders_have_other_bits() -> None:
    """Shows that the test above can fail."""
    straight = in_rank_order(torch.float32, [0, 1, 2])
    assert not torch.equal(straight, in_rank_order(torch.float32, [2, 1, 0]))
    narrow = sum(summand(rank, torch.bfloat16) for rank in range(SIZE))
    assert not torch.equal(narrow, in_rank_order(torch.bfloat16, [0, 1, 2]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gathers_and_broadcasts_move_the_bits(results: Results, name: str, dtype: torch.dtype) -> None:
    parts = [summand(rank, dtype) for rank in range(SIZE)]
    for rank, result in enumerate(results):
        assert torch.equal(result[name, "all_gather", dtype], torch.cat(parts, dim=-1))
        assert torch.equal(result[name, "vector", dtype], torch.cat([part[0] for part in parts]))
        assert torch.equal(result[name, "broadcast", dtype], parts[1])
        assert torch.equal(result[name, "whole", dtype], parts[rank])


def built(name: str) -> Collective:
    collective: Collective = compose(["app=generate", f"collective={name}"]).build("collective")
    return collective


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_changes_nothing_and_needs_no_address(name: str) -> None:
    collective = built(name)
    collective.connect(0, 1, "", torch.device("cpu"))
    x = summand(0, torch.bfloat16)
    for y in (collective.all_reduce(x), collective.all_gather(x), collective.broadcast(x)):
        assert y is x
    collective.barrier()
    collective.close()


def test_a_device_that_it_cannot_serve_is_refused() -> None:
    with pytest.raises(CapabilityError, match="not xpu"):
        built("nccl").connect(0, 2, "127.0.0.1:1", torch.device("xpu"))


def test_connecting_ends_when_it_is_aborted() -> None:
    """The other rank never connects. An abort before the call also ends it."""
    collective = built("nccl")
    collective.abort()
    with pytest.raises(RuntimeError, match="a rank died"):
        collective.connect(0, 2, f"127.0.0.1:{free_ports(1)[0]}", torch.device("cpu"))


def test_connecting_ends_after_its_time() -> None:
    collective = compose(["app=generate", "collective.timeout=0.1"]).build("collective")
    with pytest.raises(TimeoutError, match="2 ranks should connect .*missing: 1$"):
        collective.connect(0, 2, f"127.0.0.1:{free_ports(1)[0]}", torch.device("cpu"))
