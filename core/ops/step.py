"""Bookkeeping of a step between device state and model: lay out the tokens to feed, draw new ones, update lengths.

Each operation is one kernel on a GPU, so the bookkeeping of a decode step takes microseconds and can be captured.
Shapes: T tokens, B rows, S slots, L token capacity, P pages of a table, N rows of logits, V vocabulary, R rows that
sample, W sampled positions of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.core.interfaces.attention import TreeMask
from dovetail.core.ops.random import Purpose, gumbel


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Tokens that a step feeds and their origin. Tensors are int64 unless stated otherwise."""

    ids_T: torch.Tensor
    """int32"""
    positions_T: torch.Tensor
    """Position of each token in its sequence."""
    rows_T: torch.Tensor
    slots_T: torch.Tensor
    live_T: torch.Tensor
    """bool: whether the token is of a sequence. False for padding: rows of the last slot, tokens of no row, and places
    of drafts that a row does not have."""
    kv_len_B: torch.Tensor
    """int32: KV length of each row after the step."""
    index_T: torch.Tensor | None = None
    """Index of each token in its sequence's cache and in tokens_SL; None = its position."""
    tree: TreeMask | None = None
    """Mask of the decode rows, if they feed draft trees."""

    @property
    def cache_T(self) -> torch.Tensor:
        """Index of each token in its sequence's cache."""
        return self.positions_T if self.index_T is None else self.index_T


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Page tables and write positions of one KV group for a step."""

    page_table_BP: torch.Tensor
    """int32"""
    write_T: torch.Tensor
    """int64: flat token slot to which each token's K and V are written."""


def lay_out_tokens(
    slots_B: torch.Tensor,
    row_start_B1: torch.Tensor,
    computed_S: torch.Tensor,
    tokens_SL: torch.Tensor,
    total: int,
    longest: int,
    drafts_S: torch.Tensor | None = None,
    decodes: int = 0,
) -> TokenLayout:
    """Lay out `total` tokens: each row has the count given by row_start_B1 (int32) and starts at its computed length.

    Lengths are read on the device, so rows can be laid out before the previous step has ended. Tokens past the last row
    are padding: id and position 0 of the last slot. `longest` bounds the tokens of a row and the padding. Each of the
    first `decodes` rows has one token and `drafts_S` drafts, and then padding; None = no row has padding.
    """
    if slots_B.is_cuda:
        from dovetail.core.ops.kernels.step import lay_out_tokens_triton

        return lay_out_tokens_triton(slots_B, row_start_B1, computed_S, tokens_SL, total, longest, drafts_S, decodes)
    return lay_out_tokens_reference(slots_B, row_start_B1, computed_S, tokens_SL, total, drafts_S, decodes)


def lay_out_tokens_reference(
    slots_B: torch.Tensor,
    row_start_B1: torch.Tensor,
    computed_S: torch.Tensor,
    tokens_SL: torch.Tensor,
    total: int,
    drafts_S: torch.Tensor | None = None,
    decodes: int = 0,
) -> TokenLayout:
    rows, padding = len(slots_B), len(computed_S) - 1
    first_B1 = row_start_B1.long()
    count_B, start_B = first_B1.diff(), computed_S[slots_B]
    place_T = torch.arange(total, device=slots_B.device)
    count_B1 = torch.cat((count_B, total - first_B1[-1:]))
    rows_T = torch.repeat_interleave(torch.arange(rows + 1, device=slots_B.device), count_B1, output_size=total)
    real_T = rows_T < rows
    rows_T = torch.where(real_T, rows_T, 0)
    slots_T = torch.where(real_T, slots_B[rows_T], padding)
    place_T = place_T - first_B1[rows_T]
    positions_T = torch.where(real_T, start_B[rows_T] + place_T, 0)
    ids_T = torch.where(real_T, tokens_SL[slots_T, positions_T], 0)
    live_T = slots_T != padding
    if drafts_S is not None:
        live_T &= (rows_T >= decodes) | (place_T <= drafts_S[slots_T])
    return TokenLayout(ids_T, positions_T, rows_T, slots_T, live_T, (start_B + count_B).int())


