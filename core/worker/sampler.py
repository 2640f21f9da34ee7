"""Sampling: draw tokens from logits. N rows of logits, V vocabulary. Greedy rows take the arg-max. Random rows take the
arg-max of filtered logits plus Gumbel noise, so sampling needs neither a normalised distribution nor, on a GPU, a
sort."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dovetail.core.interfaces import Model
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
    least_N = least_logit(logits_NV, params)
    return best_tokens(logits_NV, position_N, params.temperature_N, params.key_N, params.random, count, least_N)


def warm_up_float32(state: DeviceState, vocab: int) -> None:
    """Draw in each way from float32 logits, as logits processors return them, so that their kernels get compiled."""
    logits_NV = torch.zeros(1, vocab, device=state.device)
    slots_N = torch.tensor([state.scratch], device=state.device)
    for random, filtered in ((False, False), (True, False), (True, True)):
        sample(logits_NV, slots_N, SampleParams.of(state, slots_N, random=random, filtered=filtered))


def sample_over_ranks(
    model: Model, states_NC: torch.Tensor, position_N: torch.Tensor, params: SampleParams
) -> torch.Tensor:
    """Apply `sample` to rows without filters: each rank draws from its part of the vocabulary; the best draw wins."""
    logits_NV, first = model.local_logits(states_NC)
    given = position_N, params.temperature_N, params.key_N, params.random
    if logits_NV.shape[1] == model.build.spec.vocab:
        return draw(logits_NV, *given)
    return model.build.collective.argmax(*best(logits_NV, *given, first=first))


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
