"""OpenAI's logit_bias: a number added to the logits of chosen tokens."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import LogitsContext, LogitsProcessor, Request
from dovetail.plugins.logits.ragged import SparseRows


class LogitBias(LogitsProcessor):
    serves = ("logit_bias",)

    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        self.bias = SparseRows(slots, device)

    def wants(self, request: Request) -> bool:
        return bool(request.params.logit_bias)

    def join(self, slot: int, request: Request) -> None:
        self.bias.set(slot, request.params.logit_bias)

    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        return logits_NV.scatter_add_(1, self.bias.ids_SM[ctx.slots_N], self.bias.values_SM[ctx.slots_N])
