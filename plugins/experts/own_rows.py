"""Placements in which each rank gives its own rows (sequence parallelism, Korthikanti et al. 2022) to the layer, and
gets their sums back: the boundaries around it neither sum nor gather whole steps.

Shapes: S rows of a rank's share, R rows that a rank multiplies, K experts of a token, G expert ranks, N rows that one
round sends to a rank, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from dovetail.core.interfaces import Activation, Dispatched, ExpertSlots, Routing
from dovetail.core.interfaces.rows import scaled_by_row, with_scale
from dovetail.plugins.experts.config import AllToAllConfig
from dovetail.plugins.experts.layout import Consecutive


class GatherPlacement(Consecutive):
    """Every rank gathers all rows and multiplies those with an expert there; sums are reduce-scattered."""

    rows = "own"

    def dispatch(self, x: Activation, routing: Routing, slots: ExpertSlots) -> Dispatched:
        parts = self.ranks.gather_rows([*_tensors(x), _packed(routing)])
        return Dispatched(_with_tensors(x, parts[:-1]), slots.here(_unpacked(parts[-1])))

    def combine(self, y_RC: torch.Tensor, sent: Dispatched) -> torch.Tensor:
        return self.ranks.reduce_rows(y_RC)


@dataclass(frozen=True, slots=True)
class _Sent:
    """Where this rank's rows went."""

    rounds: tuple[int, ...]
    """N of each round."""
    goes_SG: torch.Tensor
    """bool: whether a row went to an expert rank."""
    place_SG: torch.Tensor
    """Place of the row among those that went there."""


class AllToAllPlacement(Consecutive):
    """Rows go to the ranks that have their experts, once each. The first round has room for somewhat more rows than
    uniform routing sends to a rank, the second one for all others: no row is dropped, and all shapes are static. Large
    steps without a graph leave out the second round if no rank needs it, which the host reads from the device.
    """

    rows = "own"
    config: AllToAllConfig

    def dispatch(self, x: Activation, routing: Routing, slots: ExpertSlots) -> Dispatched:
        rows, active = routing.experts_TK.shape
        groups = len(slots.layouts)
        ranks_SK, slots_SK = slots.locate(routing, first=self.ranks.rank * rows)
        here_SKG = ranks_SK[:, :, None] == torch.arange(groups, device=ranks_SK.device)
        goes_SG = here_SKG.any(1)
        place_SG = goes_SG.cumsum(0) - 1
        first = self._room(rows, active, groups)
        rounds = (first, rows - first) if first < rows and self._overflows(goes_SG, first) else (first,)
        # The row at each place, by expert rank; `rows` where there is none.
        places_SG = torch.where(goes_SG, place_SG, rows)
        rows_S1 = torch.arange(rows, device=goes_SG.device)[:, None].expand_as(places_SG)
        row_SG = torch.full((rows + 1, groups), rows, device=goes_SG.device).scatter(0, places_SG, rows_S1)
        # Padding has a row of its own at the end, without experts.
        slot_SKG = torch.where(here_SKG, slots_SK[:, :, None], -1)
        slot_SKG = torch.cat((slot_SKG, slot_SKG.new_full((1, active, groups), -1)))
        weights_SK = torch.cat((routing.weights_TK, routing.weights_TK.new_zeros(1, active)))
        received = []
        for start, room in zip((0, first), rounds, strict=False):
            row_GN = row_SG[start : start + room].T
            slot_GNK = slot_SKG.permute(2, 0, 1).gather(1, row_GN[:, :, None].expand(-1, -1, active))
            given = [tensor[row_GN.clamp(max=rows - 1)] for tensor in _tensors(x)]
            packed = _packed(Routing(slot_GNK, weights_SK[row_GN]))
            parts = [self._to_parts(part, slots.parts) for part in (*given, packed)]
            received.append(self.ranks.all_to_all(parts))
        *tensors, packed = (torch.cat(each) if len(rounds) > 1 else each[0] for each in zip(*received, strict=True))
        return Dispatched(_with_tensors(x, tensors), _unpacked(packed), _Sent(rounds, goes_SG, place_SG))

    def combine(self, y_RC: torch.Tensor, sent: Dispatched) -> torch.Tensor:
        kept: _Sent = sent.kept
        ranks, channels = self.ranks.size, y_RC.shape[1]
        groups = kept.goes_SG.shape[1]
        back = []
        for y_NC in y_RC.split([ranks * room for room in kept.rounds]):
            (own_NC,) = self.ranks.all_to_all([y_NC.contiguous()])
            back.append(own_NC.view(groups, ranks // groups, -1, channels).float().sum(1))
        sums_GNC = torch.cat(back, dim=1)
        at_SG = kept.place_SG.clamp(0, sums_GNC.shape[1] - 1)
        each_SGC = sums_GNC[torch.arange(groups, device=at_SG.device), at_SG]
        return torch.where(kept.goes_SG[:, :, None], each_SGC, 0.0).sum(1).to(y_RC.dtype)

    def _room(self, rows: int, active: int, groups: int) -> int:
        """Return N of the first round."""
        if groups == 1:
            return rows
        expected = rows * (1 - (1 - 1 / groups) ** active)
        return max(1, min(rows, math.ceil(self.config.capacity * expected)))

    def _overflows(self, goes_SG: torch.Tensor, room: int) -> bool:
        """Whether the second round runs: a rank sends more than `room` rows to another, or the host does not look.
        Equal on all ranks."""
        if len(goes_SG) * self.ranks.size < self.config.check_rows:
            return True
        if goes_SG.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        return bool(self.ranks.all_reduce((goes_SG.sum(0) > room).any().int()[None]).item())

    @staticmethod
    def _to_parts(x: torch.Tensor, parts: int) -> torch.Tensor:
        """Repeat the rows [G, N, ...] for each rank of an expert rank, and join the first two dimensions."""
        return (x.repeat_interleave(parts, 0) if parts > 1 else x).flatten(0, 1)


def _tensors(x: Activation) -> list[torch.Tensor]:
    """Return the tensors that have a row for each row of the step."""
    return [x.values, x.scale] if x.scale is not None and scaled_by_row(x) else [x.values]


def _with_tensors(x: Activation, tensors: Sequence[torch.Tensor]) -> Activation:
    moved = replace(x, values=tensors[0], sums=None)
    return with_scale(moved, tensors[1]) if len(tensors) > 1 else moved


def _packed(routing: Routing) -> torch.Tensor:
    """Return experts and weights as one int32 tensor [..., 2K]."""
    return torch.cat((routing.experts_TK.int(), routing.weights_TK.contiguous().view(torch.int32)), -1)


def _unpacked(packed: torch.Tensor) -> Routing:
    experts, weights = packed.chunk(2, dim=-1)
    return Routing(experts.contiguous(), weights.contiguous().view(torch.float32))
