"""Search for earlier occurrences of a text's end, on the token table on the device, so that drafts never wait for the
host. B rows, L tokens, K drafts, P and N as in corpus.
"""

from __future__ import annotations

import torch

from dovetail.plugins.spec_decode.corpus import Corpus


def look_up(
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    tokens_SL: torch.Tensor,
    k: int,
    min_match: int,
    max_match: int,
    growth: float,
    corpus: Corpus | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (drafts [B, K], count [B]), int32: tokens that followed the longest, then latest, earlier occurrence of
    the row's last tokens, at least min_match and at most max_match of them. There are `growth` drafts for each matched
    token, rounded down, and at most k; count 0 = there is no match. With a `corpus`, occurrences in the row's
    prediction precede equally long ones in its own text, and these the ones in the ring; a draft of -1 ends them."""
    given = slots_B, lengths_B, tokens_SL, k, min_match, max_match, growth, corpus
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
    corpus: Corpus | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    length_B1 = lengths_B[:, None]
    tokens_BL = tokens_SL[slots_B]
    place_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
    last_BM = _last_tokens(tokens_BL, length_B1, max_match)

    # matched_BL[b, j]: number of last tokens that equal those ending at j, for all earlier positions j at once.
    matched_BL = _matched(tokens_BL, last_BM, place_L < length_B1 - 1, around=False)
    matched_B, best_B1 = _longest(matched_BL)
    # A copy that would run past the end wraps around: the text between match and end is taken as a period.
    step_K = torch.arange(k, device=tokens_BL.device)
    source_BK = best_B1 + 1 + step_K % (length_B1 - 1 - best_B1).clamp_min(1)
    draft_BK = tokens_BL.gather(1, source_BK.clamp_max(tokens_BL.shape[1] - 1))

    if corpus is not None and corpus.predicted_SP.shape[1]:
        predicted_BP = corpus.predicted_SP[slots_B]
        place_P = torch.arange(predicted_BP.shape[1], device=tokens_BL.device)
        # A match that ends before the prompt does would draft the prompt.
        found_B, end_B1 = _longest(_matched(predicted_BP, last_BM, place_P >= corpus.lead - 1, around=False))
        follow_BK = predicted_BP.gather(1, (end_B1 + 1 + step_K).clamp_max(predicted_BP.shape[1] - 1))
        better_B = found_B >= matched_B
        draft_BK = torch.where(better_B[:, None], follow_BK, draft_BK)
        matched_B = torch.where(better_B, found_B, matched_B)
    if corpus is not None and len(corpus.ring_N):
        ring_BN = corpus.ring_N.expand(len(slots_B), -1)
        mine_BN = corpus.owner_N == corpus.owner_S[slots_B][:, None]
        found_B, end_B1 = _longest(_matched(ring_BN, last_BM, mine_BN, around=True))
        follow_BK = ring_BN.gather(1, (end_B1 + 1 + step_K) % ring_BN.shape[1])
        better_B = found_B > matched_B
        draft_BK = torch.where(better_B[:, None], follow_BK, draft_BK)
        matched_B = torch.where(better_B, found_B, matched_B)
    grown_B = (matched_B * growth).long().clamp_max(k)
    return draft_BK, torch.where(matched_B >= min_match, grown_B, 0).int()


def _last_tokens(tokens_BL: torch.Tensor, length_B1: torch.Tensor, count: int) -> torch.Tensor:
    """Return the last tokens of each row, the last one first, [B, count]; -2 before its first one."""
    place_BM = length_B1 - 1 - torch.arange(count, device=tokens_BL.device)
    return tokens_BL.gather(1, place_BM.clamp_min(0)).masked_fill(place_BM < 0, -2)


def _matched(text_BX: torch.Tensor, last_BM: torch.Tensor, alive_BX: torch.Tensor, *, around: bool) -> torch.Tensor:
    """Return how many of the last tokens equal those that end at each place of a text. `around`: it is a ring."""
    place_X = torch.arange(text_BX.shape[1], device=text_BX.device)
    matched_BX = torch.zeros_like(text_BX, dtype=torch.int64)
    for back in range(last_BM.shape[1]):
        alive_BX = alive_BX & (text_BX.roll(back, 1) == last_BM[:, back : back + 1]) & ((place_X >= back) | around)
        matched_BX += alive_BX
    return matched_BX


def _longest(matched_BX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the length [B] and the last end [B, 1] of the longest match."""
    size = matched_BX.shape[1]
    best_B1 = (matched_BX * size + torch.arange(size, device=matched_BX.device)).argmax(1, keepdim=True)
    return matched_BX.gather(1, best_B1).squeeze(1), best_B1
