"""Products of routed experts: each token's rows with the matrices of its experts, and their weighted sum.

Shapes: T tokens, K experts of a token, P = T * K pairs of token and expert, E experts, C hidden channels, F channels of
an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation
from dovetail.core.interfaces.expert import ExpertBias, GatedActivation, Routing
from dovetail.core.ops.formats import encode


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Matrices of a layer's experts, in the model's dtype, in E4M3 with scales per output channel or block, or in int8
    with scales per output channel."""

    up: torch.Tensor
    """[E, 2F, C]: gate, then up."""
    down: torch.Tensor
    """[E, C, F]"""
    up_scale: torch.Tensor | None = None
    """float32 [E, 2F]; with blocks [E, 2f, c], where f and c are the numbers of groups of F and of C."""
    down_scale: torch.Tensor | None = None
    """float32 [E, C]; with blocks [E, c, f]."""
    block: tuple[int, int] | None = None
    """Channels of C, and of F, that share a scale. The last group may be smaller. None = a scale per output channel."""


def gated_experts(
    x: Activation,
    routing: Routing,
    weights: ExpertWeights,
    activation: GatedActivation,
    bias: ExpertBias | None = None,
    *,
    between: ActFormat = PLAIN,
    dtype: torch.dtype,
    fast_accum: bool = True,
) -> torch.Tensor:
    """Return [T, C] in `dtype`: the sum over each token's experts, in their order, of weight * down(activation(gate(x),
    up(x))). Products are summed in float32. `between`: format of the second product's input, PLAIN or with a scale per
    row. `fast_accum`: as in ops.matmul.scaled_matmul."""
    if x.values.is_cuda:
        from dovetail.core.ops.kernels.experts import gated_experts_triton

        return gated_experts_triton(x, routing, weights, activation, bias, between, dtype, fast_accum)
    return gated_experts_reference(x, routing, weights, activation, bias, between, dtype)


def gated_experts_reference(
    x: Activation,
    routing: Routing,
    weights: ExpertWeights,
    activation: GatedActivation,
    bias: ExpertBias | None,
    between: ActFormat,
    dtype: torch.dtype,
) -> torch.Tensor:
    experts, width = len(weights.up), routing.experts_TK.shape[1]
    pairs_P = routing.experts_TK.flatten().long()
    # Pairs without an expert come last, and no product has them.
    key_P = torch.where(pairs_P < 0, experts, pairs_P)
    order_P = key_P.argsort(stable=True)
    ends_E = (key_P[:, None] == torch.arange(experts, device=key_P.device)).sum(0).cumsum(0).int()
    expert_P = key_P[order_P].clamp(max=experts - 1)
    up, down, up_scale, down_scale = _without_blocks(weights)
    up_P2F = _product(x.values[order_P // width], up, ends_E)
    if up_scale is not None and x.scale is not None:
        up_P2F = up_P2F * x.scale[order_P // width] * up_scale[expert_P]
    if bias is not None:
        up_P2F = up_P2F + bias.up[expert_P]
    inner = encode(activation.reference(*up_P2F.chunk(2, dim=1)).to(dtype), (between,))[between]
    down_PC = _product(inner.values, down, ends_E)
    if down_scale is not None and inner.scale is not None:
        down_PC = down_PC * inner.scale * down_scale[expert_P]
    if bias is not None:
        down_PC = down_PC + bias.down[expert_P]
    by_pair_PC = torch.empty_like(down_PC).index_copy_(0, order_P, down_PC)
    weighted_PC = torch.where(pairs_P[:, None] >= 0, by_pair_PC * routing.weights_TK.flatten()[:, None], 0.0)
    return weighted_PC.view(-1, width, weighted_PC.shape[1]).sum(1).to(dtype)


def _without_blocks(
    weights: ExpertWeights,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return matrices and their scales per output channel: all 1 for blocks, whose scales are applied to the matrix."""
    up, down, up_scale, down_scale = weights.up, weights.down, weights.up_scale, weights.down_scale
    if weights.block is None or up_scale is None or down_scale is None:
        return up, down, up_scale, down_scale
    of_c, of_f = weights.block
    gates = [_spread(_spread(half, of_f, 1), of_c, 2) for half in up_scale.chunk(2, dim=1)]
    hidden, channels = down.shape[1:]
    wide_up = torch.cat([gate[:, :channels, :hidden] for gate in gates], dim=1) * up.float()
    wide_down = _spread(_spread(down_scale, of_c, 1), of_f, 2)[:, :hidden, :channels] * down.float()
    return wide_up, wide_down, wide_up.new_ones(wide_up.shape[:2]), wide_down.new_ones(wide_down.shape[:2])


def _spread(scale: torch.Tensor, group: int, dim: int) -> torch.Tensor:
    return scale.repeat_interleave(group, dim)


def _product(x_PI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply consecutive rows, up to each expert's end, by the expert's matrix. Rows past the last end have any
    values. The result is float32."""
    if x_PI.dtype is not weight_EOI.dtype or x_PI.element_size() == 1:
        x_PI, weight_EOI = x_PI.float(), weight_EOI.float()
    # torch's grouped product takes rows of multiples of 16 bytes.
    if missing := -x_PI.shape[1] % (16 // x_PI.element_size()):
        x_PI, weight_EOI = F.pad(x_PI, (0, missing)), F.pad(weight_EOI, (0, missing))
    return F.grouped_mm(x_PI, weight_EOI.transpose(1, 2), offs=ends_E).float()