def lay_out_pages(
    slots_B: torch.Tensor, tokens: TokenLayout, table_SP: torch.Tensor, given_S: torch.Tensor, page_tokens: int
) -> PageLayout:
    """Return each row's page table and the token slot to which each token is written: one of page 0 at positions below
    the slot's entry of given_S, whose pages other sequences may read."""
    if slots_B.is_cuda:
        from dovetail.core.ops.kernels.step import lay_out_pages_triton

        return lay_out_pages_triton(slots_B, tokens, table_SP, given_S, page_tokens)
    return lay_out_pages_reference(slots_B, tokens, table_SP, given_S, page_tokens)


def lay_out_pages_reference(
    slots_B: torch.Tensor, tokens: TokenLayout, table_SP: torch.Tensor, given_S: torch.Tensor, page_tokens: int
) -> PageLayout:
    page_T = table_SP[tokens.slots_T, tokens.cache_T // page_tokens].long()
    page_T = torch.where(tokens.cache_T < given_S[tokens.slots_T], 0, page_T)
    return PageLayout(table_SP[slots_B], page_T * page_tokens + tokens.cache_T % page_tokens)


def gather_params(slots_N: torch.Tensor, *columns: torch.Tensor) -> list[torch.Tensor]:
    """Return the entries of these slots in each of five columns [S]."""
    if slots_N.is_cuda:
        from dovetail.core.ops.kernels.draw import gather_params_triton

        return gather_params_triton(slots_N, *columns)
    return [column_S[slots_N] for column_S in columns]


def least_kept(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
) -> torch.Tensor:
    """Return float32 [N]: the smallest logit of each row that top-k, top-p and min-p keep at its temperature.

    The filters apply in Hugging Face's order: the k largest, of these the fewest that hold top_p of their probability,
    and none less likely than min_p times the most likely. Logits equal to the smallest one kept are kept too, so ties
    need no order and the GPU finds the bound by bisection without a sort. -inf = all; rows of temperature 0 keep all.
    """
    filters = temperature_N, top_k_N, top_p_N, min_p_N
    if logits_NV.is_cuda:
        from dovetail.core.ops.kernels.filters import least_kept_triton

        return least_kept_triton(logits_NV, *filters)
    return least_kept_reference(logits_NV, *filters)


def least_kept_reference(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
) -> torch.Tensor:
    vocab = logits_NV.shape[1]
    random_N = temperature_N > 0
    ordered_NV = logits_NV.float().sort(dim=-1, descending=True).values
    k_N = torch.where(top_k_N > 0, top_k_N.clamp_max(vocab), vocab)
    least_N = ordered_NV.gather(1, k_N[:, None] - 1).squeeze(1)
    kept_NV = ordered_NV.masked_fill(ordered_NV < least_N[:, None], float("-inf"))
    # The first index at which the cumulative probability reaches top_p.
    reached_N = (scaled(kept_NV, temperature_N).softmax(-1).cumsum(-1) < top_p_N[:, None]).sum(-1).clamp_max(vocab - 1)
    by_p_N = ordered_NV.gather(1, reached_N[:, None]).squeeze(1)
    least_N = torch.where(top_p_N < 1, torch.maximum(least_N, by_p_N), least_N)
    by_min_p_N = ordered_NV[:, 0] + temperature_N * min_p_N.clamp_min(1e-37).log()
    least_N = torch.where(min_p_N > 0, torch.maximum(least_N, by_min_p_N), least_N)
    filtered_N = random_N & ((top_k_N > 0) | (top_p_N < 1) | (min_p_N > 0))
    return torch.where(filtered_N, least_N, float("-inf"))


def scaled(logits_NV: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
    """float32 logits / temperature (at least 1e-30, so that it is finite); rows of temperature 0 are not divided."""
    return logits_NV.float() / torch.where(temperature_N > 0, temperature_N.clamp_min(1e-30), 1.0)[:, None]


def draw(
    logits_NV: torch.Tensor,
    position_N: torch.Tensor,
    temperature_N: torch.Tensor,
    key_N: torch.Tensor,
    random: bool,
    least_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return one token id per row, int64 [N]: the argmax at temperature 0, else a Gumbel-max draw.

    Only logits of at least least_N are drawn. `random` = some temperature is not 0. position_N is the number of tokens
    before the drawn one. The first of equal logits wins. Logits of any float dtype are compared in float32. -1 = some
    logit is NaN or +inf.
    """
    return best(logits_NV, position_N, temperature_N, key_N, random, least_N)[1]


def draw_filtered(
    logits_NV: torch.Tensor,
    position_N: torch.Tensor,
    key_N: torch.Tensor,
    temperature_N: torch.Tensor,
    top_k_N: torch.Tensor,
    top_p_N: torch.Tensor,
    min_p_N: torch.Tensor,
) -> torch.Tensor:
    """Return what `draw` does for the logits that `least_kept` keeps. Rows may have temperature 0 or no filter."""
    filters = temperature_N, top_k_N, top_p_N, min_p_N
    if logits_NV.is_cuda:
        from dovetail.core.ops.kernels.filters import draw_filtered_triton

        return draw_filtered_triton(logits_NV, position_N, key_N, *filters)
    least_N = least_kept_reference(logits_NV, *filters)
    return draw(logits_NV, position_N, temperature_N, key_N, True, least_N)


def best(
    logits_NV: torch.Tensor,
    position_N: torch.Tensor,
    temperature_N: torch.Tensor,
    key_N: torch.Tensor,
    random: bool,
    least_N: torch.Tensor | None = None,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (winning score, float32 [N], token) like `draw`, for the vocabulary part that begins at token `first`. The
    part with the highest score has the token that `draw` would choose from the whole vocabulary. A part with NaN
    or +inf has the score +inf and token -1."""
    if logits_NV.is_cuda:
        from dovetail.core.ops.kernels.draw import best_triton

        return best_triton(logits_NV, position_N, temperature_N, key_N, random, least_N, first)
    return best_reference(logits_NV, position_N, temperature_N, key_N, random, least_N, first)


def best_reference(
    logits_NV: torch.Tensor,
    position_N: torch.Tensor,
    temperature_N: torch.Tensor,
    key_N: torch.Tensor,
    random: bool,
    least_N: torch.Tensor | None = None,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    score_NV = logits_NV.float()
    if random:
        scaled_NV = scaled(score_NV, temperature_N)
        if least_N is not None:
            scaled_NV = scaled_NV.masked_fill(score_NV < least_N[:, None], float("-inf"))
        noise_NV = gumbel(key_N, position_N, Purpose.SAMPLE, score_NV.shape[-1], first)
        score_NV = torch.where((temperature_N > 0)[:, None], scaled_NV + noise_NV, score_NV)
    best_N, token_N = score_NV.where(~score_NV.isnan(), float("inf")).max(-1)
    return best_N, torch.where(best_N == float("inf"), -1, token_N + first)


def write_drafts(
    drafts_BK: torch.Tensor,
    count_B: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    most_B: torch.Tensor,
    tokens_SL: torch.Tensor,
    drafts_S: torch.Tensor,
    vocab: int,
) -> None:
    """Write each row's first drafts after its known tokens, and their number to drafts_S: at most count_B and most_B of
    them, and none from the first id outside of the vocabulary on. The rest of K positions gets id 0: the model may be
    fed them as padding, so their ids must be valid. drafts_BK and count_B have any integer dtype."""
    if drafts_BK.is_cuda:
        from dovetail.core.ops.kernels.step import write_drafts_triton

        write_drafts_triton(drafts_BK, count_B, slots_B, lengths_B, most_B, tokens_SL, drafts_S, vocab)
    else:
        write_drafts_reference(drafts_BK, count_B, slots_B, lengths_B, most_B, tokens_SL, drafts_S, vocab)


def write_drafts_reference(
    drafts_BK: torch.Tensor,
    count_B: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    most_B: torch.Tensor,
    tokens_SL: torch.Tensor,
    drafts_S: torch.Tensor,
    vocab: int,
) -> None:
    known_BK = (drafts_BK >= 0) & (drafts_BK < vocab)
    kept_B = leading(known_BK, torch.minimum(count_B, most_B))
    step_K = torch.arange(drafts_BK.shape[1], device=drafts_BK.device)
    kept_BK = torch.where(step_K < kept_B[:, None], drafts_BK, 0)
    tokens_SL[slots_B[:, None], lengths_B[:, None] + step_K] = kept_BK.int()
    drafts_S[slots_B] = kept_B


@dataclass(frozen=True, slots=True)
class Accepted:
    """Result of draft verification for the rows of a step."""

    accepted_R: torch.Tensor
    """int64: number of accepted drafts, 0 .. W-1."""
    lengths_R: torch.Tensor
    """int64: exact lengths, including the new tokens."""
    drafted_R: torch.Tensor
    """int64: number of drafts verified, 0 .. W-1."""


def accept(
    tokens_RW: torch.Tensor,
    slots_R: torch.Tensor,
    base_R: torch.Tensor,
    limit_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    computed_S: torch.Tensor,
    drafts_S: torch.Tensor,
) -> Accepted:
    """Accept each row's leading drafts that equal the target's draws, then write the result to the device state.

    For greedy rows this is the usual rule. For random rows whose drafter puts all probability on its draft, it is
    equivalent to min(1, p/q): the draw equals the draft with probability p(draft), and otherwise follows the residual
    distribution. Draws are those of plain sampling, so a seeded request gives the same text with and without drafts.

    Position base_R + w of a row holds draft w (as int32) before the call and token w after it, or 0 for token -1
    (`draw`), which agrees with no draft. limit_R bounds the verified drafts. Rows of the last slot are padding and
    change nothing.
    """
    if tokens_RW.is_cuda:
        from dovetail.core.ops.kernels.step import accept_triton

        return accept_triton(tokens_RW, slots_R, base_R, limit_R, tokens_SL, computed_S, drafts_S)
    return accept_reference(tokens_RW, slots_R, base_R, limit_R, tokens_SL, computed_S, drafts_S)


def accept_reference(
    tokens_RW: torch.Tensor,
    slots_R: torch.Tensor,
    base_R: torch.Tensor,
    limit_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    computed_S: torch.Tensor,
    drafts_S: torch.Tensor,
) -> Accepted:
    step_K = torch.arange(tokens_RW.shape[1] - 1, device=tokens_RW.device)
    draft_RK = tokens_SL[slots_R[:, None], base_R[:, None] + step_K]
    count_R = torch.minimum(drafts_S[slots_R], limit_R)
    accepted_R = leading(tokens_RW[:, :-1] == draft_RK, count_R)
    commit(tokens_RW, accepted_R, slots_R, base_R, tokens_SL, computed_S, drafts_S)
    return Accepted(accepted_R, base_R + accepted_R + 1, count_R)


def leading(agree_RK: torch.Tensor, count_R: torch.Tensor) -> torch.Tensor:
    """Length of the leading run of True among each row's first count entries, int64."""
    inside_RK = torch.arange(agree_RK.shape[1], device=agree_RK.device) < count_R[:, None]
    return (agree_RK & inside_RK).long().cumprod(-1).sum(-1)


def commit(
    tokens_RW: torch.Tensor,
    accepted_R: torch.Tensor,
    slots_R: torch.Tensor,
    base_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    computed_S: torch.Tensor,
    drafts_S: torch.Tensor,
) -> None:
    """Torch reference that updates known tokens, computed lengths and drafts; writes nothing past accepted tokens."""
    padding = len(computed_S) - 1
    step_W = torch.arange(tokens_RW.shape[1], device=tokens_RW.device)
    inside_RW = (step_W <= accepted_R[:, None]) & (slots_R != padding)[:, None]
    tokens_SL[
        torch.where(inside_RW, slots_R[:, None], padding), torch.where(inside_RW, base_R[:, None] + step_W, 0)
    ] = tokens_RW.int().clamp_min(0)  # The next step may already be enqueued and feeds it.
    computed_S[slots_R] = torch.where(slots_R != padding, base_R + accepted_R, computed_S[slots_R])
    drafts_S.index_fill_(0, slots_R, 0)  # `= 0` would copy the 0 from the host and synchronise
