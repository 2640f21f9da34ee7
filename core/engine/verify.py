"""Verification of drafts that come with probabilities; those that are certain go through core.ops.step.accept. Both
leave the output distribution exactly the target's. R rows, W = K + 1 positions, V vocabulary.

Position w of a row holds the target's logits after the last token and the first w drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.core.ops.random import Purpose, gumbel, uniform
from dovetail.core.ops.step import leading


@dataclass(frozen=True, slots=True)
class Verdict:
    tokens_RW: torch.Tensor
    """int64: accepted drafts, then one token of the target's own; entries past accepted_R are meaningless."""
    accepted_R: torch.Tensor
    """int64: drafts accepted, 0 .. K."""


def verify_rejection(
    p_RWV: torch.Tensor,
    q_RKV: torch.Tensor,
    draft_RK: torch.Tensor,
    count_R: torch.Tensor,
    key_R: torch.Tensor,
    position_RW: torch.Tensor,
) -> Verdict:
    """Lossless rejection (Leviathan et al. 2023, Chen et al. 2023): accept draft x with probability min(1, p(x)/q(x));
    at the first rejection draw from max(p - q, 0) normalised; when all are accepted draw from p. draft_RK was drawn
    from q_RKV.
    """
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
    # Rounding can leave nothing of the residual where p and q agree; p itself is then as good.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_last)
    position = position_RW.gather(1, accepted[:, None]).squeeze(1)
    # The bonus token after full acceptance is an ordinary draw and uses plain sampling's noise.
    noise = torch.where(
        rejected[:, None],
        gumbel(key_R, position, Purpose.RESIDUAL, vocab),
        gumbel(key_R, position, Purpose.SAMPLE, vocab),
    )
    own = (residual.log() + noise).argmax(-1)
    tokens = torch.cat([draft_RK, draft_RK.new_zeros(rows, 1)], dim=1).scatter(1, accepted[:, None], own[:, None])
    return Verdict(tokens, accepted)
