"""Boundaries with a residual sharded by rows: each rank sums, normalizes and encodes its shard, then all ranks gather
the input of the next matmul (sequence parallelism, Korthikanti et al. 2022). Compared with an all-reduce, each rank
normalizes 1/size of the rows, and the gathered rows are encoded: half the bytes in FP8.

Shapes: T tokens, S rows of a rank's shard (rows past token T are padding), C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from dovetail.core.interfaces import PLAIN, ActFormat, Bundle, Partial, Residual
from dovetail.core.interfaces.rows import (
    RowShard,
    padded,
    scaled_by_row,
    shard_rows,
    share_of,
    share_of_bundle,
    with_scale,
)
from dovetail.core.ops.formats import encode

if TYPE_CHECKING:
    from dovetail.core.interfaces.collective import Norm


class Ranks(Protocol):
    """Transport of a sharded boundary."""

    rank: int
    size: int

    def reduce_rows(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the sum over ranks. T is a multiple of `size`."""

    def gather_rows(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return for each part the rows of all ranks, concatenated in rank order."""


def sharded_boundary(
    ranks: Ranks,
    x: torch.Tensor | Partial | RowShard,
    residual: Residual | None,
    norm: Norm,
    emit: tuple[ActFormat, ...],
    after: Norm | None = None,
    own: bool = False,
) -> tuple[Bundle, RowShard]:
    """Implement Collective.boundary; `own`: Collective.own_boundary. Types and shapes alone decide the path, so all
    ranks make the same calls."""
    if isinstance(x, Partial):
        tokens, x_SC = len(x.values), _summed_rows(ranks, x.values)
    else:
        tokens, x_SC = x.tokens if isinstance(x, RowShard) else len(x), own_rows(ranks, x)
    residual_SC = None if residual is None else own_rows(ranks, residual)
    by_row = tuple(fmt for fmt in emit if _by_row(fmt))
    rest = tuple(fmt for fmt in emit if not _by_row(fmt))
    if after is not None:
        norm = partial(norm, after=after)
    bundle, summed_SC = norm(x_SC, residual_SC, by_row if not rest or PLAIN in by_row else (*by_row, PLAIN))
    if own and not rest:
        return Bundle(tuple(bundle[fmt] for fmt in emit)), RowShard(summed_SC, tokens)
    gathered = _gathered(ranks, bundle, tokens)
    encoded = encode(gathered[PLAIN].values, rest) if rest else Bundle(())
    made = Bundle((*gathered.items, *encoded.items))
    made = Bundle(tuple(made[fmt] for fmt in emit))
    return share_of_bundle(made, ranks.rank, ranks.size) if own else made, RowShard(summed_SC, tokens)


def whole(ranks: Ranks, shard: RowShard) -> torch.Tensor:
    """Return every row, on every rank."""
    return ranks.gather_rows([shard.values])[0][: shard.tokens]


def own_rows(ranks: Ranks, x: torch.Tensor | RowShard) -> torch.Tensor:
    """Return this rank's shard of `x`, which is replicated or already sharded."""
    if isinstance(x, RowShard):
        return x.values
    return share_of(x, ranks.rank, ranks.size)


def _summed_rows(ranks: Ranks, x_TC: torch.Tensor) -> torch.Tensor:
    return ranks.reduce_rows(padded(x_TC, ranks.size * shard_rows(len(x_TC), ranks.size)))


def _gathered(ranks: Ranks, bundle: Bundle, tokens: int) -> Bundle:
    """Gather a bundle of this rank's rows into one of all rows, without sums."""
    mine = [item.values for item in bundle.items]
    mine += [item.scale for item in bundle.items if scaled_by_row(item)]
    found = iter([x[:tokens] for x in ranks.gather_rows(mine)])
    items = [replace(item, values=next(found), sums=None) for item in bundle.items]
    return Bundle(tuple(with_scale(item, next(found)) if scaled_by_row(item) else item for item in items))


def _by_row(fmt: ActFormat) -> bool:
    """Whether a row's encoding depends on that row alone."""
    return fmt.group != "tensor" or fmt.static_scale is not None
