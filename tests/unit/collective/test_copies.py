"""collective.beside=copies without a GPU: how its waiting ends, where it is refused. tests/tp runs it over files."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dovetail.core.errors import CapabilityError
from dovetail.core.interfaces import PLAIN
from dovetail.plugins.collective.symm_mem import driver
from dovetail.plugins.collective.symm_mem.copies import KEPT, CopiedRows, meeting
from dovetail.plugins.collective.symm_mem.memory import Block, SharedMemory


class Ranks:
    """SharedMemory and Driver in one; remembers what the words were overwritten with."""

    def __init__(self) -> None:
        self.values: list[int] = []
        self.allocated = 0

    def allocate(self, words: int, fill: int) -> Block:
        self.allocated += 1
        return Block(torch.full((words,), fill, dtype=torch.int32), (0, 0), None)

    def operations(self, each: object) -> object:
        return each

    def copies(self, moves: object) -> object:
        return moves

    def copy(self, copies: object, start: int = 0) -> None: ...

    def overwrite(self, words: torch.Tensor, value: int) -> None:
        words.fill_(value)
        self.values.append(value)


def test_places_are_made_once_in_turn_and_begin_where_kernels_read_whole_vectors() -> None:
    ranks: Any = Ranks()
    copies, before = CopiedRows(ranks, ranks, 1, 2), ranks.allocated
    shapes = [(3, torch.float32), (5, torch.bfloat16), (1, torch.float32)]
    made = [copies._places(rows, tuple(shapes)).every for rows in (40, 40, 40, 39, 7)]
    assert ranks.allocated - before == 2
    first = [places[0].untyped_storage().data_ptr() for places in made]
    assert first == [first[0], first[1]] * 2 + [first[0]] and first[0] != first[1]
    for places in made:
        offsets = [place.storage_offset() * place.element_size() for place in places]
        assert all(offset % 256 == 0 for offset in offsets)
        ends = [offset + place.nbytes for offset, place in zip(offsets, places, strict=True)]
        assert all(end <= start for end, start in zip(ends, offsets[1:], strict=False)), "one lies in another"


def test_ranks_meet_before_they_overwrite_what_may_not_have_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in an edge, and once more only where calls do not come in pairs."""
    ranks: Any = Ranks()
    copies = CopiedRows(ranks, ranks, 0, 2)
    events: list[str] = []
    monkeypatch.setattr(copies, "_meet", lambda: events.append("meet"))
    monkeypatch.setattr(copies, "_summed", lambda x, *_: events.extend(("send", "meet")) or x[:2])
    monkeypatch.setattr(ranks, "copy", lambda *_: events.append("send"))
    x = torch.zeros(4, 8)
    for call, expected in (
        (copies.reduce_rows, ["send", "meet"]),
        (copies.gather_rows, ["send", "meet"]),
        (copies.reduce_rows, ["send", "meet"]),
        (copies.reduce_rows, ["meet", "send", "meet"]),
        (copies.gather_rows, ["send", "meet"]),
        (copies.gather_rows, ["meet", "send", "meet"]),
        (copies.reduce_rows, ["send", "meet"]),
        (lambda x: copies.share(x, None, x[0], 1e-5, (PLAIN,)), ["meet", "send", "meet", "send", "meet"]),
        (lambda x: copies.share(x, None, x[0], 1e-5, (PLAIN,)), ["send", "meet", "send", "meet"]),
        (copies.gather_rows, ["meet", "send", "meet"]),
    ):
        events.clear()
        call([x] if call == copies.gather_rows else x)
        assert events == expected, (call, events)


def stopped(turn: int) -> tuple[CopiedRows, Ranks]:
    ranks: Any = Ranks()
    copies = CopiedRows(ranks, ranks, 0, 2)
    copies._turn = turn
    copies.stop()
    copies.stop()
    until = time.monotonic() + 10
    while len(ranks.values) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    return copies, ranks


@pytest.mark.parametrize("turn", [0, 5, 2**30, 2**31 - 2, 2**31, 2**31 + 7, 2**32 - 3, 2**33 + 1])
def test_waiting_ends_for_this_turn_and_the_next_million(turn: int) -> None:
    """As the driver compares: a word is not before a value where their difference in 32 bits is not negative."""
    copies, ranks = stopped(turn)
    copies.close()
    for later in (turn, turn + 1, turn + 10**6):
        difference = (ranks.values[0] - later) % 2**32
        assert difference < 2**31, (turn, later)


def test_words_are_written_again_until_the_ranks_part() -> None:
    """A rank that lives yet may write its turn over one."""
    copies, ranks = stopped(7)
    assert len(ranks.values) >= 3
    copies.close()
    time.sleep(0.05)
    count = len(ranks.values)
    time.sleep(0.1)
    assert len(ranks.values) == count and not [t for t in threading.enumerate() if t.name == "end of copies"]


def test_who_parts_at_once_has_ended_the_waiting_before() -> None:
    ranks: Any = Ranks()
    copies = CopiedRows(ranks, ranks, 0, 2)
    copies.stop()
    copies.close()
    until = time.monotonic() + 10
    while not ranks.values and time.monotonic() < until:
        time.sleep(0.01)
    assert ranks.values


