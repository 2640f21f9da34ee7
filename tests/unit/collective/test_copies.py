"""collective.beside=copies without a GPU. tests/tp runs it between processes."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import PLAIN
from dovetail.plugins.collective.symm_mem import copies as copies_module
from dovetail.plugins.collective.symm_mem import driver
from dovetail.plugins.collective.symm_mem.copies import MOST_CACHED, CopiedRows, barrier_operations
from dovetail.plugins.collective.symm_mem.memory import SharedBlock, SharedMemory


class Ranks:
    """SharedMemory and Driver of a rank without peers; records the values of `overwrite` and the prepared copies."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.allocated = 0
        self.prepared: weakref.WeakSet[Moves] = weakref.WeakSet()

    def allocate(self, words: int, fill: int) -> SharedBlock:
        self.allocated += 1
        return SharedBlock(torch.full((words,), fill, dtype=torch.int32), (0, 0), None)

    def operations(self, each: object) -> object:
        return each

    def operate(self, operations: object, value: int) -> None: ...

    def copies(self, moves: Iterable[tuple[int, int, int]]) -> Moves:
        made = Moves(moves)
        self.prepared.add(made)
        return made

    def copy(self, copies: object, start: int = 0) -> None: ...

    def overwrite(self, words: torch.Tensor, value: int) -> None:
        words.fill_(value)
        self.values.append(value)


class Moves(list[tuple[int, int, int]]):
    __hash__ = object.__hash__


def test_gathered_rows_alternate_between_two_buffers_and_are_aligned_for_vector_loads() -> None:
    ranks: Any = Ranks()
    copies, before = CopiedRows(ranks, ranks, 1, 2), ranks.allocated
    made = []
    for rows in (40, 40, 40, 39, 7):
        parts = [torch.zeros(rows, 3), torch.zeros(rows, 5, dtype=torch.bfloat16), torch.zeros(rows, 1)]
        made.append(copies.gather_rows(parts))
    assert ranks.allocated - before == 2
    first = [gathered[0].untyped_storage().data_ptr() for gathered in made]
    assert first == [first[0], first[1]] * 2 + [first[0]] and first[0] != first[1]
    for gathered in made:
        offsets = [part.storage_offset() * part.element_size() for part in gathered]
        assert all(offset % 256 == 0 for offset in offsets)
        ends = [offset + part.nbytes for offset, part in zip(offsets, gathered, strict=True)]
        assert all(end <= start for end, start in zip(ends, offsets[1:], strict=False)), "two parts overlap"


class Threads:
    """SharedMemory and Driver of ranks that are threads. A slow rank is late to read what it was sent."""

    def __init__(self, slow: int) -> None:
        self.slow, self.lock = slow, threading.Lock()
        self.blocks: list[list[torch.Tensor]] = []
        self.barriers = 0

    def of(self, rank: int) -> Any:
        counts = itertools.count()
        return SimpleNamespace(
            allocate=lambda words, fill: self.allocate(rank, next(counts), words, fill),
            operations=lambda each: each,
            operate=self.operate,
            copies=lambda moves: moves,
            copy=lambda moves, start=0: [ctypes.memmove(to, start + source, size) for to, source, size in moves],
        )

    def allocate(self, rank: int, number: int, words: int, fill: int) -> SharedBlock:
        with self.lock:
            if number == len(self.blocks):
                self.blocks.append([torch.full((words,), fill, dtype=torch.int32) for _ in range(2)])
        block = self.blocks[number]
        return SharedBlock(block[rank], tuple(words.data_ptr() for words in block), None)

    def operate(self, operations: Sequence[tuple[int, int]], value: int) -> None:
        self.barriers += 1
        for kind, address in operations:
            word = ctypes.c_int32.from_address(address)
            if kind == driver.WRITE:
                word.value = value
            until = time.monotonic() + 30
            while word.value < value:
                assert time.monotonic() < until, "a rank waits for ever"
                time.sleep(1e-4)

    def late(self, rank: int) -> None:
        if rank == self.slow:
            time.sleep(0.01)

    def __getitem__(self, grid: object) -> Any:
        """Replace the kernel `sum_copies`, with an identity for the norm."""

        def run(
            inbox: Any, own: Any, out: Any, residual: object, *, rank: int, rows: int, plain_ptr: Any, **_: Any
        ) -> None:
            self.late(rank)
            out.copy_(own + inbox[: 2 * own.numel()].view(2, *own.shape)[1 - rank])
            if plain_ptr is not None:
                plain_ptr[rank * rows : (rank + 1) * rows] = out

        return run


