"""Tensors that hold KV pages, and the page copies that a plan requests."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch

from dovetail.core.errors import CapabilityError, CapacityError
from dovetail.core.interfaces import KVGroup, KVPool, PageOp, PageOpKind


def make_pools(groups: Iterable[KVGroup], num_pages: Mapping[int, int], device: torch.device) -> dict[int, KVPool]:
    """Pools by group id, each with num_pages[id] usable pages and scratch page 0. They are zeroed: stale memory may
    hold NaN, which an attention mask cannot remove from a sum."""
    groups = tuple(groups)
    try:
        return {group.id: _make_pool(group, num_pages[group.id], device) for group in groups}
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError on CUDA, MemoryError on a CPU
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        needed = pool_bytes(groups, num_pages)
        raise CapacityError(
            f"the KV cache needs {needed} bytes, which could not be allocated on {device}",
            missing_bytes=needed,
            settings=(
                f"engine.kv_pages={max(1, min(num_pages.values()) // 2)}",
                "a lower engine.memory_fraction",
                "kv_dtype of fewer bytes",
            ),
        ) from error


def pool_bytes(groups: Iterable[KVGroup], num_pages: Mapping[int, int]) -> int:
    """Bytes that make_pools allocates, including scratch pages."""
    return sum(group.bytes_per_page * (num_pages[group.id] + 1) for group in groups)


HostPool = Mapping[str, torch.Tensor]
"""One group's pages in host memory by plane: [page, layer, token, ...], so that a page is contiguous."""


def make_host_pools(
    groups: Iterable[KVGroup], num_pages: Mapping[int, int], device: torch.device
) -> dict[int, HostPool]:
    """Allocate host pools; groups without pages have none. Memory is pinned for a GPU, so copies are asynchronous.
    Raise CapacityError if they exceed half of the memory that is free now."""
    groups = tuple(group for group in groups if num_pages.get(group.id))
    needed, free = pool_bytes(groups, num_pages), os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free // 2:
        raise CapacityError(
            f"the host tier of the KV cache needs {needed / 2**30:.1f} GiB and half of the free memory is "
            f"{free / 2**31:.1f} GiB",
            missing_bytes=needed - free // 2,
            settings=("a lower kv_cache.host_pages or kv_cache.host_gib", "engine.kv_dtype of fewer bytes"),
        )
    return {
        group.id: {
            plane.name: torch.zeros(
                num_pages[group.id] + 1,
                len(group.layers),
                group.page_tokens,
                *plane.shape,
                dtype=plane.dtype,
                pin_memory=device.type == "cuda",
            )
            for plane in group.planes
        }
        for group in groups
    }


def apply_page_ops(
    pools: Mapping[int, KVPool], ops: Sequence[PageOp], host: Mapping[int, HostPool] | None = None
) -> None:
    """Run the ops in order, batched where possible. They are enqueued on the device's stream before the forward."""
    host = host or {}
    for op in ops:
        if op.kind != PageOpKind.COPY and op.group not in host:
            raise CapabilityError(
                [f"a plan requests {PageOpKind(op.kind).name} of KV page {op.src}, but there is no host tier"]
            )
    for (group, kind), alike in groupby(ops, key=lambda op: (op.group, op.kind)):
        if kind == PageOpKind.COPY:
            for batch in _independent(alike):
                _copy(pools[group], batch)
        elif kind == PageOpKind.LOAD:
            _load(pools[group], host[group], list(alike))
        else:
            _store(pools[group], host[group], list(alike))


def _make_pool(group: KVGroup, pages: int, device: torch.device) -> KVPool:
    shape = len(group.layers), pages + 1, group.page_tokens
    return KVPool(group, {plane.name: _zeros((*shape, *plane.shape), plane.dtype, device) for plane in group.planes})


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy's zeros are untouched pages of the operating system, which saves seconds at start-up.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _independent(ops: Iterable[PageOp]) -> Iterator[list[PageOp]]:
    """Split the list before each op that reads or overwrites a page written earlier in the same batch."""
    batch: list[PageOp] = []
    written: set[int] = set()
    for op in ops:
        if op.src in written or op.dst in written:
            yield batch
            batch, written = [], set()
        batch.append(op)
        written.add(op.dst)
    if batch:
        yield batch


def _copy(pool: KVPool, batch: list[PageOp]) -> None:
    """Copy pages. All reads precede the writes, so a page may be read and then overwritten in one batch."""
    for plane in pool.planes.values():
        index = torch.tensor([[op.src for op in batch], [op.dst for op in batch]]).to(plane.device, non_blocking=True)
        plane[:, index[1]] = plane[:, index[0]]


def _load(pool: KVPool, host: HostPool, batch: list[PageOp]) -> None:
    for name, plane in pool.planes.items():
        for op in batch:
            plane[:, op.dst].copy_(host[name][op.src].to(plane.device, non_blocking=True))


def _store(pool: KVPool, host: HostPool, batch: list[PageOp]) -> None:
    for name, plane in pool.planes.items():
        for op in batch:
            host[name][op.dst].copy_(plane[:, op.src].contiguous(), non_blocking=True)
