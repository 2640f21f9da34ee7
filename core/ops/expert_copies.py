"""Choice of a copy of an expert for each token, and counts of tokens by expert.

Shapes: T tokens, K experts of a token, E experts, M copies of an expert, N pairs of token and expert.
"""

from __future__ import annotations

import torch


def locate_copies(
    experts_TK: torch.Tensor,
    rank_EM: torch.Tensor,
    slot_EM: torch.Tensor,
    copies_E: torch.Tensor,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rank and the slot of each token's experts, both int32 [T, K], -1 where there is none. The tokens take
    the `copies_E` (int32) copies of an expert in turn, by their number from `first` on. All others are int32, too."""
    if experts_TK.is_cuda:
        from dovetail.core.ops.kernels.expert_copies import locate_copies_triton

        return locate_copies_triton(experts_TK, rank_EM, slot_EM, copies_E, first)
    return locate_copies_reference(experts_TK, rank_EM, slot_EM, copies_E, first)


def locate_copies_reference(
    experts_TK: torch.Tensor,
    rank_EM: torch.Tensor,
    slot_EM: torch.Tensor,
    copies_E: torch.Tensor,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    at_TK, none_TK = experts_TK.clamp(min=0), experts_TK < 0
    copy_TK = torch.arange(first, first + len(experts_TK), device=experts_TK.device)[:, None] % copies_E[at_TK]
    ranks_TK, slots_TK = rank_EM[at_TK, copy_TK], slot_EM[at_TK, copy_TK]
    return ranks_TK.masked_fill(none_TK, -1), slots_TK.masked_fill(none_TK, -1)


def count_experts(experts_TK: torch.Tensor, loads_E: torch.Tensor) -> None:
    """Add the number of tokens of each expert to `loads_E` (int64). -1 counts for none."""
    if experts_TK.is_cuda:
        from dovetail.core.ops.kernels.expert_copies import count_experts_triton

        count_experts_triton(experts_TK, loads_E)
    else:
        count_experts_reference(experts_TK, loads_E)


def count_experts_reference(experts_TK: torch.Tensor, loads_E: torch.Tensor) -> None:
    experts_N = experts_TK.flatten().long()
    loads_E.scatter_add_(0, experts_N.clamp(min=0), (experts_N >= 0).long())
