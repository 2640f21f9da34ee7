"""The cost seam: predicts how long a plan takes. One component for scheduler, simulator, planner and adaptive
drafting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.core.interfaces.plan import StepPlan


class CostModel(ABC):
    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def seconds(self, plan: StepPlan) -> float:
        """Predicted device time of the plan. Pure."""
