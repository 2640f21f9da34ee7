"""Sparse (token id, value) pairs per slot, in tensors as wide as the longest list so far."""

from __future__ import annotations

from collections.abc import Mapping

import torch

NOTHING = -0.0
"""Neutral element of addition: 0.0 would turn a logit of -0.0 into 0.0."""


class SparseRows:
    """Values to add to logits at ids_SM. Unused entries add NOTHING to token 0."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.ids_SM = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.values_SM = torch.full((slots, 1), NOTHING, device=device)

    def set(self, slot: int, pairs: Mapping[int, float]) -> None:
        width = self.ids_SM.shape[1]
        if len(pairs) > width:
            grow = max(len(pairs), 2 * width) - width
            self.ids_SM = torch.nn.functional.pad(self.ids_SM, (0, grow))
            self.values_SM = torch.nn.functional.pad(self.values_SM, (0, grow), value=NOTHING)
        self.ids_SM[slot] = 0
        self.values_SM[slot] = NOTHING
        if pairs:
            device = self.ids_SM.device
            self.ids_SM[slot, : len(pairs)] = torch.tensor(list(pairs), device=device)
            self.values_SM[slot, : len(pairs)] = torch.tensor(list(pairs.values()), dtype=torch.float32, device=device)
