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
    """Matrices of a layer's experts, in the model's dtype or in E4M3 with a scale per output channel."""

    up: torch.Tensor
    """[E, 2F, C]: gate, then up."""
    down: torch.Tensor
    """[E, C, F]"""
    up_scale: torch.Tensor | None = None
    """float32 [E, 2F]"""
    down_scale: torch.Tensor | None = None
    """float32 [E, C]"""


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
    ends_E = (key_P[:, None] == torch.arange(experts)).sum(0).cumsum(0).int()
    expert_P = key_P[order_P].clamp(max=experts - 1)
    up_P2F = _product(x.values[order_P // width], weights.up, ends_E, dtype)
    if weights.up_scale is not None and x.scale is not None:
        up_P2F = up_P2F * x.scale[order_P // width] * weights.up_scale[expert_P]
    if bias is not None:
        up_P2F = up_P2F + bias.up[expert_P]
    inner = encode(activation.reference(*up_P2F.chunk(2, dim=1)).to(dtype), (between,))[between]
    down_PC = _product(inner.values, weights.down, ends_E, dtype)
    if weights.down_scale is not None and inner.scale is not None:
        down_PC = down_PC * inner.scale * weights.down_scale[expert_P]
    if bias is not None:
        down_PC = down_PC + bias.down[expert_P]
    by_pair_PC = torch.empty_like(down_PC).index_copy_(0, order_P, down_PC)
    weighted_PC = torch.where(pairs_P[:, None] >= 0, by_pair_PC * routing.weights_TK.flatten()[:, None], 0.0)
    return weighted_PC.view(-1, width, weighted_PC.shape[1]).sum(1).to(dtype)


def _product(x_PI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply consecutive rows, up to each expert's end, by the expert's matrix. Rows past the last end have any
    values. The result is float32."""
    if weight_EOI.element_size() == 1:
        x_PI, weight_EOI = x_PI.float(), weight_EOI.float()
    # torch's grouped product takes rows of multiples of 16 bytes.
    if missing := -x_PI.shape[1] % (16 // x_PI.element_size()):
        x_PI, weight_EOI = F.pad(x_PI, (0, missing)), F.pad(weight_EOI, (0, missing))
    return F.grouped_mm(x_PI, weight_EOI.transpose(1, 2), offs=ends_E).float()
