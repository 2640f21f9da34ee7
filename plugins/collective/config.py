"""Options of the built-in collectives."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.core.compose import Config


class NcclConfig(Config):
    """NCCL between GPUs, gloo between processes on a CPU."""

    timeout: float = Field(3600.0, gt=0)
    """Seconds a rank waits for the others in one call. It limits ranks that hang; a dead rank is detected at once."""

    shard_rows: int | None = Field(None, ge=1)
    """Minimum number of rows of a step for sequence parallelism: each rank keeps, normalizes and encodes only its shard
    of the rows; sums are reduce-scattered and encoded rows are all-gathered. None = every rank keeps all rows."""


class OrderedConfig(NcclConfig):
    """Sums in rank order in float32: the same bits on any transport. Slower, since each rank receives all summands."""


class SymmMemConfig(NcclConfig):
    """Kernels that write into the other ranks' memory, between GPUs of one host. NCCL serves everything else."""

    algorithm: Literal["measured", "one_shot", "two_shot", "nccl", "sharded", "nccl_sharded"] = "measured"
    """Algorithm of sums. measured: the fastest for each message size, timed when the ranks connect. The others serve
    all sizes. one_shot: each rank sends its summand to all ranks. two_shot: each rank sums a part and sends the sum to
    all ranks; also the fallback for messages too large for one_shot. sharded and nccl_sharded keep the residual sharded
    by rows; nccl_sharded uses NCCL and is the fallback for formats that sharded does not serve. They are measured
    unless shard_rows is null."""

    shard_rows: int | None = Field(64, ge=1)
    """Minimum number of rows of a step for which sharded and nccl_sharded are candidates. None = never. An algorithm
    selected by name serves steps of any size."""

    beside: Literal["copies", "nccl"] = "copies"
    """Transport of measured boundaries while they overlap with matmuls of the other half of the step
    (engine.overlap_tokens). copies: the copy engines, which occupy no SM; the residual stays sharded by rows.
    nccl: NCCL's sums."""
