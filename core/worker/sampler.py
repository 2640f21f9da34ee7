"""Sampling: draw tokens from logits. N rows of logits, V vocabulary. Greedy rows take the arg-max. Random rows take the
arg-max of filtered logits plus Gumbel noise, so sampling needs neither a normalised distribution nor, on a GPU, a
sort."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dovetail.core.interfaces import LogitsHead
from dovetail.core.ops.random import Purpose, gumbel, uniform
from dovetail.core.ops.siblings import best_tokens
from dovetail.core.ops.step import best, draw, draw_filtered, gather_params, leading, least_kept, scaled

if TYPE_CHECKING:
    from dovetail.core.worker.device_state import DeviceState


@dataclass(frozen=True, slots=True)
class SampleParams:
    """Sampling parameters of each row on the device, and facts about all rows on the host."""

    temperature_N: torch.Tensor
    top_k_N: torch.Tensor
    top_p_N: torch.Tensor
    min_p_N: torch.Tensor
    key_N: torch.Tensor
    random: bool
    """Some row is not greedy."""
    filtered: bool
    """Some row uses top-k, top-p or min-p."""

    @classmethod
    def of(cls, state: DeviceState, slots_N: torch.Tensor, *, random: bool, filtered: bool) -> SampleParams:
        """Gather the parameters of the sequences in these slots. If no row is random, none is read or gathered."""
        of_slots = state.temperature_S, state.top_k_S, state.top_p_S, state.min_p_S, state.key_S
        temperature_N, top_k_N, top_p_N, min_p_N, key_N = gather_params(slots_N, *of_slots) if random else of_slots
        return cls(temperature_N, top_k_N, top_p_N, min_p_N, key_N, random, filtered)


def least_logit(logits_NV: torch.Tensor, params: SampleParams) -> torch.Tensor | None:
    """Return the least logit that each row's filters keep; None = no row is filtered."""
    if not params.filtered:
        return None
    return least_kept(logits_NV, params.temperature_N, params.top_k_N, params.top_p_N, params.min_p_N)


