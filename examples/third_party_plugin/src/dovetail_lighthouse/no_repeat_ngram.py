"""Bans every token that would complete an n-gram for the second time (Paulus, Xiong and Socher 2017).

Shapes: N logits rows, S slots, L history, V vocabulary.
"""

import torch

from dovetail import RequestError
from dovetail.core.interfaces import LogitsProcessor
from dovetail_lighthouse.config import NoRepeatNgramParams


class NoRepeatNgram(LogitsProcessor):
    params = NoRepeatNgramParams

    def allocate(self, slots, vocab, device):
        self.size_S = torch.zeros(slots, dtype=torch.int64, device=device)

    def validate(self, request, vocab):
        if self._size(request) > self.config.longest:
            raise RequestError(
                f"no_repeat_ngram={self._size(request)} is more than {self.config.longest}, the configured maximum"
            )

    def wants(self, request):
        return self._size(request) > 0

    def join(self, slot, request):
        self.size_S[slot] = self._size(request)

    def apply(self, logits_NV, ctx):
        length_N1 = ctx.lengths_N[:, None]
        size_N1 = self.size_S[ctx.slots_N, None]
        # Reading lengths from the device would make the host wait, so every history extends to the host's bound.
        tokens_NL = ctx.tokens_SL[ctx.slots_N, : ctx.max_length].long().clamp_(0, logits_NV.shape[1] - 1)
        at_L = torch.arange(tokens_NL.shape[1], device=logits_NV.device)
        begin_N1 = torch.zeros_like(length_N1) if self.config.prompt else ctx.prompt_len_S[ctx.slots_N, None]
        # banned[i]: the n - 1 tokens before token i equal the last n - 1 tokens of the history.
        banned_NL = (size_N1 > 0) & (at_L < length_N1) & (at_L - size_N1 + 1 >= begin_N1)
        for back in range(1, self.config.longest):
            before_NL = tokens_NL[:, (at_L - back).clamp_(min=0)]
            last_N1 = tokens_NL.gather(1, (length_N1 - back).clamp_(min=0))
            banned_NL &= (before_NL == last_N1) | (back >= size_N1)
        count_NV = torch.zeros(logits_NV.shape, dtype=torch.int32, device=logits_NV.device)
        count_NV.scatter_add_(1, tokens_NL, banned_NL.int())
        return logits_NV.masked_fill(count_NV > 0, float("-inf"))

    def _size(self, request):
        own = self.parameters(request).no_repeat_ngram
        return self.config.size if own is None else own
