"""Tables of a placement's layouts: which rank has which experts of a layer. E experts, M copies of an expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ExpertPlacement, ExpertSlots


def layouts_of(placement: ExpertPlacement, experts: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the layouts of all expert ranks. Raise ConfigError for one that leaves out an expert, or has others."""
    layouts = tuple(tuple(placement.layout(experts, rank, size)) for rank in range(size))
    name = f"{type(placement).__name__}.layout({experts}, rank, {size})"
    check_experts(layouts, experts, name)
    if not placement.spreads and any(sorted(layout) != list(range(experts)) for layout in layouts):
        raise ConfigError(f"{name}: every rank must have all {experts} experts once, since it does not spread them")
    return layouts


def rebalanced_by(
    placement: ExpertPlacement, loads: Sequence[int], layouts: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Return the layouts to which the placement changes `layouts`. Raise ConfigError for those that cannot be."""
    found = tuple(map(tuple, placement.balance(loads, layouts)))
    name = f"{type(placement).__name__}.balance"
    sizes = [[len(layout) for layout in each] for each in (layouts, found)]
    if sizes[0] != sizes[1]:
        raise ConfigError(f"{name}: the ranks have {sizes[0]} slots, and it returned {sizes[1]} experts")
    check_experts(found, len(loads), name)
    if twice := [rank for rank, layout in enumerate(found) if len(set(layout)) < len(layout)]:
        raise ConfigError(f"{name}: rank {twice[0]} has an expert twice: {found[twice[0]]}")
    return found


def check_experts(layouts: tuple[tuple[int, ...], ...], experts: int, name: str) -> None:
    """Raise ConfigError for layouts that leave out an expert, or have others. `name`: the call that returned them."""
    for rank, layout in enumerate(layouts):
        strange = [expert for expert in layout if not 0 <= expert < experts]
        if strange or not layout:
            what = f"expert {strange[0]}, and there are {experts}" if strange else "no expert"
            raise ConfigError(f"{name}: rank {rank} has {what}")
    missing = sorted(set(range(experts)).difference(*layouts))
    if missing:
        raise ConfigError(f"{name}: no rank has expert {', '.join(map(str, missing[:5]))} of {experts}")


def slots_of(
    layouts: Sequence[tuple[int, ...]], experts: int, rank: int, parts: int, device: torch.device, most: int = 1
) -> ExpertSlots:
    """Return the tables for one rank of `parts` * len(layouts). `most`: copies of an expert for which they have room;
    more if an expert has more."""
    owners, places, copies = (table.to(device) for table in _tables(layouts, experts, most))
    return ExpertSlots(tuple(layouts), rank // parts, parts, owners, places, copies)


def moved(slots: ExpertSlots, layouts: tuple[tuple[int, ...], ...]) -> ExpertSlots:
    """Write the tables of other layouts into the memory of `slots`, in order with the device's work. The layouts have
    as many slots on each rank."""
    experts, most = slots.rank_EM.shape
    tables = _tables(layouts, experts, most)
    for there, table in zip((slots.rank_EM, slots.slot_EM, slots.copies_E), tables, strict=True):
        assert there is not None and there.shape == table.shape, "layouts have more copies than there is room for"
        there.copy_(table.pin_memory() if there.is_cuda else table, non_blocking=True)
    return replace(slots, layouts=layouts)


def _tables(
    layouts: Sequence[tuple[int, ...]], experts: int, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rank and slot of each copy of the experts, both int32 [E, M], and the number of copies, int32 [E]."""
    copies: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for owner, layout in enumerate(layouts):
        for slot, expert in enumerate(layout):
            copies[expert].append((owner, slot))
    most = max(most, *map(len, copies))
    table = torch.tensor([[found[copy % len(found)] for copy in range(most)] for found in copies], dtype=torch.int32)
    counts = torch.tensor([len(found) for found in copies], dtype=torch.int32)
    return table[..., 0].contiguous(), table[..., 1].contiguous(), counts