def sample(logits_NV: torch.Tensor, position_N: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Draw one token id for each row, int64 [N]; -1 = some logit is NaN or +inf. position_N is the
    number of tokens that precede it."""
    if params.filtered:
        filters = params.temperature_N, params.top_k_N, params.top_p_N, params.min_p_N
        return draw_filtered(logits_NV, position_N, params.key_N, *filters)
    return draw(logits_NV, position_N, params.temperature_N, params.key_N, params.random)


def siblings(
    logits_NV: torch.Tensor, position_N: torch.Tensor, params: SampleParams, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` tokens that `sample` would prefer for each row, and their confidence (ops.siblings)."""
    return _best(logits_NV, position_N, params, count, Purpose.SAMPLE)


def drawn_siblings(
    logits_NV: torch.Tensor, position_N: torch.Tensor, params: SampleParams, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `count` tokens of each row, drawn without replacement by noise of their own, their confidence, and the
    distribution that they are drawn from, float32 [N, V]. Greedy rows have their tokens with the highest logits; a
    tree accepts the one that the target prefers, whatever their distribution."""
    tokens_Nn, confidence_Nn = _best(logits_NV, position_N, params, count, Purpose.DRAFT)
    temperature_N = torch.where(params.temperature_N > 0, params.temperature_N, 1.0)
    return tokens_Nn, confidence_Nn, probabilities(logits_NV, replace(params, temperature_N=temperature_N))


def _best(
    logits_NV: torch.Tensor, position_N: torch.Tensor, params: SampleParams, count: int, purpose: Purpose
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = params.temperature_N, params.key_N, params.random
    return best_tokens(logits_NV, position_N, *rows, count, least_logit(logits_NV, params), purpose)


def warm_up_float32(state: DeviceState, vocab: int) -> None:
    """Draw in each way from float32 logits, as logits processors return them, so that their kernels get compiled."""
    logits_NV = torch.zeros(1, vocab, device=state.device)
    slots_N = torch.tensor([state.scratch], device=state.device)
    for random, filtered in ((False, False), (True, False), (True, True)):
        sample(logits_NV, slots_N, SampleParams.of(state, slots_N, random=random, filtered=filtered))


def sample_over_ranks(
    head: LogitsHead, states_NC: torch.Tensor, position_N: torch.Tensor, params: SampleParams
) -> torch.Tensor:
    """Apply `sample` to rows without filters: each rank draws from its part of the vocabulary; the best draw wins."""
    logits_NV, first = head.local_logits(states_NC)
    given = position_N, params.temperature_N, params.key_N, params.random
    if logits_NV.shape[1] == head.build.spec.vocab:
        return draw(logits_NV, *given)
    return head.build.collective.argmax(*best(logits_NV, *given, first=first))


def probabilities(logits_NV: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Return the distribution that `sample` draws from, float32 [N, V]; a point mass for greedy rows. NaN = some
    logit is NaN or +inf."""
    scaled_NV = scaled(logits_NV, params.temperature_N)
    least_N = least_logit(logits_NV, params)
    if least_N is not None:
        scaled_NV = scaled_NV.masked_fill(logits_NV.float() < least_N[:, None], float("-inf"))
    best_N, token_N = logits_NV.max(-1)
    greedy = torch.nn.functional.one_hot(token_N, logits_NV.shape[-1]).float()
    greedy = torch.where((best_N < float("inf"))[:, None], greedy, float("nan"))
    return torch.where((params.temperature_N > 0)[:, None], scaled_NV.softmax(-1), greedy)


LEAST_TYPICAL, TYPICAL_SHARE = 0.09, 0.3
"""Typical acceptance: least probability of a draft that is always accepted, and share of exp(-entropy) that suffices
(Medusa's defaults)."""


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """Result of verifying drafts against the target's distributions. Nothing is written to the device state yet."""

    tokens_RW: torch.Tensor
    """int64: accepted drafts, then one token from the target itself, or -1 if its distribution has NaN; later entries
    are meaningless."""
    accepted_R: torch.Tensor
    """int64: drafts accepted, 0 .. K."""


def verify_rejection(
    p_RWV: torch.Tensor,
    q_RKV: torch.Tensor,
    draft_RK: torch.Tensor,
    count_R: torch.Tensor,
    key_R: torch.Tensor,
    position_RW: torch.Tensor,
) -> VerifiedDrafts:
    """Verify by lossless rejection (Leviathan et al. 2023, Chen et al. 2023): accept draft x with probability
    min(1, p(x)/q(x)). At the first rejection draw from max(p - q, 0) normalised; if all are accepted draw from p.
    draft_RK was drawn from q_RKV."""
    rows, drafts = draft_RK.shape
    vocab = p_RWV.shape[-1]
    p_draft = p_RWV[:, :drafts].gather(-1, draft_RK[..., None]).squeeze(-1)
    q_draft = q_RKV.gather(-1, draft_RK[..., None]).squeeze(-1)
    keys = key_R[:, None].expand(rows, drafts).reshape(-1)
    chance = uniform(keys, position_RW[:, :drafts].reshape(-1), Purpose.ACCEPT, 1).view(rows, drafts)
    accepted = leading(chance * q_draft < p_draft, count_R)

    at = accepted[:, None, None].expand(rows, 1, vocab)
    p_last = p_RWV.gather(1, at).squeeze(1)
    q_padded = torch.cat([q_RKV, q_RKV.new_zeros(rows, 1, vocab)], dim=1)
    q_last = q_padded.gather(1, at).squeeze(1)
    rejected = accepted < count_R
    residual = torch.where(rejected[:, None], (p_last - q_last).clamp_min(0), p_last)
    # Where p and q agree, rounding can leave an empty residual; p itself serves as well.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_last)
    position = position_RW.gather(1, accepted[:, None]).squeeze(1)
    # The bonus token after full acceptance is an ordinary draw and uses plain sampling's noise.
    noise = torch.where(
        rejected[:, None],
        gumbel(key_R, position, Purpose.RESIDUAL, vocab),
        gumbel(key_R, position, Purpose.SAMPLE, vocab),
    )
    best_R, own = (residual.log() + noise).max(-1)
    own = torch.where(best_R.isnan(), -1, own)
    tokens = torch.cat([draft_RK, draft_RK.new_zeros(rows, 1)], dim=1).scatter(1, accepted[:, None], own[:, None])
    return VerifiedDrafts(tokens, accepted)


def verify_rejection_tree(
    p_RWV: torch.Tensor,
    q_RKV: torch.Tensor,
    own_RW: torch.Tensor,
    draft_RK: torch.Tensor,
    parent_RK: torch.Tensor,
    drawn_RK: torch.Tensor,
    count_R: torch.Tensor,
    key_R: torch.Tensor,
    position_RW: torch.Tensor,
) -> torch.Tensor:
    """Verify trees by lossless rejection. Return draws after the root and after each draft, int64 [R, W], -1 = NaN:
    the accepted path is the one along which drafts equal these draws.

    Siblings are draws from one distribution without replacement and are tried in their order, each with probability
    min(1, p(x)/q(x)). After a rejection p becomes max(p - q, 0) normalised and q loses x (SpecInfer, Miao et al. 2024;
    without replacement: Jeon et al. 2024). If none is accepted, the draw is from the p that is left. Which drafts
    exist must not depend on their own ids.

    own_RW: plain sampling's draws from p_RWV. parent_RK: index of each draft's parent; -1 = the root. drawn_RK: index
    in q_RKV of the distribution that each draft was drawn from."""
    rows, drafts = draft_RK.shape
    each_R, drawn_RW = torch.arange(rows, device=draft_RK.device), own_RW.clone()
    p_RV, q_RV = p_RWV[:, 0], torch.zeros_like(p_RWV[:, 0])
    at_R, tried_R = torch.zeros_like(count_R), torch.zeros_like(count_R, dtype=torch.bool)
    for k in range(drafts):
        # Parents precede their children, so one pass visits all siblings of every accepted draft.
        sibling_R = (parent_RK[:, k] == at_R - 1) & (k < count_R)
        q_RV = torch.where((sibling_R & ~tried_R)[:, None], q_RKV[each_R, drawn_RK[:, k]], q_RV)
        at_R1, token_R1 = at_R[:, None], draft_RK[:, k, None]
        position_R = position_RW.gather(1, at_R1)[:, 0]
        chance_R = uniform(key_R, position_R, Purpose.ACCEPT, 1, first=k)[:, 0]
        accepted_R = sibling_R & (chance_R * q_RV.gather(1, token_R1)[:, 0] < p_RV.gather(1, token_R1)[:, 0])
        rejected_R1 = (sibling_R & ~accepted_R)[:, None]
        drawn_RW.scatter_(1, at_R1, torch.where(accepted_R[:, None], token_R1, drawn_RW.gather(1, at_R1)))
        p_RV = torch.where(rejected_R1, _shares((p_RV - q_RV).clamp_min(0), p_RV), p_RV)
        q_RV = torch.where(rejected_R1, _shares(q_RV.scatter(1, token_R1, 0.0), torch.zeros_like(q_RV)), q_RV)
        p_RV = torch.where(accepted_R[:, None], p_RWV[:, k + 1], p_RV)
        at_R = torch.where(accepted_R, k + 1, at_R)
        tried_R = (tried_R | rejected_R1[:, 0]) & ~accepted_R
    at_R1 = at_R[:, None]
    noise_RV = gumbel(key_R, position_RW.gather(1, at_R1)[:, 0], Purpose.RESIDUAL, p_RV.shape[-1])
    best_R1, token_R1 = (p_RV.log() + noise_RV).max(-1, keepdim=True)
    left_R1 = torch.where(best_R1.isnan(), -1, token_R1)
    return drawn_RW.scatter(1, at_R1, torch.where(tried_R[:, None], left_R1, drawn_RW.gather(1, at_R1)))


def _shares(weights_RV: torch.Tensor, otherwise_RV: torch.Tensor) -> torch.Tensor:
    """Normalise rows; `otherwise_RV` replaces those without weight, which rounding can leave where p and q agree."""
    total_R1 = weights_RV.sum(-1, keepdim=True)
    return torch.where(total_R1 > 0, weights_RV / total_R1, otherwise_RV)


def verify_typical(
    p_RWV: torch.Tensor, own_RW: torch.Tensor, draft_RK: torch.Tensor, count_R: torch.Tensor
) -> VerifiedDrafts:
    """Verify by typical acceptance (Medusa, Cai et al. 2024): accept a draft whose probability is at least
    LEAST_TYPICAL, or TYPICAL_SHARE of exp(-entropy) where that is less. own_RW: plain sampling's draws from p_RWV, of
    which the first after the accepted drafts is kept. Not lossless."""
    drafts = draft_RK.shape[1]
    p_RKV = p_RWV[:, :drafts]
    entropy_RK = -torch.xlogy(p_RKV, p_RKV).sum(-1)
    p_RK = p_RKV.gather(-1, draft_RK[..., None]).squeeze(-1)
    accepted_R = leading(p_RK >= (TYPICAL_SHARE * (-entropy_RK).exp()).clamp_max(LEAST_TYPICAL), count_R)
    step_W = torch.arange(own_RW.shape[1], device=own_RW.device)
    draft_RW = torch.nn.functional.pad(draft_RK, (0, 1))
    return VerifiedDrafts(torch.where(step_W < accepted_R[:, None], draft_RW, own_RW), accepted_R)
