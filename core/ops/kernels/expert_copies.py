"""Copies of experts, with one thread for each pair of token and expert. Shapes: T tokens, K experts of a token, E
experts, M copies of an expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.kernels.launch import announce, dependent, wait

BLOCK = 256
"""Pairs of a program."""


@triton.jit(do_not_specialize=["pairs", "first"])
def _locate_copies(
    experts_ptr,
    rank_ptr,
    slot_ptr,
    copies_ptr,
    ranks_ptr,
    slots_ptr,
    pairs,
    first,
    ACTIVE: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """MOST: M."""
    announce(PDL)
    wait(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(experts_ptr + pair, mask=inside, other=-1)
    some = expert >= 0
    copy = (first + pair // ACTIVE) % tl.load(copies_ptr + expert, mask=some, other=1)
    place = expert * MOST + copy
    tl.store(ranks_ptr + pair, tl.load(rank_ptr + place, mask=some, other=-1), mask=inside)
    tl.store(slots_ptr + pair, tl.load(slot_ptr + place, mask=some, other=-1), mask=inside)


@triton.jit(do_not_specialize=["pairs"])
def _count_experts(experts_ptr, loads_ptr, pairs, BLOCK: tl.constexpr, PDL: tl.constexpr):
    announce(PDL)
    wait(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts_ptr + pair, mask=pair < pairs, other=-1)
    one = tl.full((BLOCK,), 1, tl.int64)
    tl.atomic_add(loads_ptr + expert, one, mask=expert >= 0, sem="relaxed")


def locate_copies_triton(
    experts_TK: torch.Tensor, rank_EM: torch.Tensor, slot_EM: torch.Tensor, copies_E: torch.Tensor, first: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    experts_TK = experts_TK.contiguous()
    ranks_TK, slots_TK = torch.empty_like(experts_TK), torch.empty_like(experts_TK)
    if pairs := experts_TK.numel():
        _locate_copies[(ceil_div(pairs, BLOCK),)](
            experts_TK,
            rank_EM,
            slot_EM,
            copies_E,
            ranks_TK,
            slots_TK,
            pairs,
            first,
            ACTIVE=experts_TK.shape[1],
            MOST=rank_EM.shape[1],
            BLOCK=BLOCK,
            **dependent(experts_TK),
        )
    return ranks_TK, slots_TK


def count_experts_triton(experts_TK: torch.Tensor, loads_E: torch.Tensor) -> None:
    experts_TK = experts_TK.contiguous()
    if pairs := experts_TK.numel():
        grid = (ceil_div(pairs, BLOCK),)
        _count_experts[grid](experts_TK, loads_E, pairs, BLOCK=BLOCK, **dependent(experts_TK))
