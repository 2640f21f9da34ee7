"""Greedy choice of the first tokens. Shapes: N sampled positions, V vocabulary, S slots."""

import torch
from dovetail.core.interfaces import LogitsProcessor

from dovetail_mine.config import MineConfig


class Mine(LogitsProcessor):
    config: MineConfig

    def allocate(self, slots, vocab, device):
        self.on_S = torch.zeros(slots, dtype=torch.bool, device=device)

    def wants(self, request):
        return request.params.temperature > 0

    def join(self, slot, request):
        self.on_S[slot] = self.wants(request)

    def apply(self, logits_NV, ctx):
        output_N = ctx.lengths_N - ctx.prompt_len_S[ctx.slots_N]
        early_N = self.on_S[ctx.slots_N] & (output_N < self.config.tokens)
        best_N1 = logits_NV.argmax(-1, keepdim=True)
        others_NV = torch.ones_like(logits_NV, dtype=torch.bool).scatter_(1, best_N1, False)
        return logits_NV.masked_fill(early_N[:, None] & others_NV, float("-inf"))
