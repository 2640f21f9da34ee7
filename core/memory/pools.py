"""The tensors behind KV pages, and the copies that a plan asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

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
    except RuntimeError as error:  # torch.OutOfMemoryError on CUDA; a CPU allocation fails as a bare RuntimeError
        if "memory" not in str(error):
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


def apply_page_ops(pools: Mapping[int, KVPool], ops: Sequence[PageOp]) -> None:
    """Run the ops as if one after another. Enqueued on the device's stream, before the step's forward."""
    for op in ops:
        if op.kind != PageOpKind.COPY:
            raise CapabilityError(
                [f"a plan asks for {PageOpKind(op.kind).name} of KV page {op.src}, and there is no host tier"]
            )
    for group, of_group in groupby(ops, key=lambda op: op.group):
        for batch in _independent(of_group):
            _copy(pools[group], batch)


def _make_pool(group: KVGroup, pages: int, device: torch.device) -> KVPool:
    layers = len(group.layers)
    planes = {
        plane.name: torch.zeros(layers, pages + 1, group.page_tokens, *plane.shape, dtype=plane.dtype, device=device)
        for plane in group.planes
    }
    return KVPool(group, planes)


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
