"""Suffix decoding (Oliaro et al. 2024) over the row's own text: the longer the end of the text has occurred before, the
more of what followed serves as draft."""

from __future__ import annotations

from dovetail.core.interfaces import Draft, DraftContext
from dovetail.plugins.spec_decode.base import BuiltinDrafter
from dovetail.plugins.spec_decode.config import SuffixConfig
from dovetail.plugins.spec_decode.lookup import look_up


class SuffixDrafter(BuiltinDrafter):
    config: SuffixConfig

    def propose(self, ctx: DraftContext) -> Draft:
        c = self.config
        return Draft(*look_up(ctx.slots_B, ctx.lengths_B, ctx.tokens_SL, ctx.k, c.min_match, c.max_match, c.growth))