def test_waiting_ends_though_a_step_made_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode, outside of which nobody else may write to them."""
    ranks: Any = Ranks()
    monkeypatch.setattr(driver.torch.cuda, "stream", lambda stream: nullcontext())
    gpu: Any = driver.Driver.__new__(driver.Driver)
    with torch.inference_mode():
        gpu._values, gpu._side = torch.zeros(2, dtype=torch.int32), None
        copies = CopiedRows(ranks, ranks, 0, 2)
    copies._driver = gpu
    copies.stop()
    assert copies.told.wait(10)
    copies.close()
    assert (copies._words.words > 1 << 29).all()


def test_little_is_kept_of_edges_of_many_sizes() -> None:
    ranks: Any = Ranks()
    copies = CopiedRows(ranks, ranks, 0, 2)
    for rows in range(1, 50):
        for _ in range(2):
            copies._places(rows, ((8, torch.float32),))
    assert all(0 < len(inbox._kept) <= KEPT for inbox in copies._gathered)
    # What is kept is found again, for these rows and shapes alone, and in the memory whose turn it is.
    first, second = (copies._places(7, ((8, torch.float32),)) for _ in range(2))
    assert copies._places(7, ((8, torch.float32),)) is first and copies._places(7, ((8, torch.float32),)) is second
    other = copies._places(7, ((8, torch.bfloat16),))
    assert other is not first and other.every[0].dtype == torch.bfloat16


def test_a_rank_that_dies_ends_the_wait_for_its_memory() -> None:
    memory: Any = object.__new__(SharedMemory)
    memory._rank, memory._size, memory._count, memory._store = 0, 2, 0, dist.HashStore()
    memory._ended = threading.Event()
    threading.Timer(0.1, memory.stop).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="a rank died"):
        memory.allocate(8, 0)
    assert time.monotonic() - began < 5


def test_the_driver_is_told_what_its_header_says() -> None:
    """CUstreamBatchMemOpParams of cuda.h."""
    one = driver._Operation(driver.WAIT, 0x1122334455667788, 0xAABBCCDD)
    words = memoryview(one).cast("B").cast("Q").tolist()
    assert words == [driver.WAIT, 0x1122334455667788, 0xAABBCCDD, 0, 0, 0]


def test_attributes_of_copies_are_as_its_header_says() -> None:
    """CUmemcpyAttributes: the order, two hints of a type and a number each, the flags."""
    one = driver._Copying(driver.IN_STREAM_ORDER, flags=driver.BESIDE_KERNELS)
    assert memoryview(one).cast("B").cast("I").tolist() == [1, 0, 0, 0, 0, 1]


def test_a_meeting_is_a_word_for_each_other_rank_and_one_from_it() -> None:
    words = [1000, 2000, 3000]
    assert meeting(words, 1, [2, 0]) == [
        (driver.WRITE, 3004),
        (driver.WRITE, 1004),
        (driver.WAIT, 2008),
        (driver.WAIT, 2000),
    ]


class Library:
    """The CUDA driver, which notes what it is asked."""

    def __init__(self, batches: bool) -> None:
        self.asked: list[tuple[object, ...]] = []
        if batches:
            self.cuMemcpyBatchAsync = Call(self._batch)
        self.cuMemcpyAsync = Call(lambda *each: self.asked.append(("copy", *each)))
        self.cuStreamBatchMemOp_v2 = Call(self._operations)

    def _batch(
        self, to: int, source: int, sizes: int, count: int, how: int, first: int, kinds: int, *rest: int
    ) -> None:
        each = [(ctypes.c_uint64 * count).from_address(at)[:] for at in (to, source, sizes)]
        attributes = (ctypes.c_uint32 * 6).from_address(how)[:]
        self.asked.append(("batch", *each, attributes, ctypes.c_size_t.from_address(first).value, kinds, rest[-1]))

    def _operations(self, stream: int, count: int, at: int, flags: int) -> None:
        found = (driver._Operation * count).from_address(at)
        self.asked.append(("operate", [(one.operation, one.address, one.value) for one in found], stream, flags))


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
    assert library.asked == [
        ("batch", [10, 12], [start + 20, start + 22], [30, 32], [1, 0, 0, 0, 0, 1], 0, 1, 77)
        for start in (0, 100, 100, 0)
    ]
    for batches, stream in ((False, 77), (True, 0)):
        library = Library(batches)
        gpu = lone_driver(library, monkeypatch, stream)
        gpu.copy(gpu.copies(moves), 100)
        assert library.asked == [("copy", 10, 120, 30, stream), ("copy", 12, 122, 32, stream)]


def test_a_graph_may_not_hold_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = driver.Driver._stream
    gpu = lone_driver(Library(batches=True), monkeypatch)
    monkeypatch.setattr(driver.Driver, "_stream", stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (lambda: gpu.copy(gpu.copies([(1, 2, 3)])), lambda: gpu.operate(gpu.operations([]), 1)):
        with pytest.raises(RuntimeError, match="no graph can hold them"):
            call()


def test_operations_take_the_value_of_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(batches=True)
    gpu = lone_driver(library, monkeypatch)
    operations = gpu.operations([(driver.WRITE, 1000), (driver.WAIT, 2000)])
    for value in (5, -1):
        gpu.operate(operations, value)
    expected = [[(driver.WRITE, 1000, value), (driver.WAIT, 2000, value)] for value in (5, 0xFFFFFFFF)]
    assert library.asked == [("operate", each, 77, 0) for each in expected]


def test_a_driver_without_these_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libno-such-driver.so")
    with pytest.raises(CapabilityError, match=r"libno-such-driver.*collective\.beside=nccl"):
        driver.Driver(torch.device("cuda"), 2)
