"""Embeddings on the host: sums the pooled states of a prompt's chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.core.interfaces import Row, RowResult, StepPlan
from dovetail.core.interfaces.plan import SAMPLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from dovetail.core.engine.tracked import Tracked


def clear_sample_flags(plan: StepPlan, tracked: Mapping[int, Tracked]) -> None:
    """Clear the SAMPLE flag of rows whose prompt is embedded."""
    for i, row in enumerate(plan.rows):
        if (one := tracked.get(row.uid)) is not None and one.seq.request.pooling is not None:
            plan.rows[i] = row._replace(flags=row.flags & ~SAMPLE)


def add_chunk(tracked: Tracked, row: Row, result: RowResult) -> NDArray[np.float32] | None:
    """Add the pooled states of a row. Return the embedding, not normalized, if the row was the prompt's last."""
    pooled_C, seq = result.pooled_C, tracked.seq
    assert pooled_C is not None
    before = tracked.embedding
    # After a preemption the prompt starts again.
    if before is not None and before[0] == result.epoch:
        pooled_C = before[1] + pooled_C
    if row.bound < seq.prompt_len:
        tracked.embedding = result.epoch, pooled_C
        return None
    return pooled_C / np.float32(seq.prompt_len) if seq.request.pooling == "mean" else pooled_C
