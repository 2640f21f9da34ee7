"""Edges by the copy engines, which hold no multiprocessor: products of other tokens run beside them as if alone (so
gather NCCL's zero-CTA collectives and torch's async tensor parallel).

Each rank copies its summands of every other one's rows into that one's memory, sums, norms and encodes its own rows in
one kernel, and copies what came out into the memory of all. Between the copies of a stream the ranks meet: the driver
writes a word into each other one's memory and waits for theirs in its own.

Shapes: T tokens, S rows of a rank's shard, C channels, G scale groups of a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import PLAIN, ActFormat, Activation, Bundle
from dovetail.core.ops.formats import plan_emit, scales_of_row
from dovetail.core.ops.kernels.formats import EncodeTarget, warps
from dovetail.plugins.collective.sharded import padded, shard_rows, with_scale
from dovetail.plugins.collective.symm_mem.driver import WAIT, WRITE, Driver
from dovetail.plugins.collective.symm_mem.memory import Block, SharedMemory
from dovetail.plugins.collective.symm_mem.sharded_kernels import sum_copies

ALIGNMENT = 256
"""Bytes, of what a kernel reads."""
FAR = 2**30
"""Turns ahead: what ends all waiting."""
AGAIN = 0.01
"""Seconds between two words that end the waiting."""
SLACK = 1.125
"""Of the memory, over what a step needed: cuts lie near its middle, not in it."""

KEPT = 8
"""Of what is kept for edges of one size; a step has two, or three with an odd number of tokens."""

Shape = tuple[int, torch.dtype]
"""Columns and type of rows that are gathered."""


class CopiedRows:
    """`Ranks` of sharded.py, and `share`, by which most edges take one kernel. What was gathered is overwritten by the
    second call from there: the two halves of a step have read it by then (core.layers.interleave)."""

    def __init__(self, memory: SharedMemory, driver: Driver, rank: int, size: int) -> None:
        self.rank, self.size, self._driver = rank, size, driver
        self._others = [(rank + 1 + i) % size for i in range(size - 1)]
        """Beginning with the next, so that no two ranks copy to one at a time."""
        self._words = memory.allocate(size, 0)
        """One for each rank."""
        self._meeting = driver.operations(meeting(self._words.addresses, rank, self._others))
        self._turn = 0
        self._reduced = False
        """Whether the last call was of `reduce_rows`. What follows it finds all ranks past their gathers, and what
        follows another finds that all have summed what they were sent; else they meet first."""
        self._summands = _Inbox(memory)
        self._gathered = _Inbox(memory), _Inbox(memory)
        self._ended, self._closed = threading.Event(), threading.Event()
        self.told = threading.Event()
        """The device was told once that the waiting ends."""

    def reduce_rows(self, x_TC: torch.Tensor) -> torch.Tensor:
        if self._reduced:
            self._meet()
        self._reduced = True
        return self._summed(x_TC.contiguous(), None, _SUM_ALONE)

    def gather_rows(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        flat = [part.contiguous().view(len(part), -1) for part in parts]
        places = self._places(len(parts[0]), tuple((part.shape[1], part.dtype) for part in flat))
        for own, part in zip(places.own, flat, strict=True):
            own.copy_(part)
        if not self._reduced:
            self._meet()
        self._reduced = False
        self._send(places)
        return [place.view(-1, *part.shape[1:]) for place, part in zip(places.every, parts, strict=True)]

    def shares(self, emit: tuple[ActFormat, ...]) -> bool:
        """Whether `share` takes them: what one kernel writes."""
        return not plan_emit(emit).rest

    def share(
        self,
        x_TC: torch.Tensor,
        residual_SC: torch.Tensor | None,
        weight_C: torch.Tensor,
        eps: float,
        emit: tuple[ActFormat, ...],
    ) -> tuple[Bundle, torch.Tensor]:
        """`Collective.boundary` with an RMSNorm: all of the bundle, this rank's rows of the sum."""
        tokens, columns = x_TC.shape
        rows, plan, dtype = shard_rows(tokens, self.size), plan_emit(emit), x_TC.dtype
        fmt = plan.fused
        shapes = {"plain": (columns, dtype)} if plan.plain else {}
        if fmt is not None:
            shapes["values"] = columns, fmt.dtype or dtype
            if groups := scales_of_row(fmt, columns):
                shapes["scale"] = groups, torch.float32
        places = self._places(rows, tuple(shapes.values()))
        every = dict(zip(shapes, places.every, strict=True))
        target = EncodeTarget(fmt, every.get("values"), every.get("scale"))
        if self._reduced:
            self._meet()
        self._reduced = False
        summed_SC = self._summed(
            padded(x_TC.contiguous(), self.size * rows),
            residual_SC,
            {
                "weight_ptr": weight_C,
                "plain_ptr": every.get("plain"),
                "eps": eps,
                "NORM": True,
                **target.arguments(target.block(columns, whole_row=True)),
            },
        )
        self._send(places)
        made = {name: place[:tokens] for name, place in every.items()}
        items = [Activation(PLAIN, made["plain"])] if plan.plain else []
        if fmt is not None:
            item = Activation(fmt, made["values"], fmt.static_scale)
            items.append(with_scale(item, made["scale"]) if "scale" in made else item)
        return Bundle(tuple(items)), summed_SC

    def stop(self) -> None:
        """Ends the waiting, now and later, as soon as the driver lets it (`Driver.overwrite`); from any thread, perhaps
        several times. Returns at once."""
        if not self._ended.is_set():
            self._ended.set()
            threading.Thread(target=self._end, name="end of copies", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _end(self) -> None:
        """A rank that lives yet may write its next turn over the word that ends the waiting for it."""
        far = (self._turn + FAR + 2**31) % 2**32 - 2**31
        while True:
            self._driver.overwrite(self._words.words, far)
            self.told.set()
            if self._closed.wait(AGAIN):
                return

    def _summed(self, x_TC: torch.Tensor, residual_SC: torch.Tensor | None, norm: dict[str, Any]) -> torch.Tensor:
        """This rank's rows of the sum, and of the residual; `norm`: what else the kernel makes of them."""
        rows_SC = x_TC.view(self.size, -1, x_TC.shape[-1])
        share, inbox = rows_SC[0].nbytes, self._summands.of(x_TC.nbytes)
        self._driver.copy(inbox.kept(share, self._summands_to), x_TC.data_ptr())
        self._meet()
        summed_SC = torch.empty_like(rows_SC[0])
        rows, columns = summed_SC.shape
        block = max(triton.next_power_of_2(columns), norm["GROUP"])
        sum_copies[(rows,)](
            inbox.memory.view(x_TC.dtype),
            rows_SC[self.rank],
            summed_SC,
            None if residual_SC is None else residual_SC.contiguous(),
            rank=self.rank,
            rows=rows,
            C=columns,
            WORLD=self.size,
            VALUES=block,
            num_warps=warps(block),
            **norm,
        )
        return summed_SC

    def _summands_to(self, inbox: _Inbox, share: int) -> Any:
        """Copies of so many bytes to each of the others, from where their rows begin."""
        to = self.rank * share
        return self._driver.copies([(inbox.addresses[other] + to, other * share, share) for other in self._others])

    def _places(self, rows: int, shapes: tuple[Shape, ...]) -> _Places:
        """For all ranks' rows of each shape, in memory that the others copy into."""
        self._gathered = self._gathered[::-1]
        starts, end = [], 0
        for columns, dtype in shapes:
            starts.append(end)
            end += ceil_div(self.size * rows * columns * dtype.itemsize, ALIGNMENT) * ALIGNMENT
        inbox = self._gathered[0].of(end)

        def made(inbox: _Inbox, key: object) -> _Places:
            every = [
                inbox.memory[start:].view(dtype)[: self.size * rows * columns].view(-1, columns)
                for start, (columns, dtype) in zip(starts, shapes, strict=True)
            ]
            own = [place[self.rank * rows : (self.rank + 1) * rows] for place in every]
            first = inbox.memory.data_ptr()
            moves = [
                (inbox.addresses[other] + part.data_ptr() - first, part.data_ptr(), part.nbytes)
                for other in self._others
                for part in own
            ]
            return _Places(every, own, self._driver.copies(moves))

        return inbox.kept((rows, shapes), made)

    def _send(self, places: _Places) -> None:
        """This rank's rows of each, to the same places of every other rank."""
        self._driver.copy(places.copies)
        self._meet()

    def _meet(self) -> None:
        """Every rank has done what is enqueued before this."""
        self._turn = turn = self._turn + 1
        self._driver.operate(self._meeting, turn)


def meeting(words: Sequence[int], rank: int, others: Sequence[int]) -> list[tuple[int, int]]:
    """Tell the others, then wait for them; `words`: where each rank has its own."""
    said = [(WRITE, words[other] + 4 * rank) for other in others]
    return [*said, *((WAIT, words[rank] + 4 * other) for other in others)]


_SUM_ALONE = {"weight_ptr": None, "plain_ptr": None, "eps": 0.0, "NORM": False, **EncodeTarget(None).arguments(1)}
"""Arguments of the kernel."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Of what is gathered: all ranks' rows, this one's, and how these get to the others."""

    every: list[torch.Tensor]
    own: list[torch.Tensor]
    copies: Any


class _Inbox:
    """Memory that the others copy into. It grows when a call needs more, on all ranks in that call."""

    def __init__(self, memory: SharedMemory) -> None:
        self._shared = memory
        self._block: Block | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.addresses: Sequence[int] = ()
        """Where every rank has its own."""
        self._kept: dict[Any, Any] = {}

    def of(self, nbytes: int) -> _Inbox:
        if len(self.memory) < nbytes:
            words = ceil_div(int(nbytes * SLACK), ALIGNMENT) * ALIGNMENT // 4
            # Waits for all that the device was given. Who holds rows of the former block keeps them.
            self._block = self._shared.allocate(words, 0)
            self.memory, self.addresses = self._block.words.view(torch.uint8), self._block.addresses
            self._kept.clear()
        return self

    def kept(self, key: Any, make: Callable[[_Inbox, Any], Any]) -> Any:
        """What `make` made for this key of the memory as it is: the edges of a step's layers are alike."""
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            found = self._kept[key] = make(self, key)
        return found