@pytest.mark.parametrize("slow", [0, 1])
def test_no_rank_overwrites_what_another_has_not_read(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of reduce_rows, gather_rows and boundary in any order. Gathered rows stay until the second call after."""
    threads, order = Threads(slow), "rgrrggrbbgbrgg"
    monkeypatch.setattr(copies_module, "sum_copies", threads)

    def wrong(rank: int) -> list[int]:
        copies, found, last = CopiedRows(threads.of(rank), threads.of(rank), rank, 2), [], []
        for number, kind in enumerate(order):
            each = [torch.full((4, 8), float(number + 100 * other)) for other in range(2)]
            if kind == "r":
                found += [number] * bool((copies.reduce_rows(each[rank]) != sum(each)[:2]).any())
                continue
            if kind == "g":
                now = number, copies.gather_rows([each[rank]])[0], torch.cat(each)
            else:
                bundle, _ = copies.boundary(each[rank], None, each[0][0], 1e-5, (PLAIN,))
                now = number, bundle[PLAIN].values, sum(each)
            threads.late(rank)
            found += [at for at, got, expected in last if not torch.equal(got, expected)]
            last = [now]
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(wrong, range(2))) == [[], []]
    # One for each reduce and gather, and one more where two follow each other.
    assert threads.barriers == 2 * 22


def stopped(epoch: int) -> tuple[CopiedRows, Ranks]:
    ranks: Any = Ranks()
    copies = CopiedRows(ranks, ranks, 0, 2)
    copies._epoch = epoch
    copies.stop()
    copies.stop()
    until = time.monotonic() + 10
    while len(ranks.values) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    return copies, ranks


@pytest.mark.parametrize("epoch", [0, 5, 2**30, 2**31 - 2, 2**31, 2**31 + 7, 2**32 - 3, 2**33 + 1])
def test_waits_end_for_this_epoch_and_the_next_million(epoch: int) -> None:
    """The driver compares with wrap-around: a wait ends where (word - value) mod 2^32 is less than 2^31."""
    copies, ranks = stopped(epoch)
    copies.close()
    for later in (epoch, epoch + 1, epoch + 10**6):
        difference = (ranks.values[0] - later) % 2**32
        assert difference < 2**31, (epoch, later)


def test_words_are_written_repeatedly_until_close() -> None:
    """A live rank may overwrite a word with its epoch."""
    copies, ranks = stopped(7)
    assert len(ranks.values) >= 3
    copies.close()
    time.sleep(0.05)
    count = len(ranks.values)
    time.sleep(0.1)
    assert len(ranks.values) == count and not [t for t in threading.enumerate() if t.name == "end of copies"]


def test_close_right_after_stop_still_ends_the_waits() -> None:
    ranks: Any = Ranks()
    copies = CopiedRows(ranks, ranks, 0, 2)
    copies.stop()
    copies.close()
    until = time.monotonic() + 10
    while not ranks.values and time.monotonic() < until:
        time.sleep(0.01)
    assert ranks.values


def test_waits_end_although_the_words_are_inference_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = Ranks()
    monkeypatch.setattr(driver.torch.cuda, "stream", lambda stream: nullcontext())
    gpu: Any = driver.Driver.__new__(driver.Driver)
    with torch.inference_mode():
        gpu._values, gpu._side = torch.zeros(2, dtype=torch.int32), None
        copies = CopiedRows(ranks, ranks, 0, 2)
    copies._driver = gpu
    copies.stop()
    assert copies.stop_issued.wait(10)
    copies.close()
    assert (copies._epochs.words > 1 << 29).all()


def test_few_prepared_copies_are_cached() -> None:
    ranks: Any = Ranks()
    copies = CopiedRows(ranks, ranks, 0, 2)
    for rows in range(49, 0, -1):
        for _ in range(4):
            copies.gather_rows([torch.zeros(rows, 8)])
    assert 0 < len(ranks.prepared) <= 2 * MOST_CACHED
    # A repeated call reuses them; another dtype does not.
    count = len(ranks.prepared)
    copies.gather_rows([torch.zeros(1, 8)])
    assert len(ranks.prepared) == count
    copies.gather_rows([torch.zeros(1, 8, dtype=torch.bfloat16)])
    assert len(ranks.prepared) == count + 1


def test_a_rank_that_dies_ends_the_wait_for_its_memory() -> None:
    memory: Any = object.__new__(SharedMemory)
    memory._rank, memory._size, memory._count, memory._store = 0, 2, 0, dist.HashStore()
    memory._stopped = threading.Event()
    threading.Timer(0.1, memory.stop).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="a rank died"):
        memory.allocate(8, 0)
    assert time.monotonic() - began < 5


def test_operations_have_the_layout_of_cuda_h() -> None:
    """CUstreamBatchMemOpParams."""
    one = driver._Operation(driver.WAIT, 0x1122334455667788, 0xAABBCCDD)
    words = memoryview(one).cast("B").cast("Q").tolist()
    assert words == [driver.WAIT, 0x1122334455667788, 0xAABBCCDD, 0, 0, 0]


def test_attributes_of_copies_have_the_layout_of_cuda_h() -> None:
    """CUmemcpyAttributes: order, two hints of type and id, flags."""
    one = driver._Copying(driver.IN_STREAM_ORDER, flags=driver.BESIDE_KERNELS)
    assert memoryview(one).cast("B").cast("I").tolist() == [1, 0, 0, 0, 0, 1]


def test_a_barrier_writes_to_every_other_rank_and_waits_for_each() -> None:
    words = [1000, 2000, 3000]
    assert barrier_operations(words, 1, [2, 0]) == [
        (driver.WRITE, 3004),
        (driver.WRITE, 1004),
        (driver.WAIT, 2008),
        (driver.WAIT, 2000),
    ]


class Library:
    """A CUDA driver that records its calls."""

    def __init__(self, batches: bool) -> None:
        self.calls: list[tuple[object, ...]] = []
        if batches:
            self.cuMemcpyBatchAsync = Call(self._batch)
        self.cuMemcpyAsync = Call(lambda *each: self.calls.append(("copy", *each)))
        self.cuStreamBatchMemOp_v2 = Call(self._operations)

    def _batch(
        self, to: int, source: int, sizes: int, count: int, how: int, first: int, kinds: int, *rest: int
    ) -> None:
        each = [(ctypes.c_uint64 * count).from_address(at)[:] for at in (to, source, sizes)]
        attributes = (ctypes.c_uint32 * 6).from_address(how)[:]
        self.calls.append(("batch", *each, attributes, ctypes.c_size_t.from_address(first).value, kinds, rest[-1]))

    def _operations(self, stream: int, count: int, at: int, flags: int) -> None:
        found = (driver._Operation * count).from_address(at)
        self.calls.append(("operate", [(one.operation, one.address, one.value) for one in found], stream, flags))


class Call:
    def __init__(self, call: Any) -> None:
        self.call, self.argtypes = call, ()

    def __call__(self, *arguments: Any) -> int:
        self.call(*arguments)
        return 0


def lone_driver(library: Library, monkeypatch: pytest.MonkeyPatch, stream: int = 77) -> driver.Driver:
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(driver.Driver, "_stream", lambda self: stream)
    return driver.Driver(torch.device("cuda", 0), 2)


def test_copies_are_one_call_where_the_driver_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = [(10, 20, 30), (11, 21, 0), (12, 22, 32)]
    library = Library(batches=True)
    gpu = lone_driver(library, monkeypatch)
    copies = gpu.copies(moves)
    for start in (0, 100, 100, 0):
        gpu.copy(copies, start)
    assert library.calls == [
        ("batch", [10, 12], [start + 20, start + 22], [30, 32], [1, 0, 0, 0, 0, 1], 0, 1, 77)
        for start in (0, 100, 100, 0)
    ]
    for batches, stream in ((False, 77), (True, 0)):
        library = Library(batches)
        gpu = lone_driver(library, monkeypatch, stream)
        gpu.copy(gpu.copies(moves), 100)
        assert library.calls == [("copy", 10, 120, 30, stream), ("copy", 12, 122, 32, stream)]


def test_a_graph_may_not_hold_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = driver.Driver._stream
    gpu = lone_driver(Library(batches=True), monkeypatch)
    monkeypatch.setattr(driver.Driver, "_stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (lambda: gpu.copy(gpu.copies([(1, 2, 3)])), lambda: gpu.operate(gpu.operations([]), 1)):
        with pytest.raises(RuntimeError, match="cannot be captured"):
            call()


def test_operations_take_the_value_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(batches=True)
    gpu = lone_driver(library, monkeypatch)
    operations = gpu.operations([(driver.WRITE, 1000), (driver.WAIT, 2000)])
    for value in (5, -1):
        gpu.operate(operations, value)
    expected = [[(driver.WRITE, 1000, value), (driver.WAIT, 2000, value)] for value in (5, 0xFFFFFFFF)]
    assert library.calls == [("operate", each, 77, 0) for each in expected]


def test_a_driver_without_these_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libno-such-driver.so")
    with pytest.raises(CapabilityError, match=r"libno-such-driver.*collective\.beside=nccl"):
        driver.Driver(torch.device("cuda"), 2)
