"""One rank of the symm_mem kernel tests. Kernels run in Triton's interpreter; mailboxes are files mapped by all ranks.

python symm_mem_rank.py <rank> <size> <folder>
"""

from __future__ import annotations

import ctypes
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from dovetail.core.interfaces import PLAIN, ActFormat, Partial
from dovetail.core.interfaces.rows import RowShard
from dovetail.core.layers import RMSNorm
from dovetail.core.ops.norm import normalize, rms_norm_reference
from dovetail.core.testing.collective import CollectiveContract
from dovetail.core.testing.formats import SCALED_ROWS
from dovetail.core.testing.interpreter import mend_interpreter, quicken
from dovetail.plugins.collective.config import SymmMemConfig
from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.sharded import own_rows
from dovetail.plugins.collective.symm_mem import kernels, reduce, sharded_kernels
from dovetail.plugins.collective.symm_mem.collective import SymmMemCollective
from dovetail.plugins.collective.symm_mem.copies import CopiedRows
from dovetail.plugins.collective.symm_mem.driver import WRITE
from dovetail.plugins.collective.symm_mem.kernels import BOX_WORDS, EMPTY
from dovetail.plugins.collective.symm_mem.mailbox import TWO_SHOT_PROGRAMS
from dovetail.plugins.collective.symm_mem.memory import SharedBlock
from dovetail.plugins.collective.symm_mem.reduce import LARGE_ROW, SMALL_ROW, Reducer
from dovetail.plugins.collective.symm_mem.size_table import SizeTable
from dovetail.plugins.quant.fp8.format import FP8_TOKEN
from dovetail.plugins.quant.int8.format import INT8_TOKEN

BOXES = 4
PROGRAMS = TWO_SHOT_PROGRAMS * BOXES
EPS = 1e-5
FLAT = (2, 3 * SMALL_ROW + 2, 9 * LARGE_ROW + 10)
"""Sizes of flat sums: less than a row, several rows with a remainder, more rows than programs."""
ROWS = (1, 3, 9, 19)
COLUMNS = 96


@triton.jit
def encode_halves(x_GC, scale_in):
    scale_G = tl.max(tl.abs(x_GC), axis=1) + 0.1
    return (x_GC / scale_G[:, None]).to(tl.float16), scale_G


