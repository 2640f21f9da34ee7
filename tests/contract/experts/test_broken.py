"""Placements with one fault each; the suite must reject each by the named test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from dovetail.core.interfaces import Activation, Dispatched, ExpertPlacement, ExpertSlots, Partial, Routing
from dovetail.core.testing.experts import ExpertsContract
from dovetail.core.testing.suite import failures

from ..faults import each, rejects, suite, variant

Layouts = tuple[tuple[int, ...], ...]


class Sound(ExpertPlacement):
    """Expert 0 has a slot on every rank; the others are dealt in turn."""

    def __init__(self) -> None:
        super().__init__(None)

    def layout(self, experts: int, rank: int, size: int) -> Sequence[int]:
        return [*range(rank, experts, size), *([0] if rank else [])]


fault = partial(variant, Sound)


class LosesOne(Sound):
    def layout(self, experts: int, rank: int, size: int) -> Sequence[int]:
        return [expert for expert in super().layout(experts, rank, size) if expert != experts - 1]


class CountsOn(Sound):
    """The layout depends on earlier calls."""

    calls = 0

    def layout(self, experts: int, rank: int, size: int) -> Sequence[int]:
        CountsOn.calls += 1
        return [(expert + CountsOn.calls) % experts for expert in range(experts)]


class MultipliesEachCopy(Sound):
    """All ranks that have an expert multiply its tokens."""

    def dispatch(self, x: Activation, routing: Routing, slots: ExpertSlots) -> Dispatched:
        slot_E = torch.full((len(slots.rank_EM),), -1)
        for slot, expert in enumerate(slots.layouts[slots.rank]):
            slot_E[expert] = slot
        here_TK = slot_E[routing.experts_TK.clamp(min=0)].masked_fill(routing.experts_TK < 0, -1)
        return Dispatched(x, Routing(here_TK.int(), routing.weights_TK))


class HasRoomForFour(Sound):
    """Drops tokens of an expert past the fourth one."""

    def dispatch(self, x: Activation, routing: Routing, slots: ExpertSlots) -> Dispatched:
        sent = super().dispatch(x, routing, slots)
        before_TK = torch.stack([(sent.routing.experts_TK == s).any(1).cumsum(0) for s in range(8)], -1)
        place_TK = before_TK.gather(1, sent.routing.experts_TK.clamp(min=0).long())
        return Dispatched(x, Routing(sent.routing.experts_TK.masked_fill(place_TK > 4, -1), sent.routing.weights_TK))


class TakesTheLastForNone(Sound):
    """-1 reads the last entry of the table of slots."""

    def dispatch(self, x: Activation, routing: Routing, slots: ExpertSlots) -> Dispatched:
        own = slots.rank_EM[:, 0] == slots.rank
        table_E = torch.where(own, slots.slot_EM[:, 0], -1)
        return Dispatched(x, Routing(table_E[routing.experts_TK], routing.weights_TK))


class KeepsRows(Sound):
    """Adds the rows of the step before."""

    def combine(self, y_RC: torch.Tensor, sent: Dispatched) -> Partial:
        kept = getattr(self, "kept", None)
        self.kept = y_RC
        return Partial(y_RC if kept is None or len(kept) < len(y_RC) else y_RC + kept[: len(y_RC)])


class Counts(Sound):
    """Looks on the host how many rows there are."""

    def dispatch(self, x: Activation, routing: Routing, slots: ExpertSlots) -> Dispatched:
        sent = super().dispatch(x, routing, slots)
        return sent if int((sent.routing.experts_TK >= 0).sum()) else sent


class SumsTwice(Sound):
    """Adds the ranks' sums itself, and leaves them to the next boundary."""

    def combine(self, y_RC: torch.Tensor, sent: Dispatched) -> Partial:
        return Partial(self.ranks.all_reduce(y_RC))


