"""Placements that leave all rows on every rank: the sum over ranks at the next boundary adds the experts' outputs."""

from __future__ import annotations

from dovetail.core.interfaces import Activation, Dispatched, ExpertPlacement, ExpertSlots, Routing
from dovetail.plugins.experts.layout import Consecutive


class TensorPlacement(ExpertPlacement):
    """Some channels of every expert on each rank (Megatron-LM, Shoeybi et al. 2019)."""

    spreads = False
    passes_shared = True

    def layout(self, experts: int, rank: int, size: int) -> range:
        return range(experts)

    def dispatch(self, x: Activation, routing: Routing, slots: ExpertSlots) -> Dispatched:
        return Dispatched(x, routing)


class WholePlacement(Consecutive):
    """Consecutive experts on each rank; rows without an expert there add zeros."""
