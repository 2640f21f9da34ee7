"""The tensors behind KV pages, and the copies that a plan asks for."""

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
    """Pools by group id, with num_pages[id] usable pages and scratch page 0 each.

    Zeroed: stale memory may hold NaN, which no attention mask takes out of a sum.
    """
    groups = tuple(groups)
    try:
        return {group.id: _make_pool(group, num_pages[group.id], device) for group in groups}
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError on CUDA, MemoryError on a CPU
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        needed = pool_bytes(groups, num_pages)
        raise CapacityError(
            f"the KV cache needs {needed} bytes and {device} refused them",
            missing_bytes=needed,
            settings=(
                f"engine.kv_pages={max(1, min(num_pages.values()) // 2)}",
                "a lower engine.memory_fraction",
                "kv_dtype of fewer bytes",
            ),
        ) from error


def pool_bytes(groups: Iterable[KVGroup], num_pages: Mapping[int, int]) -> int:
    """What make_pools would allocate, scratch pages included."""
    return sum(group.bytes_per_page * (num_pages[group.id] + 1) for group in groups)


HostPool = Mapping[str, torch.Tensor]
"""One group's pages in host memory by plane: [page, layer, token, ...], so that a page is one run of bytes."""


def make_host_pools(
    groups: Iterable[KVGroup], num_pages: Mapping[int, int], device: torch.device
) -> dict[int, HostPool]:
    """Pinned where the device is a GPU, so that copies need not wait for the host. Groups without pages have no pool.

    CapacityError when they exceed half of the memory that is free now.
    """
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
    """Run the ops as if one after another. Enqueued on the device's stream, before the step's forward."""
    host = host or {}
    for op in ops:
        if op.kind != PageOpKind.COPY and op.group not in host:
            raise CapabilityError(
                [f"a plan asks for {PageOpKind(op.kind).name} of KV page {op.src}, and there is no host tier"]
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
    # NumPy's zeros are pages that nobody has touched: no seconds at start for what most runs never fill.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _independent(ops: Iterable[PageOp]) -> Iterator[list[PageOp]]:
    """Cut the list wherever an op reads or rewrites what one before it in the same batch wrote."""
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
    """All reads come before the writes, so a page may be read and then overwritten in one batch."""
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
