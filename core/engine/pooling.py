"""Embeddings: what is taken of a step's hidden states, and how the parts of a prompt become one vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.core.interfaces import Row, RowResult, Sequence, StepPlan
from dovetail.core.interfaces.plan import SAMPLE

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Pooler:
    """Adds up the parts of prompts that are fed in chunks. Belongs to the engine."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, NDArray[np.float32]] | None] = {}
        """uid -> (epoch, sum so far); None = nothing yet."""

    def __bool__(self) -> bool:
        """Whether any prompt is on its way to be embedded."""
        return bool(self._parts)

    def enter(self, uid: int) -> None:
        self._parts[uid] = None

    def leave(self, uid: int) -> None:
        """Idempotent."""
        self._parts.pop(uid, None)

    def silence(self, plan: StepPlan) -> None:
        """Its rows sample nothing."""
        plan.rows[:] = [row._replace(flags=row.flags & ~SAMPLE) if row.uid in self._parts else row for row in plan.rows]

    def add(self, seq: Sequence, row: Row, result: RowResult) -> NDArray[np.float32] | None:
        """What `row` brought. The embedding, not yet of length 1, once it was the prompt's last."""
        pooled_C = result.pooled_C
        assert pooled_C is not None
        before = self._parts[seq.uid]
        # A preempted prompt begins again.
        if before is not None and before[0] == result.epoch:
            pooled_C = before[1] + pooled_C
        if row.bound < seq.prompt_len:
            self._parts[seq.uid] = result.epoch, pooled_C
            return None
        return pooled_C / np.float32(seq.prompt_len) if seq.request.pooling == "mean" else pooled_C
