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


def best_logprobs(logits_NV: torch.Tensor, count: int) -> BestLogprobs:
    """Return the `count` most likely tokens, 1 <= count <= V, in float32. On a GPU the logits are read once."""
    if logits_NV.is_cuda:
        from dovetail.core.ops.kernels.logprobs import best_logprobs_triton

        return best_logprobs_triton(logits_NV, count)
    return best_logprobs_reference(logits_NV, count)


def best_logprobs_reference(logits_NV: torch.Tensor, count: int) -> BestLogprobs:
    logits_NV = logits_NV.float()
    total_N = logits_NV.logsumexp(-1)
    top = logits_NV.topk(count, dim=-1)
    return BestLogprobs(total_N, top.values - total_N[:, None], top.indices)
