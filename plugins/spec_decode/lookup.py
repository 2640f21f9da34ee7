"""Search for earlier occurrences of a text's end, on the token table on the device, so that drafts never wait for the
host. B rows, L tokens, K drafts.
"""

from __future__ import annotations

import torch


def look_up(
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    tokens_SL: torch.Tensor,
    k: int,
    min_match: int,
    max_match: int,
    growth: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (drafts [B, K], count [B]), int32: tokens that followed the longest, then latest, earlier occurrence of
    the row's last tokens, at least min_match and at most max_match of them. There are `growth` drafts for each matched
    token, rounded down, and at most k; count 0 = there is no match."""
    given = slots_B, lengths_B, tokens_SL, k, min_match, max_match, growth
    if tokens_SL.is_cuda:
        from dovetail.plugins.spec_decode.kernels import look_up_triton

        return look_up_triton(*given)
    return look_up_reference(*given)


def look_up_reference(
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    tokens_SL: torch.Tensor,
    k: int,
    min_match: int,
    max_match: int,
    growth: float,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    matched_B = matched_BL.gather(1, best_B1).squeeze(1)
    # A copy that would run past the end wraps around: the text between match and end is taken as a period.
    period_B1 = (length_B1 - 1 - best_B1).clamp_min(1)
    source_BK = best_B1 + 1 + torch.arange(k, device=tokens_BL.device) % period_B1
    draft_BK = tokens_BL.gather(1, source_BK.clamp_max(tokens_BL.shape[1] - 1))
    grown_B = (matched_B * growth).long().clamp_max(k)
    return draft_BK, torch.where(matched_B >= min_match, grown_B, 0).int()
