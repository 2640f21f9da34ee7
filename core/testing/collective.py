"""Contract suite for collectives. Subclass CollectiveContract at the top of a test module and override `make`.

Each test runs on `size` processes. Every process imports the class by its name from its file and calls `make`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import PLAIN, ActFormat, Bundle, Collective, Partial, Residual
from dovetail.core.layers import LayerNorm, RMSNorm
from dovetail.core.ops.norm import rms_norm_reference
from dovetail.core.testing.collective_rows import RowTests
from dovetail.core.testing.collective_values import (
    BY_COLUMN,
    DTYPES,
    HALVED,
    LOUDEST,
    SHAPES,
    STATIC,
    assert_close_rows,
    bits_of,
    decoded,
    normed,
    values,
)
from dovetail.core.testing.ranks import on_ranks


class CollectiveContract(RowTests):
    """Tests of the rules of dovetail.core.interfaces.Collective. Only `make` must be overridden."""

    size = 3
    """Number of ranks. With two, the order of a sum cannot be tested."""
    device = torch.device("cpu")
    """Device of every rank."""
    patience = 10.0
    """Seconds within which a call must fail after abort, or when a rank has died."""

    def make(self) -> Collective:
        """Return a fresh, unconnected collective."""
        raise NotImplementedError("return your collective: MyCollective(MyConfig())")

    @contextmanager
    def connected(self, rank: int, size: int, address: str) -> Iterator[Collective]:
        collective = self.make()
        collective.connect(rank, size, address, self.device)
        try:
            with torch.inference_mode():
                yield collective
        finally:
            collective.close()

    def on_ranks(self, method: Callable[[int, int, str], object], may_die: tuple[int, ...] = ()) -> list[Any]:
        # Ranks on GPUs compile kernels first. On a busy CPU, the start of the processes takes most of the time.
        timeout = 150.0 if self.device.type == "cpu" else 240.0
        return on_ranks(self, method.__name__, self.size, timeout=timeout, may_die=may_die)

    # Connect

    def test_connect_sets_rank_and_size(self) -> None:
        found = self.on_ranks(self._rank_and_size)
        assert found == [(rank, self.size) for rank in range(self.size)], "connect must set `rank` and `size`"

    def _rank_and_size(self, rank: int, size: int, address: str) -> tuple[int, int]:
        with self.connected(rank, size, address) as collective:
            return collective.rank, collective.size

    def test_a_device_it_cannot_serve_is_refused(self) -> None:
        self.on_ranks(self._refuses)

    def _refuses(self, rank: int, size: int, address: str) -> None:
        collective = self.make()
        try:
            with pytest.raises(CapabilityError, match="meta"):
                collective.connect(rank, size, address, torch.device("meta"))
        finally:
            collective.close()

    # Calls

    def test_all_reduce_sums(self) -> None:
        """The sum has the same bits on every rank, for any shape, dtype and memory order."""
        bits = self.on_ranks(self._sums)
        assert all(other == bits[0] for other in bits), "all_reduce must give the same bits on every rank"

    def _sums(self, rank: int, size: int, address: str) -> list[bytes]:
        found = []
        with self.connected(rank, size, address) as collective:
            for seed, (shape, dtype) in enumerate((s, d) for s in SHAPES for d in DTYPES):
                own = [values(r, shape, dtype, seed) for r in range(size)]
                exact = torch.stack(own).double().sum(0)
                tolerance = 1e-6 if dtype is torch.float32 else 2e-2
                largest = torch.stack(own).double().abs().sum(0)
                out = collective.all_reduce(own[rank].clone().to(self.device)).cpu()
                assert (out.shape, out.dtype) == (shape, dtype), "all_reduce must keep shape and dtype"
                near = bool(((out.double() - exact).abs() <= tolerance * largest).all())
                assert near, f"all_reduce of {dtype}: expected {exact}, got {out}"
                found.append(bits_of(out))
            strided = [values(r, (6, 4), torch.float32) for r in range(size)]
            out = collective.all_reduce(strided[rank].clone().to(self.device).T).cpu()
            assert_close_rows(out, torch.stack(strided).sum(0).T, "all_reduce of transposed tensors")
        return found

    def test_all_gather_joins_the_last_dimension_in_rank_order(self) -> None:
        self.on_ranks(self._gathers)

    def _gathers(self, rank: int, size: int, address: str) -> None:
        with self.connected(rank, size, address) as collective:
            for shape, dtype in product(SHAPES, DTYPES):
                own = [values(r, shape, dtype) for r in range(size)]
                out, expected = collective.all_gather(own[rank].clone().to(self.device)).cpu(), torch.cat(own, -1)
                assert torch.equal(out, expected), f"all_gather of shape {shape}: expected {expected}, got {out}"
            own = [values(r, (6, 4), torch.float32) for r in range(size)]
            out = collective.all_gather(own[rank].to(self.device).T).cpu()
            assert torch.equal(out, torch.cat([x.T for x in own], -1)), "all_gather of transposed tensors"

    def test_broadcast_from_each_root(self) -> None:
        self.on_ranks(self._broadcasts)

    def _broadcasts(self, rank: int, size: int, address: str) -> None:
        with self.connected(rank, size, address) as collective:
            for root in range(size):
                for shape in SHAPES:
                    out = collective.broadcast(values(rank, shape, torch.float32).to(self.device), root).cpu()
                    assert torch.equal(out, values(root, shape, torch.float32)), f"expected the tensor of root {root}"
            out = collective.broadcast(values(rank, (3,), torch.int64).to(self.device)).cpu()
            assert torch.equal(out, values(0, (3,), torch.int64)), "the default root must be rank 0"

    def test_calls_match_in_order(self) -> None:
        """Ranks make different calls in the same order, at different times."""
        self.on_ranks(self._mixes)

    def _mixes(self, rank: int, size: int, address: str) -> None:
        with self.connected(rank, size, address) as collective:
            for i in range(12):
                if i % size == rank:
                    time.sleep(0.01)
                x = torch.full((4,), float(rank + i), device=self.device)
                total = collective.all_reduce(x.clone()).cpu()
                assert total.tolist() == [sum(r + i for r in range(size))] * 4, f"all_reduce in round {i}"
                out = collective.broadcast(x.clone(), i % size).cpu()
                assert out.tolist() == [i % size + i] * 4, f"broadcast in round {i}"
                out = collective.all_gather(x[:1].clone()).cpu()
                assert out.tolist() == [r + i for r in range(size)], f"all_gather in round {i}"

    def test_a_barrier_waits_for_every_rank(self) -> None:
        times = self.on_ranks(self._meets)
        last = max(came for came, _ in times)
        waited = all(left >= last for _, left in times)
        assert waited, f"a rank left the barrier before all had arrived: (arrived, left) in seconds {times}"

    def _meets(self, rank: int, size: int, address: str) -> tuple[float, float]:
        with self.connected(rank, size, address) as collective:
            collective.barrier()
            time.sleep(0.15 * (size - rank))
            came = time.monotonic()
            collective.barrier()
            return came, time.monotonic()

    def test_argmax_takes_the_largest_and_of_equals_the_first(self) -> None:
        found = self.on_ranks(self._argmax)
        assert all(other == found[0] for other in found), f"argmax must be equal on every rank, got {found}"

    def _argmax(self, rank: int, size: int, address: str) -> list[list[int]]:
        found = []
        inf, nan = float("inf"), float("nan")
        with self.connected(rank, size, address) as collective:
            for rows in (1, 5, 300):
                value = torch.stack([values(r, (rows,), torch.float32, rows).round(decimals=1) for r in range(size)])
                value[:, : rows // 2] = value[0, : rows // 2]
                value[0, 0], value[-1, 0] = nan, -inf
                # Indices below 2^31, not ordered by rank.
                index = torch.stack([(torch.arange(rows) * 7919 + 100_003 * (size - r)) % 2**31 for r in range(size)])
                ranked = value.nan_to_num(nan=-inf, neginf=-inf)
                wins = ranked == ranked.amax(0)
                expected = torch.where(wins, index, 2**31).amin(0).tolist()
                given = value[rank].to(self.device), index[rank].to(self.device)
                out = collective.argmax(*given)
                assert out.dtype == torch.int64, f"argmax must return int64, got {out.dtype}"
                assert out.tolist() == expected, f"argmax of {value} at {index}: expected {expected}, got {out}"
                found.append(out.tolist())
        return found

    # Boundaries between blocks

    def test_boundary_reduces_adds_and_norms(self) -> None:
        """Only a Partial is summed over ranks. Every format is emitted, equal on all ranks."""
        bits = self.on_ranks(self._boundaries)
        assert all(other == bits[0] for other in bits), "boundary must give the same bits on every rank"

    def _boundaries(self, rank: int, size: int, address: str) -> list[bytes]:
        shape, emit = (5, 96), (PLAIN, HALVED)
        weight = values(90, (96,), torch.float32).abs()
        parts = [values(r, shape, torch.float32) for r in range(size)]
        residual, own = values(91, shape, torch.float32), values(92, shape, torch.float32)

        def norm(
            x: torch.Tensor, residual: torch.Tensor | None, emit: tuple[ActFormat, ...]
        ) -> tuple[Bundle, torch.Tensor]:
            return rms_norm_reference(x, residual, weight.to(x.device), 1e-5, emit)

        build: Any = SimpleNamespace(dtype=torch.float32, device=self.device)
        layer, first = (RMSNorm("norm", build, 96, 1e-5) for _ in range(2))
        layer.weight.copy_(weight)
        first.weight.copy_(values(93, (96,), torch.float32).abs())
        found = []
        with self.connected(rank, size, address) as collective:
            # One of the core's norms, which a component may fuse, and an unknown one.
            norms: tuple[Any, ...] = ((layer, None), (layer, first), (norm, None))
            for (called, normed_first), before, partial in product(norms, (residual, None), (True, False)):
                given = Partial(parts[rank].clone().to(self.device)) if partial else own.to(self.device)
                whole = torch.stack(parts).sum(0) if partial else own
                kept = None if before is None else before.clone().to(self.device)
                bundle, after = collective.boundary(given, kept, called, emit, normed_first)
                if normed_first is not None:
                    whole = normed(whole, first)
                expected, expected_after = norm(whole, before, emit)
                assert_close_rows(collective.whole(after).cpu(), expected_after, "x + residual")
                for fmt in emit:
                    assert_close_rows(bundle[fmt].values.cpu(), expected[fmt].values, f"boundary, format {fmt.name}")
                assert bundle[HALVED].scale is not None, "boundary must emit the scales of a format"
                found += [bits_of(collective.whole(after)), bits_of(bundle[PLAIN].values)]
            reduced = collective.reduce(Partial(parts[rank].clone().to(self.device)))
            assert_close_rows(reduced.cpu(), torch.stack(parts).sum(0), "reduce of a Partial")
            assert torch.equal(collective.reduce(own.to(self.device)).cpu(), own), "reduce changed a full tensor"
        return found

    def test_boundaries_form_a_chain(self) -> None:
        """The residual passes between boundaries in the component's own form; a tap reads all of it."""
        bits = self.on_ranks(self._passes)
        assert all(other == bits[0] for other in bits), "a chain of boundaries must give the same bits on every rank"

    def _passes(self, rank: int, size: int, address: str) -> list[bytes]:
        columns, emit = 64, (PLAIN, HALVED, BY_COLUMN, LOUDEST, STATIC)
        build: Any = SimpleNamespace(dtype=torch.float32, device=self.device)
        norm, with_mean = RMSNorm("norm", build, columns, 1e-5), LayerNorm("norm", build, columns, 1e-5)
        for weight, seed in ((norm.weight, 90), (with_mean.weight, 91), (with_mean.bias, 92)):
            weight.copy_(values(seed, (columns,), torch.float32).abs().clamp(max=10))
        found: list[bytes] = []
        with self.connected(rank, size, address) as collective:

            def edge(
                x: torch.Tensor | Partial | Residual,
                kept: Residual | None,
                expected: torch.Tensor,
                called: Any,
                first: RMSNorm | None = None,
            ) -> Residual:
                """Call boundary and compare it with the norm of the expected residual."""
                before = None if kept is None else bits_of(collective.whole(kept))
                bundle, after = collective.boundary(x, kept, called, emit, first)
                unchanged = kept is None or bits_of(collective.whole(kept)) == before
                assert unchanged, "boundary changed the residual it read"
                wanted, _ = called(expected.to(self.device), None, emit)
                for fmt in emit:
                    given, want = bundle[fmt], wanted[fmt]
                    what = f"boundary of {len(expected)} rows, format {fmt.name}"
                    assert given.values.dtype == want.values.dtype, f"{what}: dtype of the values"
                    assert (given.scale is None) == (want.scale is None), f"{what}: scales where the format has none"
                    step = 0.13 if fmt is STATIC else 1e-4
                    assert_close_rows(decoded(given), decoded(want), what, rtol=step)
                    found.extend(bits_of(x) for x in (given.values, given.scale) if x is not None)
                strides = bundle[BY_COLUMN].scale.stride()
                assert len(expected) < 2 or strides[0] == 1, f"scales must be column-major, got strides {strides}"
                whole = collective.whole(after)
                assert_close_rows(whole.cpu(), expected, f"residual of {len(expected)} rows")
                found.append(bits_of(whole))
                return after

            for rows in (1, size - 1, size, size + 1, 4 * size, 4 * size + 3):
                shape = (rows, columns)

                def partial(seed: int, shape: tuple[int, int] = shape) -> tuple[Partial, torch.Tensor]:
                    own = [
                        torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + r)) for r in range(size)
                    ]
                    return Partial(own[rank].to(self.device)), torch.stack(own).sum(0)

                total = values(93, shape, torch.float32, rows)
                residual = edge(total.to(self.device), None, total, norm)
                for seed, called in enumerate((norm, with_mean, norm)):
                    x, added = partial(seed)
                    total = total + added
                    residual = edge(x, residual, total, called)
                # A block that norms the same residual twice.
                edge(residual, None, total, with_mean)
                # A tap reduces a Partial; the next boundary takes the sum.
                x, added = partial(9)
                reduced, total = collective.reduce(x), total + added
                assert_close_rows((reduced + collective.whole(residual)).cpu(), total, "reduce(x) + whole(residual)")
                residual = edge(reduced, residual, total, norm)
                x, added = partial(10)
                total = total + added
                residual = edge(x, residual, total, norm)
                # The sum is normalized before it is added.
                x, added = partial(11)
                edge(x, residual, total + normed(added, norm), norm, norm)
        return found

    # Size 1

    def test_one_rank_alone_changes_nothing(self) -> None:
        collective = self.make()
        collective.connect(0, 1, "", self.device)
        try:
            assert (collective.rank, collective.size) == (0, 1), "connect must set `rank` and `size`"
            for shape, dtype in product(SHAPES, DTYPES):
                x = values(0, shape, dtype)
                for call in (collective.all_reduce, collective.all_gather, collective.broadcast):
                    out = call(x.clone().to(self.device)).cpu()
                    assert torch.equal(out, x), f"{call.__name__} at size 1 must return x: expected {x}, got {out}"
                for rows in (collective.gather_rows, collective.all_to_all):
                    (out,) = rows([x.clone().to(self.device)])
                    assert torch.equal(out.cpu(), x), f"{rows.__name__} at size 1 must return the rows"
                assert torch.equal(collective.reduce_rows(x.clone().to(self.device)).cpu(), x), "reduce_rows at size 1"
            x = values(0, (3, 4), torch.float32)
            out = collective.reduce(Partial(x.clone().to(self.device))).cpu()
            assert torch.equal(out, x), f"reduce at size 1 must return the values: expected {x}, got {out}"
            # The two outputs of a parallel block.
            build: Any = SimpleNamespace(dtype=torch.float32, device=self.device)
            norm, plus = LayerNorm("norm", build, 4, 1e-5), values(1, (3, 4), torch.float32)
            norm.weight.fill_(1.0)
            norm.bias.zero_()
            both = Partial(x.to(self.device), plus=plus.to(self.device))
            reduced, (_, summed) = collective.reduce(both), collective.boundary(both, None, norm)
            for what, out in (("reduce", reduced), ("boundary", summed)):
                assert torch.equal(out.cpu(), x + plus), f"{what} at size 1 must add Partial.plus to its values"
            collective.barrier()
        finally:
            collective.close()

    # Close and abort

    def test_close_is_idempotent(self) -> None:
        self.on_ranks(self._closes)

    def _closes(self, rank: int, size: int, address: str) -> None:
        self.make().close()
        collective = self.make()
        collective.connect(rank, size, address, self.device)
        collective.barrier()
        collective.close()
        collective.close()

    def test_abort_ends_a_connect_that_waits(self) -> None:
        """The other ranks never connect. Abort is called from another thread, several times."""
        self.on_ranks(self._waits_to_connect)

    def _waits_to_connect(self, rank: int, size: int, address: str) -> None:
        if rank:
            return
        collective = self.make()
        began = time.monotonic()
        with _aborting(collective), pytest.raises(Exception, match="."):
            collective.connect(rank, size, address, self.device)
        seconds = time.monotonic() - began
        assert seconds < self.patience, f"connect must fail within {self.patience:g} s of abort, took {seconds:.1f} s"
        collective.close()

    def test_calls_end_when_a_rank_dies(self) -> None:
        """On every surviving rank, calls fail by themselves or after abort."""
        self.on_ranks(self._outlives, may_die=(self.size - 1,))

    def _outlives(self, rank: int, size: int, address: str) -> None:
        collective = self.make()
        collective.connect(rank, size, address, self.device)
        collective.barrier()
        if rank == size - 1:
            os._exit(1)
        began = time.monotonic()
        with _aborting(collective), pytest.raises(Exception, match="."):
            collective.all_reduce(torch.ones(3, device=self.device)).cpu()
            collective.barrier()
        seconds = time.monotonic() - began
        assert seconds < self.patience, f"calls must fail within {self.patience:g} s of a rank's death: {seconds:.1f} s"
        collective.close()


@contextmanager
def _aborting(collective: Collective) -> Iterator[None]:
    """Call abort repeatedly from another thread while the block runs."""
    over = threading.Event()

    def abort() -> None:
        while not over.wait(0.2):
            collective.abort()

    thread = threading.Thread(target=abort, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
