"""Prompt lookup (Saxena 2023; Yang et al. 2023): text often repeats itself, so earlier text serves as draft.

Works on the token table on the device, so drafts never wait for the host. B rows, L tokens, K drafts.
"""

from __future__ import annotations

import torch

from dovetail.core.interfaces import Draft, DraftContext, Drafter
from dovetail.plugins.spec_decode.config import NgramConfig


class NgramDrafter(Drafter):
    config: NgramConfig

    @property
    def lookahead(self) -> int:
        return self.config.lookahead

    def propose(self, ctx: DraftContext) -> Draft:
        given = ctx.slots_B, ctx.lengths_B, ctx.tokens_SL, ctx.k, self.config.min_match, self.config.max_match
        if ctx.tokens_SL.is_cuda:
            from dovetail.plugins.spec_decode.kernels import look_up_triton

            return Draft(*look_up_triton(*given))
        return Draft(*look_up_reference(*given))


def look_up_reference(
    slots_B: torch.Tensor, lengths_B: torch.Tensor, tokens_SL: torch.Tensor, k: int, min_match: int, max_match: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (drafts [B, K], count [B]), int32: the k tokens that followed the longest, then latest, earlier occurrence
    of the row's last tokens, at least min_match and at most max_match of them; count 0 = there is none."""
    length_B1 = lengths_B[:, None]
    tokens_BL = tokens_SL[slots_B]
    place_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)

    # matched_BL[b, j]: number of last tokens that equal those ending at j, for all earlier positions j at once.
    alive_BL = place_L < length_B1 - 1
    matched_BL = torch.zeros_like(tokens_BL, dtype=torch.int64)
    for back in range(max_match):
        last_B1 = tokens_BL.gather(1, (length_B1 - 1 - back).clamp_min(0))
        alive_BL = alive_BL & (tokens_BL.roll(back, 1) == last_B1) & (place_L >= back)
        matched_BL += alive_BL

    score_BL = matched_BL * tokens_BL.shape[1] + place_L
    best_B1 = score_BL.argmax(1, keepdim=True)
    found_B = matched_BL.gather(1, best_B1).squeeze(1) >= min_match
    # A copy that would run past the end wraps around: the text between match and end is taken as a period.
    period_B1 = (length_B1 - 1 - best_B1).clamp_min(1)
    source_BK = best_B1 + 1 + torch.arange(k, device=tokens_BL.device) % period_B1
    draft_BK = tokens_BL.gather(1, source_BK.clamp_max(tokens_BL.shape[1] - 1))
    return draft_BK, torch.where(found_B, k, 0).int()
