"""OpenAI's logit_bias: a number added to the logits of chosen tokens."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import LogitsContext, LogitsProcessor, Request
from dovetail.core.interfaces.records import MOST_BIASES
from dovetail.plugins.logits.ragged import SparseRows


class LogitBias(LogitsProcessor):
    serves = ("logit_bias",)
    graph_safe = True

    def allocate(self, slots: int, vocab: int, device: torch.device) -> None:
        self.bias = SparseRows(slots, MOST_BIASES, device)

    def wants(self, request: Request) -> bool:
        return bool(request.params.logit_bias)

    def join(self, slot: int, request: Request) -> None:
        self.bias.set(slot, request.params.logit_bias)

    def apply(self, logits_NV: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        return self.bias.add(logits_NV, ctx)
