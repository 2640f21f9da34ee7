"""Sums whose bits depend only on the summands and their rank order."""

from __future__ import annotations

import torch

from dovetail.plugins.collective.nccl import NcclCollective
from dovetail.plugins.collective.sharded import own_rows


class OrderedCollective(NcclCollective):
    """Gathers every rank's summand and adds them in rank order, in float32 (float64 stays float64)."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return x
        parts = self._stacked(x)
        wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part.to(wide)
        return total.to(x.dtype)

    def reduce_rows(self, x_TC: torch.Tensor) -> torch.Tensor:
        return own_rows(self, self.all_reduce(x_TC))
