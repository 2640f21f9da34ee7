"""Choice of each token's experts from a router's logits. Shapes: T tokens, E experts, K experts of a token, C channels,
G groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.core.interfaces.expert import Routing, RoutingRule
from dovetail.core.ops.tiles import MatmulTile

FEW_ROWS = 64
"""Number of rows up to which our matmul computes the logits, with the inputs split over programs."""
LOGITS_TILE = MatmulTile(16, 64, 128, split=16)
SMALL = 1e-20
"""Added to the sum by which scores are divided."""
MIX = (0x9E3779B1, 0x85EBCA6B)
"""Odd multipliers of the hash for RoutingRule.uniform (MurmurHash3)."""


def router_logits(
    x_TC: torch.Tensor, weight_EC: torch.Tensor, counts: torch.Tensor, bias_E: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight^T + bias in float32, from operands of one dtype; `bias_E` is float32. `counts`: as in
    ops.matmul.scaled_matmul."""
    if not x_TC.is_cuda or x_TC.dtype is torch.float32:
        return F.linear(x_TC.float(), weight_EC.float(), bias_E)
    if len(x_TC) <= FEW_ROWS:
        from dovetail.core.ops.kernels.matmul import matmul_triton

        return matmul_triton(x_TC.contiguous(), weight_EC, LOGITS_TILE, counts, bias_O=bias_E, dtype=torch.float32)
    logits_TE = torch.mm(x_TC, weight_EC.t(), out_dtype=torch.float32)
    return logits_TE if bias_E is None else logits_TE.add_(bias_E)


def route(
    logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None = None, live_T: torch.Tensor | None = None
) -> Routing:
    """Return the `rule.active` experts of each token, the best first, and behind them those that every token has.
    `bias_E` (float32) is added to the scores by which experts are selected, but not to those by which outputs are
    weighted (DeepSeek-V3, 2024). Tokens whose `live_T` is false have no experts."""
    if logits_TE.is_cuda:
        from dovetail.core.ops.kernels.routing import route_triton

        return route_triton(logits_TE, rule, bias_E, live_T)
    return route_reference(logits_TE, rule, bias_E, live_T)


def route_reference(
    logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None = None, live_T: torch.Tensor | None = None
) -> Routing:
    tokens = len(logits_TE)
    logits_TE = uniform_logits(logits_TE) if rule.uniform else logits_TE.float()
    scores_TE = logits_TE.softmax(-1) if rule.scores == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if rule.groups > 1:
        grouped_TGE = choice_TE.view(tokens, rule.groups, -1)
        best_TG = grouped_TGE.topk(min(rule.group_best, grouped_TGE.shape[2]), dim=2).values.sum(2)
        kept_TG = torch.zeros_like(best_TG, dtype=torch.bool)
        kept_TG.scatter_(1, best_TG.topk(rule.kept_groups, dim=1).indices, True)
        choice_TE = grouped_TGE.masked_fill(~kept_TG[:, :, None], float("-inf")).view(tokens, -1)
    # A stable sort: of equal scores the first expert wins, as in the kernel.
    experts_TK = choice_TE.sort(dim=1, descending=True, stable=True).indices[:, : rule.active]
    weights_TK = scores_TE.gather(1, experts_TK)
    if rule.normalize:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + SMALL)
    weights_TK = weights_TK * rule.scale
    experts_TK = experts_TK.int()
    if rule.always:
        always = torch.arange(rule.experts, rule.experts + rule.always, dtype=torch.int32)
        experts_TK = torch.cat([experts_TK, always.expand(tokens, -1)], dim=1)
        weights_TK = torch.cat([weights_TK, torch.ones(tokens, rule.always)], dim=1)
    if live_T is not None:
        experts_TK = torch.where(live_T[:, None], experts_TK, -1)
        weights_TK = torch.where(live_T[:, None], weights_TK, 0.0)
    return Routing(experts_TK, weights_TK)


def uniform_logits(logits_TE: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers in [0, 8), a hash of the logit's bits and the expert."""
    mask = (1 << 32) - 1
    bits_TE = logits_TE.float().view(torch.int32).long() & mask
    bits_TE = (bits_TE ^ (torch.arange(logits_TE.shape[1]) * MIX[1])) & mask
    bits_TE = (bits_TE ^ (bits_TE >> 15)) * MIX[0] & mask
    bits_TE = (bits_TE ^ (bits_TE >> 13)) * MIX[1] & mask
    return (bits_TE >> 8).float() * 2.0**-21
