"""Expected work of routed experts on the busiest rank, for predictions. Imports no torch.

Routers are assumed to select every expert equally often. Ranks wait for the one with the most work in each layer. Its
excess over the mean is that of the largest of `ep` normal draws (Blom 1958).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from dovetail.core.interfaces import MoE


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """One layer, one step, the busiest of `ep` expert ranks."""

    distinct: float
    """Experts that at least one token selects there."""
    pairs: float
    """Pairs of token and expert there."""
    reads: float
    """`distinct` over the mean of all ranks."""
    products: float
    """`pairs` over the mean of all ranks."""


def expert_load(moe: MoE, tokens: int, ep: int, redundant: int = 0) -> ExpertLoad:
    """Return the load of a step of `tokens` tokens, at least one. `redundant`: copies of experts, over all ranks, which
    share the tokens of an expert equally."""
    each = (moe.experts + redundant) / ep
    fewest, more = divmod(redundant, moe.experts)
    mean_distinct = sum(
        experts * copies * (1 - (1 - moe.active / moe.experts) ** (tokens / copies)) / ep
        for experts, copies in ((moe.experts - more, 1 + fewest), (more, 2 + fewest))
    )
    chance, mean_pairs = mean_distinct / each, tokens * moe.active / ep
    spread = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25))
    distinct = min(each, mean_distinct + spread * math.sqrt(mean_distinct * (1 - chance)))
    most_pairs = tokens * min(moe.active, each)
    pairs = min(most_pairs, mean_pairs + spread * math.sqrt(mean_pairs * (1 - 1 / ep)))
    return ExpertLoad(distinct, pairs, distinct / mean_distinct, pairs / mean_pairs)


def exchanged_rows(exchange: str, active: int, tp: int, ep: int, lanes: int = 1) -> float:
    """Return the rows of the hidden size that a rank sends for each token of its replica's step, at both boundaries of
    a layer with experts. `exchange`: capability of a placement: "sum", "gather" or "all_to_all"."""
    within = 2 * (tp - 1) / tp  # A scatter and a gather, or an all-reduce.
    if exchange == "sum":
        return 2 * within
    share = 1 - (1 - 1 / ep) ** active if exchange == "all_to_all" else 1
    return within + 2 * share * (tp * lanes - 1) / tp
