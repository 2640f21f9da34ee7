"""A few (token id, value) pairs per slot, as tensors wide enough for the longest list so far."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class SparseRows:
    """Adds values_SM at ids_SM to logits; unused places add 0 to token 0, which changes nothing."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.ids_SM = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.values_SM = torch.zeros(slots, 1, device=device)

    def set(self, slot: int, pairs: Mapping[int, float]) -> None:
        width = self.ids_SM.shape[1]
        if len(pairs) > width:
            grow = max(len(pairs), 2 * width) - width
            self.ids_SM = torch.nn.functional.pad(self.ids_SM, (0, grow))
            self.values_SM = torch.nn.functional.pad(self.values_SM, (0, grow))
        self.ids_SM[slot] = 0
        self.values_SM[slot] = 0
        if pairs:
            device = self.ids_SM.device
            self.ids_SM[slot, : len(pairs)] = torch.tensor(list(pairs), device=device)
            self.values_SM[slot, : len(pairs)] = torch.tensor(list(pairs.values()), dtype=torch.float32, device=device)
