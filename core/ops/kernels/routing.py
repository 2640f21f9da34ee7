"""Selection of experts, with one program per token. Shapes: T tokens, E experts, K experts of a token, G groups."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import power_of_2
from dovetail.core.interfaces.expert import Routing, RoutingRule
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.routing import MIX, SMALL

MIX_0, MIX_1 = tl.constexpr(MIX[0]), tl.constexpr(MIX[1])
LEAST = tl.constexpr(SMALL)
LAST = tl.constexpr(-1e30)
"""Score by which an expert whose score is NaN is selected: after all others. The sum of two is not -inf."""


@triton.jit
def _hash(logits, columns):
    bits = logits.to(tl.uint32, bitcast=True) ^ (columns.to(tl.uint32) * MIX_1)
    bits = (bits ^ (bits >> 15)) * MIX_0
    bits = (bits ^ (bits >> 13)) * MIX_1
    return (bits >> 8).to(tl.float32) * 4.76837158203125e-7


@triton.jit
def _keep_groups(choice, GROUPS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, SIZE: tl.constexpr):
    """Return the choice [GROUPS, SIZE], in which places without an expert are -inf, with -inf in all but the KEPT
    groups whose best BEST (1 or 2) have the largest sums."""
    inner = tl.arange(0, SIZE)[None, :]
    group = tl.arange(0, GROUPS)
    sums = tl.max(choice, axis=1)
    if SIZE > 1 and BEST > 1:
        best = tl.argmax(choice, axis=1)
        sums += tl.max(tl.where(inner == best[:, None], float("-inf"), choice), axis=1)
    kept = tl.zeros((GROUPS,), tl.int1)
    for _ in tl.static_range(KEPT):
        found = tl.argmax(tl.where(kept, float("-inf"), sums), axis=0)
        kept = kept | (group == found)
    return tl.where(kept[:, None], choice, float("-inf"))


@triton.jit
def _route(
    logits_ptr,
    bias_ptr,
    live_ptr,
    experts_ptr,
    weights_ptr,
    scale,
    EXPERTS: tl.constexpr,
    ACTIVE: tl.constexpr,
    ALWAYS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BEST: tl.constexpr,
    UNIFORM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each of BLOCK_G groups has BLOCK_E places, of which the first are experts."""
    announce(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    place = tl.arange(0, BLOCK_G * BLOCK_E)
    inside = (place // BLOCK_E < GROUPS) & (place % BLOCK_E < SIZE)
    columns = place // BLOCK_E * SIZE + place % BLOCK_E
    logits = tl.load(logits_ptr + row * EXPERTS + columns, mask=inside, other=float("-inf"))
    if UNIFORM:
        logits = tl.where(inside, _hash(logits, columns), float("-inf"))
    if SOFTMAX:
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + columns, mask=inside, other=0.0)
    # A comparison with NaN is false: its experts come last, and each once, so that NaN is in the weights.
    choice = tl.where(inside, tl.where(choice == choice, choice, LAST), float("-inf"))
    if GROUPS > 1:
        grouped = _keep_groups(tl.reshape(choice, (BLOCK_G, BLOCK_E)), BLOCK_G, KEPT, BEST, BLOCK_E)
        choice = tl.reshape(grouped, (BLOCK_G * BLOCK_E,))
    slot = tl.arange(0, BLOCK_K)
    experts = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(ACTIVE):
        chosen = place == tl.argmax(choice, axis=0).to(tl.int32)
        # Places outside are never better than an expert; a bias of minus infinity makes some equal.
        best = tl.minimum(tl.sum(tl.where(chosen, columns, 0), axis=0), EXPERTS - 1)
        score = tl.sum(tl.where(chosen, scores, 0.0), axis=0)
        experts = tl.where(slot == k, best, experts)
        weights = tl.where(slot == k, score, weights)
        choice = tl.where(chosen, float("-inf"), choice)
    if NORMALIZE:
        weights = weights / (tl.sum(weights, axis=0) + LEAST)
    weights = weights * scale
    COUNT: tl.constexpr = ACTIVE + ALWAYS
    if ALWAYS:
        experts = tl.where(slot < ACTIVE, experts, EXPERTS + slot - ACTIVE)
        weights = tl.where(slot < ACTIVE, weights, 1.0)
    if live_ptr is not None:
        live = tl.load(live_ptr + row) != 0
        experts = tl.where(live, experts, -1)
        weights = tl.where(live, weights, 0.0)
    tl.store(experts_ptr + row * COUNT + slot, experts, mask=slot < COUNT)
    tl.store(weights_ptr + row * COUNT + slot, weights, mask=slot < COUNT)


def route_triton(
    logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None = None, live_T: torch.Tensor | None = None
) -> Routing:
    tokens, count, device = len(logits_TE), rule.active + rule.always, logits_TE.device
    experts_TK = torch.empty(tokens, count, dtype=torch.int32, device=device)
    weights_TK = torch.empty(tokens, count, dtype=torch.float32, device=device)
    if tokens:
        groups, size = (power_of_2(n) for n in (rule.groups, rule.experts // rule.groups))
        _route[(tokens,)](
            logits_TE.contiguous(),
            bias_E,
            None if live_T is None else live_T.view(torch.int8),
            experts_TK,
            weights_TK,
            rule.scale,
            EXPERTS=rule.experts,
            ACTIVE=rule.active,
            ALWAYS=rule.always,
            SOFTMAX=rule.scores == "softmax",
            NORMALIZE=rule.normalize,
            GROUPS=rule.groups,
            KEPT=rule.kept_groups,
            BEST=rule.group_best,
            UNIFORM=rule.uniform,
            BLOCK_G=groups,
            BLOCK_E=size,
            BLOCK_K=power_of_2(count),
            num_warps=1 if groups * size <= 256 else 4,
            **dependent(logits_TE),
        )
    return Routing(experts_TK, weights_TK)
