"""Part of the contract suite for collectives: rows that move between ranks, and boundaries around layers that get each
rank's own rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from dovetail.core.interfaces import PLAIN, Collective, Partial, RowShard
from dovetail.core.interfaces.rows import shard_rows, share_of_bundle
from dovetail.core.layers import RMSNorm
from dovetail.core.testing.collective_values import (
    BY_COLUMN,
    DTYPES,
    LOUDEST,
    assert_close_rows,
    bits_of,
    decoded,
    values,
)


class RowTests:
    """Tests that CollectiveContract inherits. It has the meaning and defaults of the settings."""

    device: torch.device

    def connected(self, rank: int, size: int, address: str) -> AbstractContextManager[Collective]:
        raise NotImplementedError

    def on_ranks(self, method: Callable[[int, int, str], object], may_die: tuple[int, ...] = ()) -> list[Any]:
        raise NotImplementedError

    def test_rows_are_gathered_scattered_and_exchanged(self) -> None:
        """gather_rows and all_to_all take several tensors of unlike dtypes, of 8 bits too; reduce_rows sums."""
        self.on_ranks(self._moves_rows)

    def _moves_rows(self, rank: int, size: int, address: str) -> None:
        with self.connected(rank, size, address) as collective:
            for rows in (1, 4):
                own = [_unlike(r, rows * size) for r in range(size)]
                given = [x.clone().to(self.device) for x in own[rank]]
                gathered, exchanged = collective.gather_rows(given), collective.all_to_all(given)
                for index, x in enumerate(own[rank]):
                    what = f"{x.dtype} {tuple(x.shape)}"
                    every = torch.cat([each[index] for each in own])
                    assert _same(gathered[index], every), f"gather_rows of {what} must be all rows in rank order"
                    mine = torch.cat([each[index][rank * rows : (rank + 1) * rows] for each in own])
                    assert _same(exchanged[index], mine), f"all_to_all of {what} must be group {rank} of each rank"
                for dtype in (torch.float32, torch.bfloat16):
                    parts = [torch.arange(rows * size * 6).view(-1, 6).to(dtype) % 64 + r for r in range(size)]
                    total = torch.stack(parts).sum(0)[rank * rows : (rank + 1) * rows]
                    out = collective.reduce_rows(parts[rank].clone().to(self.device)).cpu()
                    assert _same(out, total), f"reduce_rows of {dtype}: expected {total}, got {out}"

    def test_rows_of_a_layer_pass_its_boundaries(self) -> None:
        """own_boundary gives this rank's rows of what boundary gives, and the next boundary takes a RowShard, as does
        reduce. Between them is a layer that each rank calls with its own rows."""
        bits = self.on_ranks(self._passes_rows)
        assert all(other == bits[0] for other in bits), "boundary of a RowShard must give the same bits on every rank"

    def _passes_rows(self, rank: int, size: int, address: str) -> list[bytes]:
        columns, emit = 32, (PLAIN, BY_COLUMN, LOUDEST)
        build: Any = SimpleNamespace(dtype=torch.float32, device=self.device)
        norm, found = RMSNorm("norm", build, columns, 1e-5), []
        norm.weight.copy_(values(90, (columns,), torch.float32).abs().clamp(max=10))
        with self.connected(rank, size, address) as collective:
            for rows in (1, size, 3 * size + 1):
                shape = (rows, columns)
                own = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(size + 1)]
                total, before = torch.stack(own[:size]).sum(0), own[size]
                bundle, residual = collective.own_boundary(
                    Partial(own[rank].to(self.device)), before.to(self.device), norm, emit
                )
                wanted, _ = norm((total + before).to(self.device), None, emit)
                expected, real = share_of_bundle(wanted, rank, size), len(_share(rank, rows, size))
                for fmt in emit:
                    given, want = decoded(bundle[fmt])[:real], decoded(expected[fmt])[:real]
                    assert len(bundle[fmt].values) == len(expected[fmt].values), "own_boundary must pad a rank's rows"
                    assert_close_rows(given, want, f"own_boundary of {rows} rows, format {fmt.name}")
                doubled = RowShard(bundle[PLAIN].values * 2, rows)
                twice = wanted[PLAIN].values.cpu() * 2
                assert_close_rows(collective.reduce(doubled).cpu(), twice, "reduce of a RowShard")
                after, residual = collective.boundary(doubled, residual, norm, emit)
                summed = total + before + twice
                assert_close_rows(collective.whole(residual).cpu(), summed, "residual after a RowShard")
                wanted, _ = norm(summed.to(self.device), None, emit)
                for fmt in emit:
                    assert_close_rows(decoded(after[fmt]), decoded(wanted[fmt]), f"boundary of a RowShard, {fmt.name}")
                    found.append(bits_of(after[fmt].values))
        return found


def _unlike(rank: int, rows: int) -> list[torch.Tensor]:
    """Return tensors of the dtypes and widths of encoded rows."""
    wide = values(rank, (rows, 24), torch.bfloat16)
    narrow = wide.float().to(torch.float8_e4m3fn)
    return [wide, values(rank, (rows, 3), torch.int64), narrow, values(rank, (rows, 1), DTYPES[0])]


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return alike and bits_of(found) == bits_of(expected)


def _share(rank: int, rows: int, size: int) -> range:
    """Return a rank's rows without padding."""
    each = shard_rows(rows, size)
    return range(rank * each, min((rank + 1) * each, rows))
