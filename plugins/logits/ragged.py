"""Sparse (token id, value) pairs per slot. N rows of logits, V vocabulary, S slots, M most pairs of a slot."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dovetail.core.interfaces import LogitsContext

NOTHING = -0.0
"""Neutral element of addition: 0.0 would turn a logit of -0.0 into 0.0."""


class SparseRows:
    """Values to add to logits at ids_SM, for the first counts_S pairs of a slot. Other entries add NOTHING to token
    0."""

    def __init__(self, slots: int, most: int, device: torch.device) -> None:
        self.ids_SM = torch.zeros(slots, most, dtype=torch.int64, device=device)
        self.values_SM = torch.full((slots, most), NOTHING, device=device)
        self.counts_S = torch.zeros(slots, dtype=torch.int32, device=device)
        self.until_S = torch.zeros(slots, dtype=torch.int64, device=device)
        """Length of the history from which on nothing is added."""

    def set(self, slot: int, pairs: Mapping[int, float], until: int = 1 << 62) -> None:
        count = len(pairs)
        self.counts_S[slot], self.until_S[slot] = count, until
        self.ids_SM[slot] = 0
        self.values_SM[slot] = NOTHING
        if pairs:
            device = self.ids_SM.device
            self.ids_SM[slot, :count] = torch.tensor(list(pairs), device=device)
            self.values_SM[slot, :count] = torch.tensor(list(pairs.values()), dtype=torch.float32, device=device)

    def add(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Add the values to the rows of their slots, in place where the logits are contiguous."""
        if logits_NV.is_cuda:
            from dovetail.plugins.logits.kernels import add_pairs_triton

            logits_NV = logits_NV.contiguous()
            pairs = self.ids_SM, self.values_SM, self.counts_S, self.until_S
            add_pairs_triton(logits_NV, ctx, *pairs)
            return logits_NV
        return self.add_reference(logits_NV, ctx)

    def add_reference(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        early_N1 = (ctx.lengths_N < self.until_S[ctx.slots_N])[:, None]
        values_NM = torch.where(early_N1, self.values_SM[ctx.slots_N], NOTHING)
        return logits_NV.scatter_add_(1, self.ids_SM[ctx.slots_N], values_NM)
