"""Options of the built-in collectives."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.core.compose import Config


class NcclConfig(Config):
    """NCCL between GPUs, gloo between processes on a CPU."""

    timeout: float = Field(3600.0, gt=0)
    """Seconds that a rank waits for the others in one call. A dead one is noticed at once; this is for hanging ones."""

    shard_rows: int | None = Field(None, ge=1)
    """Rows of a step from which on each rank keeps, norms and encodes its share of them alone: sums are
    reduce-scattered, encoded rows gathered. None = every rank keeps all rows."""


class OrderedConfig(NcclConfig):
    """Sums in rank order in float32: the same bits on any transport. Slower: each rank gets every summand."""


class SymmMemConfig(NcclConfig):
    """Kernels that write into each other's memory, between GPUs of one host; NCCL for what they do not serve."""

    algorithm: Literal["measured", "one_shot", "two_shot", "nccl", "sharded", "nccl_sharded"] = "measured"
    """How sums are made: the quickest for each size, measured when the ranks connect, or one for all sizes. one_shot:
    each rank sends its summand to all. two_shot: each sums a part and sends the sum to all; also what takes over where
    one_shot has no room. sharded and nccl_sharded leave the residual with the ranks by rows, the latter by NCCL; also
    what takes over where sharded does not serve a format. They are measured unless shard_rows is null."""

    shard_rows: int | None = Field(64, ge=1)
    """Rows of a step from which on sharded and nccl_sharded are measured beside the others. None = never. An algorithm
    chosen by name serves steps of any size."""

    beside: Literal["copies", "nccl"] = "copies"
    """How measured edges are made while the products of another half of the step run beside them
    (engine.overlap_tokens). copies: by the copy engines, which hold no multiprocessor, and the residual stays with the
    ranks by rows. nccl: by its sums."""
