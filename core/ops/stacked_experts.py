"""Products of routed experts whose matrices are packed in any WeightFormat, with a scale for each group of inputs. They
are decoded as they are read, and stay packed in memory. (core.ops.packed_experts has MXFP4 in a layout of its own.)

Shapes: T tokens, E experts, C hidden channels, F channels of an expert, O outputs, I inputs; W words and G groups of a
row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation
from dovetail.core.interfaces.expert import ExpertBias, GatedActivation, Routing
from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops.experts import ExpertWeights, gated_experts_reference
from dovetail.core.ops.packing import LANES, dequantize


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Matrices of a layer's experts: tensors of PackedWeight behind a dimension of experts, codes [E, O, W], scale and
    zero [E, O, G], row_scale [E, O]. Their formats may differ."""

    up: PackedWeight
    """2F outputs, gate before up; C inputs."""
    down: PackedWeight
    """C outputs, F inputs."""
    order_EC: torch.Tensor | None = None
    """int32: column of x at each place of `up`'s inputs (act-order); None = as in x."""


def fits_strips(group: int) -> bool:
    """Whether the kernel multiplies weights of which `group` inputs share a scale (0 = all)."""
    return group % LANES == 0 or LANES % group == 0


def unstacked(packed: PackedWeight) -> PackedWeight:
    """Return the matrices of all experts as one, below each other."""
    tensors = (packed.codes, packed.scale, packed.zero, packed.row_scale)
    codes, scale, zero, row_scale = (None if x is None else x.flatten(0, 1) for x in tensors)
    assert codes is not None and scale is not None
    return replace(packed, codes=codes, scale=scale, zero=zero, row_scale=row_scale)


def stacked_gated_experts(
    x: Activation,
    routing: Routing,
    weights: StackedExperts,
    activation: GatedActivation,
    bias: ExpertBias | None = None,
    *,
    between: ActFormat = PLAIN,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute core.ops.experts.gated_experts. x is in `dtype`, or in E4M3 with a scale per row, as is the input of the
    second product by `between`. Both are converted to `dtype` where products in E4M3 are not exact
    (core.ops.packed_matmul.multiplies_e4m3), or not faster."""
    if x.values.is_cuda:
        from dovetail.core.ops.kernels.stacked_experts import stacked_experts_triton

        return stacked_experts_triton(x, routing, weights, activation, bias, between, dtype)
    return stacked_experts_reference(x, routing, weights, activation, bias, between, dtype)


def stacked_experts_reference(
    x: Activation,
    routing: Routing,
    weights: StackedExperts,
    activation: GatedActivation,
    bias: ExpertBias | None,
    between: ActFormat,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Decode all matrices and multiply in float32."""
    up, down = (
        dequantize(unstacked(packed)).unflatten(0, packed.codes.shape[:2]) for packed in (weights.up, weights.down)
    )
    if weights.order_EC is not None:
        places_E1C = weights.order_EC.long().unsqueeze(1).expand_as(up)
        up = torch.empty_like(up).scatter_(2, places_E1C, up)
    plain = ExpertWeights(up, down, up.new_ones(up.shape[:2]), down.new_ones(down.shape[:2]))
    return gated_experts_reference(x, routing, plain, activation, bias, between, dtype)
