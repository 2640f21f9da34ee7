"""Routed experts of a planned layout: which a GPU has, how many a step reads, and what ranks exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.core.compose import Composition, Host
from dovetail.core.engine.checks import expert_conflicts
from dovetail.core.engine.lane_checks import placement_conflicts
from dovetail.core.errors import CapabilityError
from dovetail.core.expert_load import exchanged_rows, expert_load
from dovetail.core.interfaces import ExpertPlacement, Formats, ModelSpec, MoE
from dovetail.core.interfaces.placement import expert_ranks


@dataclass(frozen=True, slots=True)
class PlacedExperts:
    spec: ModelSpec
    moe: MoE
    tp: int
    ep: int
    name: str
    """The placement, as experts=name."""
    exchange: str
    slots: int
    """Experts of the fullest expert rank."""
    replicates_shared: bool
    """Whether every rank has all channels of shared experts."""
    lanes: int = 1
    move: bool = False
    """Whether experts move between ranks."""

    @property
    def redundant(self) -> int:
        """Copies of experts, over all ranks."""
        return self.slots * self.ep - self.moe.experts

    def more_bytes(self, formats: Formats) -> float:
        """Return the bytes of weights per GPU beyond an equal share: copies of experts, two more of one layer while
        experts move, and whole shared experts."""
        layers = self.spec.layers - self.moe.dense_layers
        one = 3 * self.spec.hidden * self.moe.intermediate * layers
        copies = self.redundant / (self.tp * self.lanes)
        if self.move:
            copies += 2 / layers * self.ep / (self.tp * self.lanes)
        shared = self.moe.shared * (1 - 1 / self.tp) if self.replicates_shared else 0
        return formats.expert_bytes(copies * one) + shared * one * formats.weight_bits / 8

    def facts(self, batches: tuple[int, ...], dp: int, formats: Formats) -> dict[str, Any]:
        rows = exchanged_rows(self.exchange, self.moe.active, self.tp, self.ep, self.lanes)
        layers = self.spec.layers - self.moe.dense_layers
        # Lanes share the experts of a step; replicas have a step each.
        loads = {
            str(batch): expert_load(self.moe, -(-batch * self.lanes // dp), self.ep, self.redundant)
            for batch in batches
        }
        return {
            "placement": self.name,
            "ep": self.ep,
            "per_gpu": self.slots,
            "redundant": self.redundant,
            "parts": self.tp * self.lanes // self.ep,
            "lanes": self.lanes,
            "distinct": {batch: round(load.distinct, 2) for batch, load in loads.items()},
            "exchange_bytes_per_token": round(layers * rows * self.spec.hidden * formats.dtype_bytes),
        }


def placed_experts(composition: Composition, spec: ModelSpec, host: Host) -> PlacedExperts | None:
    """Return the experts of a plan; None = the model has none. Raises CapabilityError if engine.ep does not fit."""
    if found := [*expert_conflicts(composition, spec), *placement_conflicts(composition)]:
        raise CapabilityError(found)
    moe, engine = spec.moe, composition.engine
    if moe is None:
        return None
    part = composition.part("experts")
    placement: ExpertPlacement = part.build()
    ep = expert_ranks(placement, engine.ep, composition.expert_ranks)
    return PlacedExperts(
        spec=spec,
        moe=moe,
        tp=engine.tp,
        ep=ep,
        name=part.name,
        exchange=str(part.capabilities(host).provides.get("exchange", "sum")),
        slots=max(len(placement.layout(moe.experts, rank, ep)) for rank in range(ep)),
        replicates_shared=placement.rows == "own",
        lanes=composition.lanes,
        move=placement.rebalance > 0,
    )
