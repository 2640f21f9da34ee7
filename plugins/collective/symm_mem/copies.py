"""Boundaries through the copy engines. These occupy no SM, so concurrent matmuls of other tokens run at full speed
(like NCCL's zero-CTA collectives and torch's async tensor parallelism).

Each rank copies its summands into the memory of the rank that owns the rows. It sums, normalizes and encodes its own
rows in one kernel and copies the result into the memory of all ranks. A barrier follows each group of copies in the
stream: the driver writes a word into every other rank's memory and waits for theirs in its own.

Shapes: T tokens, S rows of a rank's shard, C channels, G scale groups of a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.interfaces import PLAIN, ActFormat, Activation, Bundle
from dovetail.core.interfaces.rows import padded, shard_rows, with_scale
from dovetail.core.ops.formats import plan_emit, scales_of_row
from dovetail.core.ops.kernels.formats import EncodeTarget, warps
from dovetail.plugins.collective.symm_mem.driver import WAIT, WRITE, Driver
from dovetail.plugins.collective.symm_mem.memory import SharedBlock, SharedMemory
from dovetail.plugins.collective.symm_mem.reduce import after_arguments
from dovetail.plugins.collective.symm_mem.sharded_kernels import sum_copies

ALIGNMENT = 256
"""Alignment of gathered tensors in bytes."""
FAR_AHEAD = 2**30
"""Distance of the epoch that ends all waits."""
REPEAT_INTERVAL = 0.01
"""Seconds between two writes of that epoch."""
HEADROOM = 1.125
"""Allocated over requested memory: the halves of a step are split near the middle, so their sizes vary."""

MOST_CACHED = 8
"""Most cached entries per buffer. A step has two sizes of boundaries, or three with an odd number of tokens."""

Shape = tuple[int, torch.dtype]
"""Columns and dtype of gathered rows."""


class CopiedRows:
    """The transport of sharded.py through copy engines, and `boundary`, which needs one kernel for most boundaries. The
    second call after a gather overwrites the gathered rows; the two halves of a step have read them by then
    (core.layers.interleave)."""

    def __init__(self, memory: SharedMemory, driver: Driver, rank: int, size: int) -> None:
        self.rank, self.size, self._driver = rank, size, driver
        self._others = [(rank + 1 + i) % size for i in range(size - 1)]
        """Beginning with the next rank, so that no two ranks copy to the same one at a time."""
        self._epochs = memory.allocate(size, 0)
        """Epoch that each rank has reached."""
        self._barrier_ops = driver.operations(barrier_operations(self._epochs.addresses, rank, self._others))
        self._epoch = 0
        self._after_reduce = False
        """Whether the last call was `reduce_rows`. A gather after a reduce, and a reduce after a gather, may overwrite
        the buffers at once: all ranks have passed the earlier use. Two equal calls in a row need a barrier first."""
        self._reduce_buffer = _ReceiveBuffer(memory)
        self._gather_buffers = _ReceiveBuffer(memory), _ReceiveBuffer(memory)
        self._stopping, self._closed = threading.Event(), threading.Event()
        self.stop_issued = threading.Event()
        """Set once the words that end the waits have been sent to the device."""

    def reduce_rows(self, x_TC: torch.Tensor) -> torch.Tensor:
        if self._after_reduce:
            self._barrier()
        self._after_reduce = True
        return self._reduce(x_TC.contiguous(), None, _SUM_ALONE)

    def gather_rows(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        flat = [part.contiguous().view(len(part), -1) for part in parts]
        layout = self._gather_layout(len(parts[0]), tuple((part.shape[1], part.dtype) for part in flat))
        for own, part in zip(layout.own, flat, strict=True):
            own.copy_(part)
        if not self._after_reduce:
            self._barrier()
        self._after_reduce = False
        self._exchange(layout)
        return [place.view(-1, *part.shape[1:]) for place, part in zip(layout.every, parts, strict=True)]

    def serves(self, emit: tuple[ActFormat, ...]) -> bool:
        """Whether `boundary` serves these formats: one kernel can write all of them."""
        return not plan_emit(emit).rest

    def boundary(
        self,
        x_TC: torch.Tensor,
        residual_SC: torch.Tensor | None,
        weight_C: torch.Tensor,
        eps: float,
        emit: tuple[ActFormat, ...],
        after: tuple[torch.Tensor, float] | None = None,
    ) -> tuple[Bundle, torch.Tensor]:
        """Implement `Collective.boundary` with an RMSNorm. Return the whole bundle and this rank's rows of the sum."""
        tokens, columns = x_TC.shape
        rows, plan, dtype = shard_rows(tokens, self.size), plan_emit(emit), x_TC.dtype
        fmt = plan.fused
        shapes = {"plain": (columns, dtype)} if plan.plain else {}
        if fmt is not None:
            shapes["values"] = columns, fmt.dtype or dtype
            if groups := scales_of_row(fmt, columns):
                shapes["scale"] = groups, torch.float32
        layout = self._gather_layout(rows, tuple(shapes.values()))
        every = dict(zip(shapes, layout.every, strict=True))
        target = EncodeTarget(fmt, columns, every.get("values"), every.get("scale"))
        if self._after_reduce:
            self._barrier()
        self._after_reduce = False
        summed_SC = self._reduce(
            padded(x_TC.contiguous(), self.size * rows),
            residual_SC,
            {
                **after_arguments(after),
                "weight_ptr": weight_C,
                "plain_ptr": every.get("plain"),
                "eps": eps,
                "NORM": True,
                **target.arguments(target.block(whole_row=True)),
            },
        )
        self._exchange(layout)
        made = {name: place[:tokens] for name, place in every.items()}
        items = [Activation(PLAIN, made["plain"])] if plan.plain else []
        if fmt is not None:
            item = Activation(fmt, made["values"], fmt.static_scale)
            items.append(with_scale(item, made["scale"]) if "scale" in made else item)
        return Bundle(tuple(items)), summed_SC

    def stop(self) -> None:
        """End all waits, now and later, as soon as the driver permits (see `Driver.overwrite`). May be called from any
        thread and repeatedly. Returns at once."""
        if not self._stopping.is_set():
            self._stopping.set()
            threading.Thread(target=self._end, name="end of copies", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _end(self) -> None:
        # Repeated, since a live rank may overwrite its word with its next epoch.
        far = (self._epoch + FAR_AHEAD + 2**31) % 2**32 - 2**31
        while True:
            self._driver.overwrite(self._epochs.words, far)
            self.stop_issued.set()
            if self._closed.wait(REPEAT_INTERVAL):
                return

    def _reduce(self, x_TC: torch.Tensor, residual_SC: torch.Tensor | None, norm: dict[str, Any]) -> torch.Tensor:
        """Return this rank's rows of the sum plus residual. `norm`: kernel arguments for the norm and the encoding."""
        rows_SC = x_TC.view(self.size, -1, x_TC.shape[-1])
        shard_bytes, buffer = rows_SC[0].nbytes, self._reduce_buffer.resized(x_TC.nbytes)
        self._driver.copy(buffer.cached(shard_bytes, self._reduce_copies), x_TC.data_ptr())
        self._barrier()
        summed_SC = torch.empty_like(rows_SC[0])
        rows, columns = summed_SC.shape
        block = max(power_of_2(columns), norm["GROUP"])
        sum_copies[(rows,)](
            buffer.memory.view(x_TC.dtype),
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

    def _reduce_copies(self, buffer: _ReceiveBuffer, shard_bytes: int) -> Any:
        """Prepare copies of each other rank's shard of x to that rank."""
        to, addresses = self.rank * shard_bytes, buffer.addresses
        return self._driver.copies([(addresses[i] + to, i * shard_bytes, shard_bytes) for i in self._others])

    def _gather_layout(self, rows: int, shapes: tuple[Shape, ...]) -> _GatherLayout:
        """Return tensors for all ranks' rows of each shape, in memory that the other ranks copy into."""
        self._gather_buffers = self._gather_buffers[::-1]
        starts, end = [], 0
        for columns, dtype in shapes:
            starts.append(end)
            end += ceil_div(self.size * rows * columns * dtype.itemsize, ALIGNMENT) * ALIGNMENT
        buffer = self._gather_buffers[0].resized(end)

        def make(buffer: _ReceiveBuffer, key: object) -> _GatherLayout:
            every = [
                buffer.memory[start:].view(dtype)[: self.size * rows * columns].view(-1, columns)
                for start, (columns, dtype) in zip(starts, shapes, strict=True)
            ]
            own = [place[self.rank * rows : (self.rank + 1) * rows] for place in every]
            first = buffer.memory.data_ptr()
            moves = [
                (buffer.addresses[other] + part.data_ptr() - first, part.data_ptr(), part.nbytes)
                for other in self._others
                for part in own
            ]
            return _GatherLayout(every, own, self._driver.copies(moves))

        return buffer.cached((rows, shapes), make)

    def _exchange(self, layout: _GatherLayout) -> None:
        """Copy this rank's rows to the same layout on every other rank."""
        self._driver.copy(layout.copies)
        self._barrier()

    def _barrier(self) -> None:
        """Enqueue a barrier: later work runs after every rank's work enqueued before its barrier."""
        self._epoch += 1
        self._driver.operate(self._barrier_ops, self._epoch)


def barrier_operations(words: Sequence[int], rank: int, others: Sequence[int]) -> list[tuple[int, int]]:
    """Driver operations of a barrier: signal the other ranks, then wait. `words`: address of every rank's epochs."""
    writes = [(WRITE, words[other] + 4 * rank) for other in others]
    return [*writes, *((WAIT, words[rank] + 4 * other) for other in others)]


_SUM_ALONE = {
    "weight_ptr": None,
    "plain_ptr": None,
    "eps": 0.0,
    "NORM": False,
    **after_arguments(None),
    **EncodeTarget(None, 0).arguments(1),
}
"""Arguments of a kernel that stores only the sum."""


@dataclass(frozen=True, slots=True)
class _GatherLayout:
    """Memory of one gather call."""

    every: list[torch.Tensor]
    """Rows of all ranks."""
    own: list[torch.Tensor]
    """Rows of this rank, views of `every`."""
    copies: Any
    """Copies of `own` to the other ranks."""


class _ReceiveBuffer:
    """Memory that the other ranks copy into. It grows in a call that needs more, on all ranks together."""

    def __init__(self, memory: SharedMemory) -> None:
        self._shared = memory
        self._block: SharedBlock | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.addresses: Sequence[int] = ()
        """Address of every rank's buffer."""
        self._cache: dict[Any, Any] = {}

    def resized(self, nbytes: int) -> _ReceiveBuffer:
        """Return the buffer, with at least `nbytes`."""
        if len(self.memory) < nbytes:
            words = ceil_div(int(nbytes * HEADROOM), ALIGNMENT) * ALIGNMENT // 4
            # Synchronizes the device. Tensors in the former block keep it alive.
            self._block = self._shared.allocate(words, 0)
            self.memory, self.addresses = self._block.words.view(torch.uint8), self._block.addresses
            self._cache.clear()
        return self

    def cached(self, key: Any, make: Callable[[_ReceiveBuffer, Any], Any]) -> Any:
        """Return make(self, key), cached while the memory stays: the boundaries of all layers of a step are alike."""
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= MOST_CACHED:
                self._cache.clear()
            found = self._cache[key] = make(self, key)
        return found
