"""Suffix decoding (Oliaro et al. 2024) over the row's own text, the output that its request predicts, and earlier
outputs: the longer the end of the text has occurred before, the more of what followed serves as draft."""

from __future__ import annotations

import torch

from dovetail.core.interfaces import Draft, DraftContext, Request, TargetView
from dovetail.plugins.spec_decode.base import BuiltinDrafter
from dovetail.plugins.spec_decode.config import SuffixConfig
from dovetail.plugins.spec_decode.corpus import Corpus, CorpusWriter
from dovetail.plugins.spec_decode.lookup import look_up


class SuffixDrafter(BuiltinDrafter):
    config: SuffixConfig

    def bind(self, target: TargetView) -> None:
        super().bind(target)
        c = self.config
        self.corpus = Corpus.allocate(target, ring=c.ring, prediction=c.prediction, lead=c.max_match)
        self._writer = CorpusWriter(self.corpus, target)

    def enter(self, slot: int, request: Request) -> None:
        self._writer.enter(slot, request)

    def leave(self, slot: int, tokens_L: torch.Tensor, length: torch.Tensor) -> None:
        self._writer.leave(slot, tokens_L, length)

    def propose(self, ctx: DraftContext) -> Draft:
        c, rows = self.config, (ctx.slots_B, ctx.lengths_B, ctx.tokens_SL)
        return Draft(*look_up(*rows, ctx.k, c.min_match, c.max_match, c.growth, self.corpus))