class ForgetsScales(Sound):
    """Gathers rows, and leaves their scales as they are."""

    rows = "own"

    def dispatch(self, x: Activation, routing: Routing, slots: ExpertSlots) -> Dispatched:
        values, experts, weights = self.ranks.gather_rows([x.values, routing.experts_TK, routing.weights_TK])
        return Dispatched(replace(x, values=values), slots.here(Routing(experts, weights)))

    def combine(self, y_RC: torch.Tensor, sent: Dispatched) -> torch.Tensor:
        return self.ranks.reduce_rows(y_RC)


class ReordersScales(ForgetsScales):
    """Gathers the scales, too, in order of rows, whatever that of the format is."""

    def dispatch(self, x: Activation, routing: Routing, slots: ExpertSlots) -> Dispatched:
        sent = super().dispatch(x, routing, slots)
        if x.scale is None:
            return sent
        (scale,) = self.ranks.gather_rows([x.scale])
        return replace(sent, x=replace(sent.x, scale=scale.contiguous()))


class Moves(Sound):
    """Experts dealt in turn, none twice."""

    def layout(self, experts: int, rank: int, size: int) -> Sequence[int]:
        return range(rank, experts, size)


class BalancesByCalls(Moves):
    """The balanced layouts depend on earlier calls."""

    calls = 0

    def balance(self, loads: Sequence[int], layouts: Layouts) -> Layouts:
        BalancesByCalls.calls += 1
        return tuple(layouts[(rank + BalancesByCalls.calls) % len(layouts)] for rank in range(len(layouts)))


class KeepsTables(Moves):
    """Finds experts where they were in the first step."""

    def dispatch(self, x: Activation, routing: Routing, slots: ExpertSlots) -> Dispatched:
        if not hasattr(self, "kept"):
            self.kept = replace(slots, rank_EM=slots.rank_EM.clone(), slot_EM=slots.slot_EM.clone())
        return super().dispatch(x, routing, self.kept)


BROKEN: dict[str, list[type[Sound]]] = {
    "test_every_expert_has_a_slot": [
        LosesOne,
        CountsOn,
        fault("NumbersFromOne", layout=lambda self, experts, rank, size: range(1, experts + 1)),
    ],
    "test_sums_are_those_of_one_rank": [
        MultipliesEachCopy,
        SumsTwice,
        fault("LeavesTheSum", combine=lambda self, y_RC, sent: y_RC),
    ],
    "test_nothing_is_dropped_when_all_tokens_have_the_same_experts": [HasRoomForFour],
    "test_tokens_without_experts_give_zeros": [TakesTheLastForNone],
    "test_scales_go_with_their_rows": [ForgetsScales, ReordersScales],
    "test_biases_count_once": [MultipliesEachCopy],
    "test_steps_of_other_sizes_leave_nothing_behind": [KeepsRows],
    "test_it_does_not_wait_for_the_device": [Counts],
    "test_balanced_layouts_have_every_expert": [
        BalancesByCalls,
        variant(Moves, "GivesOneToAll", balance=lambda self, loads, layouts: ((0, 1, 2, 3),) * len(layouts)),
        variant(Moves, "GivesFewer", balance=lambda self, loads, layouts: tuple(layout[1:] for layout in layouts)),
    ],
    "test_moves_change_no_sum": [
        KeepsTables,
        variant(Moves, "MovesNothing", balance=lambda self, loads, layouts: layouts),
    ],
}


def suite_of(placement: type[Sound]) -> ExpertsContract:
    return suite(ExpertsContract, make=lambda self: placement(), layouts=((2, 2),))


@each(BROKEN)
def test_the_suite_rejects(broken: type[Sound], test: str) -> None:
    assert rejects(suite_of(broken), test)


def test_the_unbroken_one_passes() -> None:
    assert failures(suite(ExpertsContract, make=lambda self: Sound())) == {}
    assert failures(suite(ExpertsContract, make=lambda self: Moves(), layouts=((4, 2),))) == {}
