"""Experts that a checkpoint holds in one tensor for each matrix, [E, O, I], as single matrices. Newer versions of
transformers can write this layout; published checkpoints mostly have a tensor for each expert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.errors import ConfigError, TensorError, shown
from dovetail.core.interfaces.checkpoint import TensorHeader

Parts = Mapping[str, tuple[str, ...]]
"""Name of a stacked tensor below a layer's prefix -> templates of the names of a matrix's parts, which share its rows
equally: {"mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")}."""
Opener = Callable[[], Any]
Tensor = TypeVar("Tensor")
"""Opener or header of a checkpoint tensor."""


def unstacked(tensors: Iterable[tuple[str, Opener]], parts: Parts, experts: int) -> Iterator[tuple[str, Opener]]:
    """Replace each stacked tensor by the openers of its experts' matrices."""
    for name, opener in tensors:
        templates = _templates(name, parts)
        if not templates:
            yield name, opener
        for expert in range(experts if templates else 0):
            for index, template in enumerate(templates):
                yield template.format(expert), partial(_open, name, opener, expert, experts, index, len(templates))


def unstacked_headers(
    headers: Iterable[tuple[str, TensorHeader]], parts: Parts, experts: int
) -> Iterator[tuple[str, TensorHeader]]:
    """Do the same with headers. Raises ConfigError for a shape that is not that of stacked matrices."""
    for name, header in headers:
        templates = _templates(name, parts)
        if not templates:
            yield name, header
            continue
        try:
            _, rows, columns = _shape(name, tuple(header.shape), experts, len(templates))
        except TensorError as error:
            raise ConfigError(f"{shown(header.file)}: {error}") from None
        for expert in range(experts):
            for template in templates:
                yield template.format(expert), replace(header, shape=(rows // len(templates), columns))


def without(tensors: Iterable[tuple[str, Tensor]], prefixes: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """Leave out the tensors of matrices with these prefixes: those of experts on other ranks."""
    for name, tensor in tensors:
        if not prefixes or not any(name[:at] in prefixes for at, letter in enumerate(name) if letter == "."):
            yield name, tensor


def _templates(name: str, parts: Parts) -> tuple[str, ...]:
    """Return templates of whole names; () = the tensor is not stacked."""
    for suffix, templates in parts.items():
        if name.endswith(f".{suffix}"):
            return tuple(name.removesuffix(suffix) + template for template in templates)
    return ()


def _shape(name: str, shape: tuple[int, ...], experts: int, count: int) -> tuple[int, int, int]:
    if len(shape) != 3 or shape[0] != experts or shape[1] % count:
        raise TensorError(
            name, f"has shape {shown(shape)} in the checkpoint; it must have {experts} matrices of {count} equal parts"
        )
    return shape[0], shape[1], shape[2]


def _open(name: str, opener: Opener, expert: int, experts: int, index: int, count: int) -> LazyTensor:
    lazy = opener()
    _, rows, columns = _shape(name, tuple(lazy.get_shape()), experts, count)
    each = rows // count
    return _Matrix(lazy, expert, index * each, each, columns)


class _Matrix:
    """Some rows of one matrix of a stacked LazyTensor."""

    def __init__(self, lazy: LazyTensor, expert: int, first: int, rows: int, columns: int) -> None:
        self._lazy, self._expert, self._first, self._shape = lazy, expert, first, [rows, columns]

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        rows = slice(None) if rows is Ellipsis else rows
        start, stop, _ = rows.indices(self._shape[0])
        return self._lazy[self._expert, self._first + start : self._first + stop, columns]
