"""Candidates for one position: the tokens that sampling would prefer, for drafts that are siblings in a tree.

Shapes: N rows of logits, V vocabulary, n candidates.
"""

from __future__ import annotations

import torch

from dovetail.core.ops.random import Purpose, gumbel
from dovetail.core.ops.step import scaled


def best_tokens(
    logits_NV: torch.Tensor,
    position_N: torch.Tensor,
    temperature_N: torch.Tensor,
    key_N: torch.Tensor,
    random: bool,
    count: int,
    least_N: torch.Tensor | None = None,
    purpose: Purpose = Purpose.SAMPLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the `count` tokens of each row with the highest scores of `core.ops.step.draw`, highest first, int64
    [N, n]; the logarithm of each one's share in the sum of exp(score), float32). -1 and -inf = there is no other token
    that can be drawn, or some logit is NaN or +inf. `purpose`: that of the noise. The tokens of a random row are draws
    without replacement from its distribution (Gumbel top-k, Kool et al. 2019)."""
    given = logits_NV, position_N, temperature_N, key_N, random, count, least_N, purpose
    if logits_NV.is_cuda:
        from dovetail.core.ops.kernels.siblings import best_tokens_triton

        return best_tokens_triton(*given)
    return best_tokens_reference(*given)


def best_tokens_reference(
    logits_NV: torch.Tensor,
    position_N: torch.Tensor,
    temperature_N: torch.Tensor,
    key_N: torch.Tensor,
    random: bool,
    count: int,
    least_N: torch.Tensor | None = None,
    purpose: Purpose = Purpose.SAMPLE,
) -> tuple[torch.Tensor, torch.Tensor]:
    score_NV = logits_NV.float()
    finite_N1 = (score_NV < float("inf")).all(-1, keepdim=True)
    if random:
        drawn_NV = scaled(score_NV, temperature_N) + gumbel(key_N, position_N, purpose, score_NV.shape[-1])
        if least_N is not None:
            drawn_NV = drawn_NV.masked_fill(score_NV < least_N[:, None], float("-inf"))
        score_NV = torch.where((temperature_N > 0)[:, None], drawn_NV, score_NV)
    share_NV = score_NV.log_softmax(-1)
    if (fewer := count - share_NV.shape[-1]) > 0:
        share_NV = torch.nn.functional.pad(share_NV, (0, fewer), value=float("-inf"))
    best_Nn, tokens_Nn = share_NV.topk(count)
    best_Nn = torch.where(finite_N1, best_Nn, float("-inf"))
    return torch.where(best_Nn > float("-inf"), tokens_Nn, -1), best_Nn
