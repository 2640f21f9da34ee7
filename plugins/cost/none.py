"""No cost model."""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.core.interfaces import CostModel, RowWork


class NoEstimate(CostModel):
    """Predicts nothing; components that could use an estimate work without one."""

    predicts = False

    def step_seconds(self, rows: Iterable[RowWork]) -> float:
        raise NotImplementedError("cost=none predicts nothing; choose cost=h200 or another")
