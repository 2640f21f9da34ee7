"""Prompt lookup (Saxena 2023; Yang et al. 2023): text often repeats itself, so earlier text serves as draft."""

from __future__ import annotations

from dovetail.core.interfaces import Draft, DraftContext
from dovetail.plugins.spec_decode.base import BuiltinDrafter
from dovetail.plugins.spec_decode.config import NgramConfig
from dovetail.plugins.spec_decode.lookup import look_up


class NgramDrafter(BuiltinDrafter):
    config: NgramConfig

    def propose(self, ctx: DraftContext) -> Draft:
        c = self.config
        # Any match brings all drafts.
        return Draft(*look_up(ctx.slots_B, ctx.lengths_B, ctx.tokens_SL, ctx.k, c.min_match, c.max_match, float(ctx.k)))
