"""From logits to tokens. N rows of logits, V vocabulary.

Greedy rows take the arg-max; random rows the arg-max of filtered logits plus Gumbel noise, so sampling needs neither a
normalised distribution nor a sort unless top-k or top-p asks for one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.core.ops.step import draw


@dataclass(frozen=True, slots=True)
class SampleParams:
    """Sampling parameters of each row, and what the host knows of all of them."""

    temperature_N: torch.Tensor
    top_k_N: torch.Tensor
    top_p_N: torch.Tensor
    min_p_N: torch.Tensor
    key_N: torch.Tensor
    random: bool
    """Some row is not greedy."""
    filtered: bool
    """Some row uses top-k, top-p or min-p."""


def filter_logits(logits_NV: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """Scaled by temperature, with everything outside top-k, top-p and min-p at -inf. Greedy rows come out unscaled.

    Order as in Hugging Face's warpers: temperature, top-k, top-p, min-p; the most likely token always stays.
    """
    temperature = torch.where(params.temperature_N > 0, params.temperature_N, 1.0)
    scaled = logits_NV / temperature[:, None]
    if not params.filtered:
        return scaled
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    vocab = scaled.shape[-1]
    rank = torch.arange(vocab, device=scaled.device)
    limit = torch.where(params.top_k_N > 0, params.top_k_N, vocab)
    ordered = ordered.masked_fill(rank >= limit[:, None], float("-inf"))
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    drop = (before >= params.top_p_N[:, None]) & (params.top_p_N < 1)[:, None]
    drop |= probs < params.min_p_N[:, None] * probs[:, :1]
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, index, ordered)


def sample(logits_NV: torch.Tensor, position_N: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """One token id a row, int64 [N]; position_N counts the tokens before the one drawn."""
    temperature_N = params.temperature_N
    if params.filtered:
        logits_NV = filter_logits(logits_NV.float(), params)
        temperature_N = (temperature_N > 0).float()
    return draw(logits_NV, position_N, temperature_N, params.key_N, params.random)


def probabilities(logits_NV: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """The distribution `sample` draws from, float32 [N, V]; a point mass for greedy rows."""
    logits_NV = logits_NV.float()
    probs = filter_logits(logits_NV, params).softmax(-1)
    greedy = torch.nn.functional.one_hot(logits_NV.argmax(-1), logits_NV.shape[-1]).to(probs.dtype)
    return torch.where((params.temperature_N > 0)[:, None], probs, greedy)
