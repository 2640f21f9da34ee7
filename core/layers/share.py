"""Selection of a rank's channels from a checkpoint tensor, by the tensor's record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.errors import TensorError, shown
from dovetail.core.interfaces import BuildContext
from dovetail.core.interfaces.checkpoint import TensorHeader
from dovetail.core.interfaces.tensor_record import PLAIN_WEIGHT, Axis, TensorRecord
from dovetail.core.layers.weights import PLAIN_DTYPES, Stored, check_dtype, header_dtype


@dataclass(frozen=True, slots=True)
class Wanted:
    """Channels [start, stop) of `total` along one side of a whole matrix; then, of these, those in `order`, if any."""

    total: int
    start: int
    stop: int
    order: torch.Tensor | None = None


def fewer_ranks(build: BuildContext) -> dict[int, int]:
    """Return ModelSpec.shares() for fewer ranks than now. Their parts are larger, which helps formats that need sides
    with a divisor."""
    return {ranks: divisor for ranks, divisor in build.spec.shares().items() if ranks < build.collective.size}


def stored_of(prefix: str, records: Iterable[TensorRecord], outputs: int, inputs: int) -> tuple[Stored, ...]:
    """Return the checkpoint tensors of a matrix. Dummies exist only for plain weights."""
    found = {}
    for record in records:
        shape = (outputs, inputs) if record == PLAIN_WEIGHT else None
        for name in record.names:
            found[name] = Stored(f"{prefix}.{name}", shape, optional=record.optional)
    return tuple(found.values())


@contextmanager
def below(prefix: str) -> Iterator[None]:
    """Add the prefix of a matrix to names in errors."""
    try:
        yield
    except TensorError as error:
        raise TensorError(f"{prefix}.{error.name}", error.reason) from None


def check_records(
    records: Iterable[TensorRecord], prefix: str, headers: Mapping[str, TensorHeader], outputs: int, inputs: int
) -> None:
    """Raise TensorError if headers of a matrix do not fit their records. Optional tensors may be missing."""
    with below(prefix):
        for record in records:
            found = [headers.get(f"{prefix}.{name}") for name in record.names]
            headers_of = {name: each for name, each in zip(record.names, found, strict=True) if each is not None}
            if len(headers_of) < len(found):
                continue
            dtypes = {name: header_dtype(name, header) for name, header in headers_of.items()}
            if record.sources:
                if record.check is not None:
                    metas = {
                        name: torch.empty(header.shape, dtype=dtypes[name], device="meta")
                        for name, header in headers_of.items()
                    }
                    record.check(metas, outputs, inputs)
            else:
                _check_sizes(record.name, headers_of[record.name].shape, record, outputs, inputs)
                check_dtype(record.name, dtypes[record.name], record.dtypes or PLAIN_DTYPES)


def shares_of(
    prefix: str,
    records: Iterable[TensorRecord],
    tensors: Mapping[str, LazyTensor],
    outputs: Wanted,
    inputs: Wanted,
) -> dict[str, torch.Tensor]:
    """Read this rank's share of each tensor that the checkpoint has, by the records' names. Raises TensorError, with
    the name below the prefix."""
    shares = {}
    for record in records:
        lazy = [tensors.get(f"{prefix}.{name}") for name in record.names]
        if None in lazy:
            continue  # It is optional; otherwise it would have been missed before.
        (tensor, *_) = lazy
        if record.combine is not None:
            whole = {name: each[...] for name, each in zip(record.names, lazy, strict=True) if each is not None}
            if record.check is not None:
                record.check(whole, outputs.total, inputs.total)
            tensor = _Computed(record.combine(whole, outputs.total, inputs.total))
        assert tensor is not None
        shares[record.name] = read_share(record.name, tensor, record, outputs, inputs)
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
    """Read this rank's share of a tensor, as LinearMethod.load expects it. Raise TensorError if it does not fit its
    record."""
    sides = {"outputs": outputs, "inputs": inputs}
    found = tuple(lazy.get_shape())
    sizes = _check_sizes(name, found, record, outputs.total, inputs.total)
    spans = [_span(axis, sides) for axis in record.axes]
    cuts = tuple(slice(span[0], span[1]) for span in spans)
    tensor = lazy[cuts] if found == sizes else lazy[...].reshape(sizes)[cuts]
    check_dtype(name, tensor.dtype, record.dtypes or PLAIN_DTYPES)
    if record.unpack is not None:
        tensor = record.unpack(tensor)
    for dim, (axis, (first, _)) in enumerate(zip(record.axes, spans, strict=True)):
        if axis.counts == "outputs":
            tensor = _rows(tensor, dim, axis, first, outputs)
        elif axis.counts == "inputs":
            tensor = _columns(tensor, dim, axis, first, inputs)
    return tensor


def _check_sizes(name: str, found: tuple[int, ...], record: TensorRecord, outputs: int, inputs: int) -> tuple[int, ...]:
    """Return the shape that a tensor must have, but for axes of size 1."""
    totals = {"outputs": outputs, "inputs": inputs, "nothing": 0}
    sizes = tuple(axis.size(totals[axis.counts]) for axis in record.axes)
    if _squeezed(found) != _squeezed(sizes):
        counts = ", ".join(map(str, record.axes))
        raise TensorError(
            name,
            f"has shape {shown(found)} in the checkpoint; for {outputs} outputs and {inputs} inputs it must be "
            f"{sizes} ({counts})",
        )
    return sizes


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
