"""Tables of a placement's layouts: which rank has which experts of a layer. E experts, M copies of an expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import ExpertPlacement, ExpertSlots


def layouts_of(placement: ExpertPlacement, experts: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the layouts of all expert ranks. Raise ConfigError for one that leaves out an expert, or has others."""
    layouts = tuple(tuple(placement.layout(experts, rank, size)) for rank in range(size))
    name = f"{type(placement).__name__}.layout({experts}, rank, {size})"
    for rank, layout in enumerate(layouts):
        strange = [expert for expert in layout if not 0 <= expert < experts]
        if strange or not layout:
            what = f"expert {strange[0]}, and there are {experts}" if strange else "no expert"
            raise ConfigError(f"{name}: rank {rank} has {what}")
    missing = sorted(set(range(experts)).difference(*layouts))
    if missing:
        raise ConfigError(f"{name}: no rank has expert {', '.join(map(str, missing[:5]))} of {experts}")
    if not placement.spreads and any(sorted(layout) != list(range(experts)) for layout in layouts):
        raise ConfigError(f"{name}: every rank must have all {experts} experts once, since it does not spread them")
    return layouts


def slots_of(
    layouts: Sequence[tuple[int, ...]], experts: int, rank: int, parts: int, device: torch.device
) -> ExpertSlots:
    """Return the tables for one rank of `parts` * len(layouts)."""
    copies: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for owner, layout in enumerate(layouts):
        for slot, expert in enumerate(layout):
            copies[expert].append((owner, slot))
    most = max(map(len, copies))
    table = torch.tensor([[found[copy % len(found)] for copy in range(most)] for found in copies], dtype=torch.int32)
    owners, places = (table[..., side].contiguous().to(device) for side in range(2))
    return ExpertSlots(tuple(layouts), rank // parts, parts, owners, places)
