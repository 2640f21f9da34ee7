"""Placement contract: which rank has which routed experts, and how rows get there (expert parallelism, GShard, Lepikhin
et al. 2020).

Shapes: T tokens, R rows that a rank multiplies, K experts of a token, E experts, M copies of an expert, C channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dovetail.core.expert_balance import rebalanced
from dovetail.core.interfaces.activation import Activation, Partial
from dovetail.core.interfaces.expert import Routing

if TYPE_CHECKING:
    import torch

    from dovetail.core.interfaces.collective import Collective


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """Where the experts of a layer are: the layouts of all expert ranks as tables. An expert rank is a group of
    `parts` consecutive ranks, which have the same experts and each some channels of them."""

    layouts: tuple[tuple[int, ...], ...]
    """Global id of the expert in each slot, by expert rank."""
    rank: int
    """This rank's expert rank."""
    parts: int
    """Ranks of an expert rank."""
    rank_EM: torch.Tensor
    """int32: expert rank of each copy of an expert. Experts with fewer than M copies repeat theirs."""
    slot_EM: torch.Tensor
    """int32: slot of the copy there."""
    copies_E: torch.Tensor | None = None
    """int32: number of different copies of each expert; None = M of each. While experts move (`rebalance`), the three
    tensors keep their memory, so that CUDA graphs read the present ones."""

    def locate(self, routing: Routing, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert rank and the slot of each token's experts, both int32 [T, K], -1 where there is none. The
        tokens take the copies of an expert in turn, by their number from `first` on."""
        from dovetail.core.ops.expert_copies import locate_copies

        copies_E = self.copies_E
        if copies_E is None:
            copies_E = self.rank_EM.new_full(self.rank_EM.shape[:1], self.rank_EM.shape[1])
        return locate_copies(routing.experts_TK, self.rank_EM, self.slot_EM, copies_E, first)

    def here(self, routing: Routing) -> Routing:
        """Return the routing by slot of this rank, -1 for experts that are elsewhere."""
        ranks_TK, slots_TK = self.locate(routing)
        return Routing(slots_TK.masked_fill(ranks_TK != self.rank, -1), routing.weights_TK)


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows that this rank multiplies by its experts."""

    x: Activation
    """[R, C]"""
    routing: Routing
    """Experts by slot of this rank; -1 = elsewhere. A row without experts here gives zeros."""
    kept: Any = None
    """Anything that `combine` needs besides."""


class ExpertPlacement(ABC):
    """Built as `Class(config)` on each rank, bound once, then called for each layer with experts. `layout` is pure and
    valid before `bind`. `dispatch` and `combine` are capturable, and make the same collective calls on every rank in
    the same order; with one rank they do not wait for the device."""

    spreads: bool = True
    """False: every rank has all experts, and some channels of each; `engine.ep` is 1 then."""
    passes_shared: bool = False
    """Whether `dispatch` keeps further experts of a routing, which every token has and every rank (RoutingRule.always).
    Otherwise they are a layer of their own."""
    rows: Literal["all", "own"] = "all"
    """all: `dispatch` gets every row of the step, on each rank. own: it gets this rank's share of the rows, and
    `combine` returns that share; the boundaries around the layer scatter and gather rows (sequence parallelism)."""

    rebalance: int = 0
    """Number of steps after which the engine compares the loads of experts and moves experts between ranks (`balance`);
    0 = never. A placement with other values writes it in `__init__`, and its layouts have equally many slots on every
    rank."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.ranks: Collective
        """The ranks that share the experts: those of the model, or of all lanes (`engine.ep` > `engine.tp`). Written by
        `bind`."""
        self.size = 1
        """Number of expert ranks. Written by `bind`."""
        self.layers = 0
        """Number of layers with experts that have been built for this placement, which they count themselves."""
        self.lane_rows: int | None = None
        """Written by the engine before each step without a graph: the greatest number of own rows of any rank, to which
        `Experts` pads those that it gives to `dispatch`. None = every rank has as many."""

    def bind(self, ranks: Collective, size: int) -> None:
        """Take the ranks and the number of expert ranks (`engine.ep`), which divides theirs. The ranks may not be
        connected yet; their rank and size are valid. With lanes they are the ranks of all lanes, each lane's in
        succession; only placements of own rows are bound to these."""
        self.ranks, self.size = ranks, size

    @abstractmethod
    def layout(self, experts: int, rank: int, size: int) -> Sequence[int]:
        """Return the global id of the expert in each slot of expert rank `rank` of `size`. Every expert has a slot
        somewhere; one that has several is served by each of them in turn. Raises ConfigError for a `size` that it
        cannot serve, with those that it can."""

    def balance(self, loads: Sequence[int], layouts: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """Return the layouts of all expert ranks that a layer should have. `loads`: pairs of token and expert that the
        layer has had, by expert. `layouts`: its present ones. The result has as many slots on each rank, every expert
        somewhere, and none twice on a rank. Pure: every rank computes it from equal loads. Default: more copies of the
        experts with the most load, packed so that ranks have equal loads (dovetail.core.expert_balance)."""
        return rebalanced(loads, layouts)

    def dispatch(self, x: Activation, routing: Routing, slots: ExpertSlots) -> Dispatched:
        """Return the rows that this rank multiplies. `routing` has global ids, and as many rows as `x`. Default: all
        rows stay where they are."""
        return Dispatched(x, slots.here(routing))

    def combine(self, y_RC: torch.Tensor, sent: Dispatched) -> Partial | torch.Tensor:
        """Return the sums for the rows that `dispatch` got. `y_RC`: for each row of `sent`, the weighted sum over its
        experts here. The result is a Partial, which the next boundary sums over ranks (the default, for all rows), or
        [T, C], already summed (for own rows)."""
        return Partial(y_RC)


def expert_ranks(placement: ExpertPlacement, ep: int | None, ranks: int) -> int:
    """Return the number of expert ranks that engine.ep makes of `ranks` ranks."""
    return ep or (ranks if placement.spreads else 1)
