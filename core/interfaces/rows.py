"""Rows of a step that are split over ranks: rank r has S consecutive ones from r * S on, S = T / ranks rounded up. Rows
past token T are padding. T tokens, S rows of a share, C channels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.activation import Activation, Bundle

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RowShard:
    """A rank's share of a tensor [T, C] that is complete: no sum over ranks is missing."""

    values: torch.Tensor
    """[S, C]"""
    tokens: int
    """T"""


def shard_rows(tokens: int, ranks: int) -> int:
    """Return S."""
    return ceil_div(tokens, ranks)


def padded(x_TC: torch.Tensor, rows: int, value: float = 0) -> torch.Tensor:
    """Append rows of `value` up to `rows`."""
    if len(x_TC) == rows:
        return x_TC
    from torch.nn.functional import pad

    return pad(x_TC, (*(0, 0) * (x_TC.dim() - 1), 0, rows - len(x_TC)), value=value)


def share_of(x_TC: torch.Tensor, rank: int, ranks: int, value: float = 0) -> torch.Tensor:
    """Return one rank's rows [S, C] of a whole tensor. Padding is `value`."""
    rows = shard_rows(len(x_TC), ranks)
    return padded(x_TC[rank * rows : (rank + 1) * rows], rows, value)


def scaled_by_row(item: Activation) -> bool:
    return item.scale is not None and item.format.group != "tensor"


def with_scale(item: Activation, scale_TG: torch.Tensor) -> Activation:
    """Attach the scale in the memory layout of the format."""
    by_column = item.format.scale_layout == "column"
    return replace(item, scale=scale_TG.t().contiguous().t() if by_column else scale_TG)


def share_of_bundle(bundle: Bundle, rank: int, ranks: int) -> Bundle:
    """Return one rank's rows of a bundle of all rows, without sums."""
    items = []
    for item in bundle.items:
        mine = replace(item, values=share_of(item.values.contiguous(), rank, ranks), sums=None)
        if item.scale is not None and scaled_by_row(item):
            mine = with_scale(mine, share_of(item.scale.contiguous(), rank, ranks, value=1))
        items.append(mine)
    return Bundle(tuple(items))


def padded_activation(x: Activation, rows: int) -> Activation:
    """Append rows of zeros up to `rows`. Sums are left out."""
    more = replace(x, values=padded(x.values.contiguous(), rows), sums=None)
    if x.scale is not None and scaled_by_row(x):
        more = with_scale(more, padded(x.scale.contiguous(), rows, value=1))
    return more
