"""min_tokens: end-of-sequence and stop tokens are masked until the output has this many tokens."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import LogitsContext, LogitsProcessor, Request
from dovetail.plugins.logits.ragged import NOTHING, SparseRows


class MinTokens(LogitsProcessor):
    serves = ("min_tokens",)

    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        self.stops = SparseRows(slots, device)
        self.until_S = torch.zeros(slots, dtype=torch.int64, device=device)

    def wants(self, request: Request) -> bool:
        return request.params.min_tokens > 0 and bool(request.stop_ids)

    def join(self, slot: int, request: Request) -> None:
        wanted = self.wants(request)
        self.until_S[slot] = len(request.prompt_ids) + request.params.min_tokens if wanted else 0
        self.stops.set(slot, dict.fromkeys(request.stop_ids, float("-inf")) if wanted else {})

    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        early_N1 = (ctx.lengths_N < self.until_S[ctx.slots_N])[:, None]
        values_NM = torch.where(early_N1, self.stops.values_SM[ctx.slots_N], NOTHING)
        return logits_NV.scatter_add_(1, self.stops.ids_SM[ctx.slots_N], values_NM)
