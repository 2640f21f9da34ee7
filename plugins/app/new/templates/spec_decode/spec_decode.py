"""Drafts copied from a fixed distance. Shapes: B rows, K drafts, S slots, L tokens of a sequence."""

import torch
from dovetail.core.interfaces import Draft, Drafter

from dovetail_mine.config import MineConfig


class Mine(Drafter):
    config: MineConfig

    @property
    def lookahead(self):
        return self.config.lookahead

    def propose(self, ctx):
        step_K = torch.arange(ctx.k, device=ctx.lengths_B.device) % self.config.every
        from_BK = ctx.lengths_B[:, None] - self.config.every + step_K
        tokens_BK = ctx.tokens_SL[ctx.slots_B].gather(1, from_BK.clamp_min(0))
        count_B = torch.where(ctx.lengths_B >= self.config.every, ctx.k, 0)
        return Draft(tokens_BK, count_B)
