"""Log-probabilities of the most likely tokens. Shapes: N rows of logits, V vocabulary, n best tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BestLogprobs:
    total_N: torch.Tensor
    """float32: log of the sum of exp(logit); a token's log-probability is its logit minus this."""
    values_Nn: torch.Tensor
    """float32: log-probabilities, the largest first."""
    ids_Nn: torch.Tensor
    """int64. The order of equal logits is unspecified."""


def best_logprobs(logits_NV: torch.Tensor, count: int, wanted_N: torch.Tensor | None = None) -> BestLogprobs:
    """Return the `count` most likely tokens, 1 <= count <= V, in float32. On a GPU the logits are read once.

    `wanted_N` (int64): only so many tokens of a row are needed; the other entries are unspecified. -1 = nothing of the
    row is needed, which then costs nothing."""
    if logits_NV.is_cuda:
        from dovetail.core.ops.kernels.logprobs import best_logprobs_triton

        return best_logprobs_triton(logits_NV, count, wanted_N)
    return best_logprobs_reference(logits_NV, count)


def best_logprobs_reference(logits_NV: torch.Tensor, count: int) -> BestLogprobs:
    logits_NV = logits_NV.float()
    total_N = logits_NV.logsumexp(-1)
    top = logits_NV.topk(count, dim=-1)
    return BestLogprobs(total_N, top.values - total_N[:, None], top.indices)


def logprobs_of(logits_NV: torch.Tensor, tokens_N: torch.Tensor, total_N: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of a token of each row, float32 [N]. That of token -1 is unspecified."""
    if logits_NV.is_cuda:
        from dovetail.core.ops.kernels.logprobs import logprobs_of_triton

        return logprobs_of_triton(logits_NV, tokens_N, total_N)
    return logprobs_of_reference(logits_NV, tokens_N, total_N)


def logprobs_of_reference(logits_NV: torch.Tensor, tokens_N: torch.Tensor, total_N: torch.Tensor) -> torch.Tensor:
    return logits_NV.gather(1, tokens_N[:, None].clamp_min(0)).squeeze(1).float() - total_N