def halves(x_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x_TGC = x_TC.unflatten(1, (-1, 32))
    scale_TG = x_TGC.abs().amax(-1) + 0.1
    return (x_TGC / scale_TG[:, :, None]).flatten(1).half(), scale_TG


HALVES = ActFormat(
    "halves", dtype=torch.float16, group=32, scale_layout="column", encode=encode_halves, reference=halves
)
SHARED_ROWS = (1, 3, 17)
"""Fewer rows than ranks, with a remainder, several per program with a remainder."""
EMITS = {"fp8": (FP8_TOKEN,), "three": (PLAIN, HALVES, SCALED_ROWS)}
CANDIDATES = (1, 600)
DTYPES = (torch.float32, torch.float16)
COPIED_ROWS = (1, 7, 3, 40)
"""Rows per rank. The memory grows in between and is larger than some calls need."""
MIXED = 12
"""Number of calls of mixed kinds in one order, between ranks with random delays."""


def mailbox(words: torch.Tensor, addresses: torch.Tensor, lengths: tuple[int, int], keep: Any) -> SimpleNamespace:
    """Mailbox in the words of a rank, which are not GPU memory, with the addresses of every rank's. The lengths are
    those of the parts of one_shot and two_shot; `keep` lives as long."""
    one_shot, two_shot = lengths
    parts = words.split((one_shot, two_shot, one_shot))
    told = torch.zeros(1, dtype=torch.int32)
    return SimpleNamespace(
        boxes=BOXES,  # of one_shot; two_shot has TWO_SHOT_PROGRAMS times as many
        **dict(zip(("one_shot", "two_shot", "gather"), parts, strict=True)),
        one_shot_peers=addresses,
        two_shot_peers=addresses + 4 * one_shot,
        gather_peers=addresses + 4 * (one_shot + two_shot),
        one_shot_halves=torch.zeros(BOXES, dtype=torch.int32),
        two_shot_halves=torch.zeros(PROGRAMS, dtype=torch.int32),
        # The words that kernels read, and the host's stop word to which they point.
        stopped=torch.tensor([0, told.data_ptr()]).view(torch.int32),
        told=told,
        keep=keep,
    )


def mapped(folder: Path, rank: int, size: int) -> SimpleNamespace:
    one_shot, two_shot = BOXES * 2 * size * BOX_WORDS, PROGRAMS * 2 * 2 * BOX_WORDS
    files = [str(folder / f"mail{r}") for r in range(size)]
    boxes = [torch.from_file(f, shared=True, size=2 * one_shot + two_shot, dtype=torch.int32) for f in files]
    addresses = torch.tensor([box.data_ptr() for box in boxes])
    return mailbox(boxes[rank], addresses, (one_shot, two_shot), boxes)


class MappedMemory:
    """SharedMemory on files instead of GPU memory."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size, self.count = folder, rank, size, 0

    def allocate(self, words: int, fill: int) -> SharedBlock:
        names = [str(self.folder / f"shared{self.count}of{rank}") for rank in range(self.size)]
        mine = torch.from_file(names[self.rank], shared=True, size=words, dtype=torch.int32).fill_(fill)
        together(f"allocated{self.count}by", self.rank, self.size, self.folder)
        every = [
            mine if rank == self.rank else torch.from_file(name, shared=True, size=words, dtype=torch.int32)
            for rank, name in enumerate(names)
        ]
        self.count += 1
        return SharedBlock(mine, tuple(memory.data_ptr() for memory in every), every)


class CopiesOfTheCpu:
    """Driver that copies in the calling thread, with random delays."""

    def __init__(self, rank: int) -> None:
        self.random = random.Random(rank)

    def copies(self, moves: Sequence[tuple[int, int, int]]) -> Sequence[tuple[int, int, int]]:
        return moves

    def copy(self, copies: Sequence[tuple[int, int, int]], start: int = 0) -> None:
        for to, source, nbytes in self.random.sample(copies, len(copies)):
            if self.random.random() < 0.05:
                time.sleep(0.003)
            ctypes.memmove(to, start + source, nbytes)

    def operations(self, each: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        return each

    def operate(self, operations: Sequence[tuple[int, int]], value: int) -> None:
        for kind, address in operations:
            word = ctypes.c_int32.from_address(address)
            if kind == WRITE:
                word.value = value
            else:
                until = time.monotonic() + 30
                while word.value - value < 0:
                    assert time.monotonic() < until, f"the word is {word.value}, expected {value}"
                    time.sleep(1e-4)

    def overwrite(self, words: torch.Tensor, value: int) -> None:
        words.fill_(value)


class Interpreted(SymmMemCollective):
    """Uses gloo instead of NCCL."""

    def __init__(self, algorithm: str, reducer: Reducer, copies: CopiedRows | None = None) -> None:
        super().__init__(SymmMemConfig.model_validate({"algorithm": algorithm}))
        self.given, self.copies, self.overlapped = reducer, copies, copies is not None

    def connect(self, rank: int, size: int, address: str, device: torch.device) -> None:
        NcclCollective.connect(self, rank, size, address, device)
        self.reducer, self.sharded_boundaries = self.given, {}
        self.sums, self.boundaries = SizeTable((0,), ("nccl",)), SizeTable((0,), ("sharded",))


class Suite(CollectiveContract):
    def __init__(self, *given: Any) -> None:
        self.given = given

    def make(self) -> Interpreted:
        return Interpreted(*self.given)


def summand(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values of very different magnitudes, and zeros of both signs, which in 16 bits form the empty word."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(shape, generator=generator) * 10 ** (rank % 3)
    return torch.where(torch.rand(shape, generator=generator) < 0.5, -0.0, x).to(dtype)


def candidates(rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values, many of them equal, and indices."""
    generator = torch.Generator().manual_seed(rank)
    value = torch.randint(-2, 3, (rows,), generator=generator).float()
    value[0] = float("nan") if rank else float("-inf")
    return value, torch.arange(rows) * 100 + (rank * 37 + 50) % 100


def odd(rank: int) -> torch.Tensor:
    """Special words that a sum must not change: the mailbox's empty word, NaN and infinity."""
    x = torch.zeros(8)
    x[:4] = torch.tensor([EMPTY, EMPTY, 0x7FC00001, 0x7F800000], dtype=torch.int64).to(torch.int32).view(torch.float32)
    x[1] *= rank == 0
    x[4 + rank % 4] = 1.0
    return x


def mixed(seed: int) -> tuple[str, int]:
    """Return the next call of all ranks: algorithm and rows of a sum, or "argmax"."""
    generator = random.Random(seed)
    return generator.choice(("one_shot", "two_shot", "argmax")), generator.choice(
        (1, 2, BOXES, BOXES + 1, PROGRAMS + 1)
    )


def meeting(rank: int, folder: Path) -> str:
    """Return an address whose port rank 0 has just found free."""
    told = folder / "address"
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            (folder / "found").write_text(f"127.0.0.1:{probe.getsockname()[1]}")
        (folder / "found").rename(told)
    while not told.exists():
        time.sleep(0.01)
    return told.read_text()


def together(where: str, rank: int, size: int, folder: Path) -> None:
    (folder / f"{where}{rank}").touch()
    while not all((folder / f"{where}{r}").exists() for r in range(size)):
        time.sleep(0.01)


@triton.jit
def encode_static(x_GC, scale_in):
    return (x_GC / scale_in).to(tl.float16), tl.zeros((x_GC.shape[0],), tl.float32)


STATIC = ActFormat(
    "static",
    dtype=torch.float16,
    group="tensor",
    static_scale=torch.tensor([0.5]),
    encode=encode_static,
    reference=lambda x_TC: ((x_TC / 0.5).half(), torch.tensor([0.5])),
)
BEFORE = ActFormat(
    "before",
    dtype=torch.float16,
    group=32,
    scale_layout="column",
    pre_scale=torch.linspace(0.5, 2, COLUMNS),
    encode=encode_halves,
    reference=halves,
)


def halves_of_a_pass(reducer: Reducer, copies: CopiedRows, rank: int, size: int, folder: Path) -> None:
    """Run consecutive fused boundaries: the residual is complete, then sharded over the ranks; summands are not
    contiguous; emitted in every format that a kernel writes."""
    collective = Interpreted("measured", reducer, copies)
    (folder / "address").unlink(missing_ok=True)
    together("once more", rank, size, folder)
    collective.connect(rank, size, meeting(rank, folder), torch.device("cpu"))
    emits = ((PLAIN,), (STATIC,), (PLAIN, BEFORE), (HALVES,), (FP8_TOKEN, PLAIN))
    for dtype, rows in product(DTYPES, (1, 2, 3, 17)):
        build: Any = SimpleNamespace(dtype=dtype, device=torch.device("cpu"))
        norm = RMSNorm("norm", build, COLUMNS, EPS)
        norm.weight.copy_(summand(90, (COLUMNS,), torch.float32).abs().clamp(max=5) + 0.5)
        # The last boundary normalizes the sum before it is added, with a float32 weight.
        first = RMSNorm("first", build, COLUMNS, EPS, offset=1.0)
        first.weight.copy_(norm.weight)
        total = summand(91, (rows, COLUMNS), dtype)
        residual: Any = total.clone()
        for step, emit in enumerate(emits):
            each = [summand(other + step, (COLUMNS, rows), dtype).T for other in range(size)]
            last = step == len(emits) - 1
            bundle, residual = collective.boundary(Partial(each[rank]), residual, norm, emit, first if last else None)
            assert isinstance(residual, RowShard)
            summed = sum((x.float() for x in each), torch.zeros(rows, COLUMNS))
            if last:
                summed = normalize(summed.to(dtype), first.weight, EPS).float()
            total = (summed + total.float()).to(dtype)
            what = f"{dtype}, {rows} rows, {[fmt.name for fmt in emit]}"
            whole = collective.whole(residual)
            if last:
                # The norm's sum is computed in another order.
                torch.testing.assert_close(whole, total, rtol=2e-3, atol=2e-3, msg=what)
                total = whole
            assert torch.equal(whole, total), what
            expected, _ = rms_norm_reference(total, None, norm.weight, EPS, emit)
            for fmt in emit:
                got, wanted = bundle[fmt], expected[fmt]
                assert got.values.dtype == wanted.values.dtype, what
                step_of_format = 0.13 if fmt is FP8_TOKEN else 4e-3
                torch.testing.assert_close(
                    got.values.float(), wanted.values.float(), rtol=step_of_format, atol=4e-3, msg=what
                )
                assert (got.scale is None) == (wanted.scale is None), what
                if wanted.scale is not None:
                    torch.testing.assert_close(got.scale, wanted.scale, rtol=1e-2, atol=1e-6, msg=what)
                    assert fmt.scale_layout != "column" or rows == 1 or got.scale.stride(0) == 1, what
    collective._aborted = True
    try:
        collective.boundary(Partial(each[rank]), residual, norm, (PLAIN,))
    except RuntimeError as error:
        assert "a rank died" in str(error)
    else:
        raise AssertionError("a rank died, but the call returned")
    NcclCollective.close(collective)


def polled_slowly(next_poll: Callable[..., Any]) -> Callable[..., Any]:
    """Return next_poll with a pause if words are missing."""

    def slowly(missing: Any, polls: Any) -> Any:
        following = next_poll(missing, polls)
        if int(following):
            time.sleep(0.001)
        return following

    return slowly


def main(rank: int, size: int, folder: Path) -> None:
    mend_interpreter()
    quicken()
    # The interpreter has no inline assembly; the CPU keeps stores in order.
    kernels.fence = sharded_kernels.fence = lambda: None
    # Ranks share cores: one that waits makes room for those that it waits for, and reads the host's flag early.
    kernels._POLLS = tl.constexpr(8)
    kernels.next_poll = sharded_kernels.next_poll = polled_slowly(kernels.next_poll)
    mail = mapped(folder, rank, size)
    reducer = Reducer(mail, rank, size)  # type: ignore[arg-type]
    out: dict[tuple[object, ...], torch.Tensor] = {}
    for algorithm in ("one_shot", "two_shot"):
        for dtype in DTYPES:
            for count in FLAT:
                x = summand(rank, (count,), dtype)
                out[algorithm, dtype, count] = reducer.reduce(x, algorithm)
            weight = summand(90, (COLUMNS,), dtype)
            for rows in ROWS:
                x, residual = summand(rank, (rows, COLUMNS), dtype), summand(91, (rows, COLUMNS), dtype)
                bundle, after = reducer.boundary(x, residual, weight, EPS, (PLAIN, INT8_TOKEN), algorithm)
                out[algorithm, dtype, rows, "after"] = after
                out[algorithm, dtype, rows, "plain"] = bundle[PLAIN].values
                out[algorithm, dtype, rows, "int8"] = bundle[INT8_TOKEN].values
                out[algorithm, dtype, rows, "scale"] = bundle[INT8_TOKEN].scale
    x = summand(rank, (3, COLUMNS), torch.float32)
    _, out["no residual",] = reducer.boundary(x.T.contiguous().T, None, torch.ones(COLUMNS), EPS, (PLAIN,), "one_shot")
    for algorithm in ("one_shot", "two_shot"):
        out["odd", algorithm] = reducer.reduce(odd(rank), algorithm)
    late = random.Random(rank)
    for seed in range(MIXED):
        kind, rows = mixed(seed)
        if late.random() < 0.3:
            time.sleep(0.02)
        if kind == "argmax":
            out["mixed", seed] = reducer.argmax(
                torch.full((rows,), float((rank + seed) % size)), torch.arange(rows) + rank
            )
        else:
            x, residual = torch.full((2, rows, COLUMNS), float(rank + seed)).half()
            _, out["mixed", seed] = reducer.boundary(x, residual * 0, residual, EPS, (PLAIN,), kind)
    most = reduce.MOST_WORDS
    for dtype in DTYPES:
        weight = summand(90, (COLUMNS,), dtype)
        for rows, (name, emit) in product(SHARED_ROWS, EMITS.items()):
            if dtype is torch.float32 and name != "three":
                continue
            x, residual = summand(rank, (rows, COLUMNS), dtype), summand(91, (rows, COLUMNS), dtype)
            own = None if rows == 1 else own_rows(reducer, residual)
            assert reducer.serves_sharded(x, emit)
            # Wide rows need several polls. Narrow rows do too when a thread may read only the minimum.
            reduce.MOST_WORDS = most if rows > size else 0
            bundle, after = reducer.sharded_boundary(x, own, weight, EPS, emit)
            out["sharded", dtype, rows, name, "own rows"] = after
            for fmt in emit:
                out["sharded", dtype, rows, name, fmt.name] = bundle[fmt].values.view(torch.uint8)
                if bundle[fmt].scale is not None:
                    out["sharded", dtype, rows, name, fmt.name, "scale"] = bundle[fmt].scale
            # Its boxes are those of one_shot, whose turn counter continues.
            reducer.reduce(torch.ones(8), "one_shot")
    for rows in CANDIDATES:
        out["argmax", rows] = reducer.argmax(*candidates(rank, rows))
    # Boundaries of a forward pass, including norms that the kernels do not implement.
    out["pass", "sharded"] = Suite("sharded", reducer)._passes(rank, size, meeting(rank, folder))
    copies = CopiedRows(MappedMemory(folder, rank, size), CopiesOfTheCpu(rank), rank, size)  # type: ignore[arg-type]
    (folder / "address").unlink(missing_ok=True)
    together("again", rank, size, folder)
    out["pass", "copies"] = Suite("measured", reducer, copies)._passes(rank, size, meeting(rank, folder))
    for rows in COPIED_ROWS:
        for dtype in DTYPES:
            x = summand(rank, (rows * size, COLUMNS), dtype)
            mine = copies.reduce_rows(x)
            out["copied", rows, dtype, "own rows"] = mine
            out["copied", rows, dtype] = torch.cat([part.clone() for part in copies.gather_rows([mine, mine])])
    for dtype in DTYPES:
        weight = summand(90, (COLUMNS,), dtype)
        for rows, (name, emit) in product(SHARED_ROWS, EMITS.items()):
            x, residual = summand(rank, (rows, COLUMNS), dtype), summand(91, (rows, COLUMNS), dtype)
            assert copies.serves(emit) == (name != "three")
            one = emit[:2]
            bundle, after = copies.boundary(x, None if rows == 1 else own_rows(copies, residual), weight, EPS, one)
            out["copied", dtype, rows, name, "own rows"] = after
            for fmt in one:
                out["copied", dtype, rows, name, fmt.name] = bundle[fmt].values.clone().view(torch.uint8)
                if bundle[fmt].scale is not None:
                    out["copied", dtype, rows, name, fmt.name, "scale"] = bundle[fmt].scale.clone()
    halves_of_a_pass(reducer, copies, rank, size, folder)
    # The result of a gather stays valid until the second gather after it.
    first, second = (copies.gather_rows([torch.full((5, 3), float(10 * rank + i))])[0] for i in range(2))
    out["gathered",] = torch.cat([first, second])
    torch.save(out, folder / f"{rank}.pt")
    # All mailboxes are empty, and no rank keeps waiting for a word once a rank has died.
    together("done", rank, size, folder)
    left = [name for name in ("one_shot", "two_shot", "gather") if bool((getattr(mail, name) != EMPTY).any())]
    assert not left, f"rank {rank} has words left in {left}"
    # From here on rank 0 fills the other ranks' mailboxes.
    together("looked", rank, size, folder)
    # Set while the first of these calls waits.
    threading.Timer(0.5, lambda: mail.told.fill_(1)).start()
    if rank == 0:
        reducer.reduce(torch.ones(8), "one_shot")
        reducer.reduce(torch.ones(8), "two_shot")
        reducer.sharded_boundary(torch.ones(2, COLUMNS), None, torch.ones(COLUMNS), EPS, (PLAIN,))
        reducer.argmax(torch.ones(1), torch.ones(1, dtype=torch.int64))
        assert mail.stopped[0] == 1, "the rank that sees the host's stop word must stop the others"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
    # gloo's threads may wait for the GIL while the interpreter waits for them.
    os._exit(0)
