"""Moves of experts between ranks while steps run. Ranks send loads and weights only: each computes the same layouts
from equal loads.

A look sums the loads of experts over ranks, and copies them to the host. `depth` steps later the copy has arrived, and
the layers get their new layouts, one layer in a step: weights are copied into the memory of other slots, in order with
the device's work, then the tables by which tokens find them. CUDA graphs keep all addresses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dovetail.core.expert_balance import SPARE, Move, busiest_and_mean, moves, rank_loads
from dovetail.core.interfaces import ExpertPlacement
from dovetail.core.layers import Experts
from dovetail.core.layers.expert_slots import rebalanced_by

_ALIGNED = 16
"""Bytes to which the tensors of an expert are aligned in one message."""


@dataclass(slots=True)
class _Look:
    """Loads on their way to the host."""

    host: torch.Tensor
    arrived: torch.cuda.Event | None
    steps: int
    """Steps in which they were counted."""
    due: int
    """Step before which they are read, the same on every rank."""


class ExpertBalancer:
    def __init__(self, placement: ExpertPlacement, layers: Sequence[Experts], depth: int) -> None:
        """`layers`: those whose experts move, at least one. `depth`: steps that the host may be ahead of the device."""
        self.placement, self.layers, self.depth = placement, list(layers), depth
        self._counts = [layer.loads_E for layer in layers if layer.loads_E is not None]
        self._memory = _Memory(self.layers)
        self._steps = 0
        self._looked = 1
        """First step whose tokens are counted for the next look."""
        self._look: _Look | None = None
        self._waiting: deque[tuple[Experts, list[int]]] = deque()
        """Layers that have not been balanced since the latest look, and their loads."""
        self.moved = 0
        """Experts that got to another slot since the start."""
        self.loads: tuple[float, float] | None = None
        """Pairs of token and expert in a step and layer, on the busiest expert rank and on the mean of all, averaged
        over the layers and the steps of a look. The step that reads them takes them."""

    def before_step(self) -> None:
        """Make this rank's part of looks and moves that are due before the next step, which runs the layers. Every rank
        calls it before the same steps."""
        if not self._steps:
            torch._foreach_zero_(self._counts)  # Warm-up steps were counted too.
        self._steps += 1
        if self._look is not None and self._steps >= self._look.due:
            look, self._look = self._look, None
            self._read(look)
        if self._waiting:
            self._balance(*self._waiting.popleft())
        elif self._look is None and self._steps - self._looked >= self.placement.rebalance:
            self._begin_look()

    def take_loads(self) -> tuple[float, float] | None:
        """Return `loads` once after each look."""
        loads, self.loads = self.loads, None
        return loads

    def _begin_look(self) -> None:
        ranks, counts_N = self.placement.ranks, torch.cat(self._counts)
        if self.placement.rows == "own":
            counts_N = ranks.gather_rows([counts_N[None]])[0].sum(0)
        else:
            # Every rank has counted the same tokens. If one differed, its moves would not fit those of the others.
            counts_N = ranks.broadcast(counts_N)
        torch._foreach_zero_(self._counts)
        host = torch.empty(counts_N.shape, dtype=counts_N.dtype, pin_memory=counts_N.is_cuda)
        host.copy_(counts_N, non_blocking=True)
        arrived = None
        if counts_N.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self._look = _Look(host, arrived, self._steps - self._looked, self._steps + self.depth)
        self._looked = self._steps

    def _read(self, look: _Look) -> None:
        if look.arrived is not None:
            look.arrived.synchronize()
        counts = look.host.split([len(counts_E) for counts_E in self._counts])
        self._waiting.extend((layer, each.tolist()) for layer, each in zip(self.layers, counts, strict=True))
        greatest, mean = busiest_and_mean(rank_loads(loads, layer.slots.layouts) for layer, loads in self._waiting)
        self.loads = greatest / look.steps, mean / look.steps

    def _balance(self, layer: Experts, loads: Sequence[int]) -> None:
        old = layer.slots.layouts
        new = rebalanced_by(self.placement, loads, old)
        found = moves(old, new)
        for move in found:
            self._move(layer, move)
        if found:
            layer.place(new)
        self.moved += len(found)

    def _move(self, layer: Experts, move: Move) -> None:
        """Copy an expert. Each part of its channels moves between the ranks that have this part."""
        ranks, parts = self.placement.ranks, layer.slots.parts
        here, part = divmod(ranks.rank, parts)
        source, to = move
        if source.rank == to.rank:
            if here == to.rank:
                _copy(self._memory.values(layer, to.slot), self._memory.values(layer, source.slot))
            return
        for each in range(parts):
            message = self._memory.message(layer)
            if (here, part) == (source.rank, each):
                _copy(message.tensors, self._memory.values(layer, source.slot))
            received = ranks.broadcast(message.whole, source.rank * parts + each)
            if (here, part) == (to.rank, each):
                _copy(self._memory.values(layer, to.slot), _parts(received, layer))


@dataclass(frozen=True, slots=True)
class _Message:
    whole: torch.Tensor
    """uint8"""
    tensors: list[torch.Tensor]
    """Views of it with the types and shapes of a layer's experts."""


class _Memory:
    """Memory for two experts of any layer: one that is sent, and one that waits for its slot."""

    def __init__(self, layers: Sequence[Experts]) -> None:
        most = max(map(_size, layers))
        self._sent, self._spare = torch.empty(2, most, dtype=torch.uint8, device=layers[0].slots.rank_EM.device)

    def message(self, layer: Experts) -> _Message:
        whole = self._sent[: _size(layer)]
        return _Message(whole, _parts(whole, layer))

    def values(self, layer: Experts, slot: int) -> list[torch.Tensor]:
        return _parts(self._spare, layer) if slot == SPARE else layer.stored(slot)


def _size(layer: Experts) -> int:
    """Return the bytes of a message with one expert."""
    return sum(_aligned(tensor) for tensor in layer.stored(0))


def _aligned(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED


def _parts(whole: torch.Tensor, layer: Experts) -> list[torch.Tensor]:
    """Return views of a message with the types and shapes of a layer's experts."""
    found, start = [], 0
    for tensor in layer.stored(0):
        part = whole[start : start + tensor.numel() * tensor.element_size()]
        found.append(part.view(tensor.dtype).view(tensor.shape))
        start += _aligned(tensor)
    return found


def _copy(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    for one, other in zip(to, source, strict=True):
        one.copy_(other)
