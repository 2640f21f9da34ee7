"""From logits to tokens. N rows of logits, V vocabulary.

Greedy rows take the arg-max; random rows the arg-max of filtered logits plus Gumbel noise, so sampling needs neither a
normalised distribution nor, on a GPU, a sort.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dovetail.core.interfaces import Model
from dovetail.core.ops.step import best, draw, least_kept, scaled

if TYPE_CHECKING:
    from dovetail.core.engine.device_state import DeviceState

DRAWS = ((False, False), (True, False), (True, True))
"""Kinds of drawing: whether some row is random, and whether some row is filtered."""


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


def least_logit(logits_NV: torch.Tensor, params: SampleParams) -> torch.Tensor | None:
    """Of each row, what its filters keep; None = no row has any."""
    if not params.filtered:
        return None
    return least_kept(logits_NV, params.temperature_N, params.top_k_N, params.top_p_N, params.min_p_N)


def sample(logits_NV: torch.Tensor, position_N: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """One token id a row, int64 [N]; position_N counts the tokens before the one drawn."""
    least_N = least_logit(logits_NV, params)
    return draw(logits_NV, position_N, params.temperature_N, params.key_N, params.random, least_N)


def rehearse_float32(state: DeviceState, vocab: int) -> None:
    """Draw in each way from what a logits processor returns, so that nobody's first penalty waits for kernels."""
    logits_NV = torch.zeros(1, vocab, device=state.device)
    slots_N = torch.tensor([state.scratch], device=state.device)
    of_slots = state.temperature_S, state.top_k_S, state.top_p_S, state.min_p_S, state.key_S
    temperature_N, top_k_N, top_p_N, min_p_N, key_N = (t[slots_N] for t in of_slots)
    for random, filtered in DRAWS:
        params = SampleParams(temperature_N, top_k_N, top_p_N, min_p_N, key_N, random=random, filtered=filtered)
        sample(logits_NV, slots_N, params)


def sample_over_ranks(
    model: Model, states_NC: torch.Tensor, position_N: torch.Tensor, params: SampleParams
) -> torch.Tensor:
    """`sample` of the model's logits, for rows without filters: each rank draws from its part of the vocabulary, and
    they agree on the best of these. No rank sees all logits."""
    logits_NV, first = model.local_logits(states_NC)
    given = position_N, params.temperature_N, params.key_N, params.random
    if logits_NV.shape[1] == model.build.spec.vocab:
        return draw(logits_NV, *given)
    return model.build.collective.argmax(*best(logits_NV, *given, first=first))


def probabilities(logits_NV: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """The distribution `sample` draws from, float32 [N, V]; a point mass for greedy rows."""
    scaled_NV = scaled(logits_NV, params.temperature_N)
    least_N = least_logit(logits_NV, params)
    if least_N is not None:
        scaled_NV = scaled_NV.masked_fill(logits_NV.float() < least_N[:, None], float("-inf"))
    greedy = torch.nn.functional.one_hot(logits_NV.argmax(-1), logits_NV.shape[-1]).float()
    return torch.where((params.temperature_N > 0)[:, None], scaled_NV.softmax(-1), greedy)
