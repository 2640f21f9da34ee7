"""Experts that a checkpoint holds in one tensor for each matrix, [E, O, I], as single matrices. gpt-oss is published in
this layout, and newer versions of transformers can write it; most published checkpoints have a tensor for each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.errors import ConfigError, TensorError, shown
from dovetail.core.interfaces.checkpoint import TensorHeader


@dataclass(frozen=True, slots=True)
class Stack:
    """Layout of a tensor [E, ...] with a matrix, or a bias, of every expert."""

    parts: tuple[str, ...]
    """Templates of the names of a matrix's parts, which share its rows equally, such as
    ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")."""
    alternate: bool = False
    """Whether rows of the parts alternate; otherwise all rows of a part follow those of the one before."""
    transposed: bool = False
    """Whether matrices are [inputs, outputs]."""
    sides: int = 2
    """Dimensions of a matrix in the tensor. A bias has 1. With 3 the columns are in groups [O, G, bytes of a group]."""


Stacks = Mapping[str, Stack]
"""Name of a stacked tensor below a layer's prefix -> its layout."""
Opener = Callable[[], Any]
Tensor = TypeVar("Tensor")
"""Opener or header of a checkpoint tensor."""


def unstacked(tensors: Iterable[tuple[str, Opener]], stacks: Stacks, experts: int) -> Iterator[tuple[str, Opener]]:
    """Replace each stacked tensor by the openers of its experts' matrices."""
    for name, opener in tensors:
        if (found := _find(name, stacks)) is None:
            yield name, opener
            continue
        prefix, stack = found
        for expert in range(experts):
            for index, part in enumerate(stack.parts):
                yield prefix + part.format(expert), partial(_open, name, opener, stack, expert, experts, index)


def unstacked_headers(
    headers: Iterable[tuple[str, TensorHeader]], stacks: Stacks, experts: int
) -> Iterator[tuple[str, TensorHeader]]:
    """Do the same with headers. Raises ConfigError for a shape that is not that of stacked matrices, and for a matrix
    that is also a tensor of its own."""
    given = dict(headers)
    for name, header in given.items():
        if (found := _find(name, stacks)) is None:
            yield name, header
            continue
        prefix, stack = found
        try:
            shape = _part_shape(name, tuple(header.shape), stack, experts)
        except TensorError as error:
            raise ConfigError(f"{shown(header.file)}: {error}") from None
        for expert in range(experts):
            for part in stack.parts:
                single = prefix + part.format(expert)
                if single in given:
                    raise ConfigError(
                        f"{shown(header.file)}: tensor {shown(name)} has the matrix of {shown(single)}, which is a "
                        "tensor of its own in the checkpoint, too. Remove one of them"
                    )
                yield single, replace(header, shape=shape)


def without(tensors: Iterable[tuple[str, Tensor]], prefixes: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """Leave out the tensors of matrices with these prefixes: those of experts on other ranks."""
    for name, tensor in tensors:
        if not prefixes or not any(name[:at] in prefixes for at, letter in enumerate(name) if letter == "."):
            yield name, tensor


def _find(name: str, stacks: Stacks) -> tuple[str, Stack] | None:
    """Return (prefix of the parts' names, layout); None = the tensor is not stacked."""
    for suffix, stack in stacks.items():
        if name.endswith(f".{suffix}"):
            return name.removesuffix(suffix), stack
    return None


def _part_shape(name: str, shape: tuple[int, ...], stack: Stack, experts: int) -> tuple[int, ...]:
    """Return the shape of one part of an expert's matrix, with groups of columns joined."""
    count = len(stack.parts)
    if len(shape) == stack.sides + 1 and shape[0] == experts:
        rows, *columns = shape[:0:-1] if stack.transposed else shape[1:]
        if rows % count == 0:
            return rows // count, *((columns[0] * columns[1],) if stack.sides == 3 else columns)
    what = {1: "biases", 2: "matrices", 3: "matrices with groups of columns"}[stack.sides]
    raise TensorError(
        name, f"has shape {shown(shape)} in the checkpoint; it must have {experts} {what} of {count} equal parts"
    )


def _open(name: str, opener: Opener, stack: Stack, expert: int, experts: int, index: int) -> LazyTensor:
    lazy = opener()
    return _Part(lazy, stack, expert, index, _part_shape(name, tuple(lazy.get_shape()), stack, experts))


class _Part:
    """Some rows of the matrix or bias of one expert in a stacked LazyTensor."""

    def __init__(self, lazy: LazyTensor, stack: Stack, expert: int, index: int, shape: tuple[int, ...]) -> None:
        self._lazy, self._stack, self._expert, self._index, self._shape = lazy, stack, expert, index, shape

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = index if isinstance(index, tuple) and len(index) == 2 else (index, slice(None))
        rows = rows[0] if isinstance(rows, tuple) else rows
        rows = slice(None) if rows is Ellipsis else rows
        start, stop, _ = rows.indices(self._shape[0])
        if self._stack.alternate:
            # Files are read by ranges, so the other part's rows come along.
            count = len(self._stack.parts)
            found = self._read(slice(start * count, stop * count), columns)
            return found[self._index :: count]
        first = self._index * self._shape[0]
        return self._read(slice(first + start, first + stop), columns)

    def _read(self, rows: slice, columns: slice) -> torch.Tensor:
        """Read rows of the whole matrix."""
        if self._stack.sides == 1:
            return self._lazy[self._expert, rows]
        if self._stack.sides == 3:
            return self._lazy[self._expert, rows].flatten(1)[:, columns]
        if self._stack.transposed:
            return self._lazy[self._expert, columns, rows].t()
        return self._lazy[self._expert, rows, columns]
