"""Selection of a rank's channels from a checkpoint tensor, by the tensor's record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.errors import ConfigError, shown
from dovetail.core.interfaces.tensor_record import PLAIN_WEIGHT, Axis, TensorRecord
from dovetail.core.layers.weights import Stored

PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Channels [start, stop) of `total` along one side of a whole matrix; then, of these, those in `order`, if any."""

    total: int
    start: int
    stop: int
    order: torch.Tensor | None = None


def stored_of(prefix: str, records: Iterable[TensorRecord], outputs: int, inputs: int) -> tuple[Stored, ...]:
    """Return the checkpoint tensors of a matrix. Dummies exist only for plain weights."""
    found = {}
    for record in records:
        shape = (outputs, inputs) if record == PLAIN_WEIGHT else None
        for name in record.names:
            found[name] = Stored(f"{prefix}.{name}", shape, optional=record.optional)
    return tuple(found.values())


def shares_of(
    prefix: str,
    records: Iterable[TensorRecord],
    tensors: Mapping[str, LazyTensor],
    outputs: Wanted,
    inputs: Wanted,
) -> dict[str, torch.Tensor]:
    """Read this rank's share of each tensor that the checkpoint has, by the records' names."""
    shares = {}
    for record in records:
        lazy = [tensors.get(f"{prefix}.{name}") for name in record.names]
        if None in lazy:
            continue  # It is optional; otherwise it would have been missed before.
        (tensor, *_) = lazy
        if record.combine is not None:
            whole = {name: each[...] for name, each in zip(record.names, lazy, strict=True) if each is not None}
            tensor = _Computed(record.combine(whole, outputs.total, inputs.total))
        assert tensor is not None
        shares[record.name] = read_share(f"{prefix}.{record.name}", tensor, record, outputs, inputs)
    return shares


class _Computed:
    """LazyTensor in memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def read_share(name: str, lazy: LazyTensor, record: TensorRecord, outputs: Wanted, inputs: Wanted) -> torch.Tensor:
    """Read this rank's share of a tensor, as LinearMethod.load expects it. Raise ConfigError, with the tensor's name,
    if it does not fit its record."""
    sides = {"outputs": outputs, "inputs": inputs}
    sizes = tuple(axis.size(sides[axis.counts].total if axis.counts in sides else 0) for axis in record.axes)
    found = tuple(lazy.get_shape())
    if _squeezed(found) != _squeezed(sizes):
        counts = ", ".join(map(str, record.axes))
        raise ConfigError(
            f"{name} has shape {shown(found)} in the checkpoint; for {outputs.total} outputs and {inputs.total} inputs "
            f"it must be {sizes} ({counts})"
        )
    spans = [_span(axis, sides) for axis in record.axes]
    cuts = tuple(slice(span[0], span[1]) for span in spans)
    tensor = lazy[cuts] if found == sizes else lazy[...].reshape(sizes)[cuts]
    allowed = record.dtypes or PLAIN_DTYPES
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ConfigError(f"{name} is {str(tensor.dtype).removeprefix('torch.')} in the checkpoint; it must be {names}")
    if record.unpack is not None:
        tensor = record.unpack(tensor)
    for dim, (axis, (first, _)) in enumerate(zip(record.axes, spans, strict=True)):
        if axis.counts == "outputs":
            tensor = _rows(tensor, dim, axis, first, outputs)
        elif axis.counts == "inputs":
            tensor = _columns(tensor, dim, axis, first, inputs)
    return tensor


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Scales of whole matrices are stored as [1], [1, 1] or []."""
    return tuple(size for size in shape if size != 1) if prod(shape) else shape


def _span(axis: Axis, sides: dict[str, Wanted]) -> tuple[int, int]:
    """Range of the entries that hold the wanted channels."""
    if axis.counts not in sides:
        return 0, axis.entries
    wanted = sides[axis.counts]
    if axis.group == 0:
        return 0, axis.size(wanted.total)
    each = axis.group * axis.packed
    return wanted.start // each * axis.entries, -(-wanted.stop // each) * axis.entries


def _rows(tensor: torch.Tensor, dim: int, axis: Axis, first: int, wanted: Wanted) -> torch.Tensor:
    """Exactly the wanted outputs. Values that rows share repeat."""
    rows = torch.arange(wanted.start, wanted.stop) if wanted.order is None else wanted.start + wanted.order
    if axis.group == 0:
        return tensor.expand(*tensor.shape[:dim], len(rows), *tensor.shape[dim + 1 :])
    at = rows // axis.group - first * axis.packed
    if wanted.order is None and axis.group == 1:
        return tensor.narrow(dim, int(at[0]), len(at)) if len(at) else tensor.narrow(dim, 0, 0)
    return tensor.index_select(dim, at.to(tensor.device))


def _columns(tensor: torch.Tensor, dim: int, axis: Axis, first: int, wanted: Wanted) -> torch.Tensor:
    """Exactly the groups that have wanted inputs."""
    if axis.group == 0 or axis.entries > 1:
        return tensor
    start = wanted.start // axis.group
    return tensor.narrow(dim, start - first * axis.packed, axis.values(wanted.stop) - start)
