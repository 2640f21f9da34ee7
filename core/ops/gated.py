"""The gate of a gated MLP: silu(gate) * up (SwiGLU, Shazeer 2020) or gelu(gate) * up (GEGLU). Shapes: T tokens, F
intermediate columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Bundle
from dovetail.core.ops.formats import encode


def silu_and_mul(gate_up_T2F: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)) -> Bundle:
    """silu(gate) * up of [T, gate | up]: [T, F] in the requested formats."""
    if gate_up_T2F.is_cuda:
        from dovetail.core.ops.kernels.gated import silu_and_mul_triton

        return silu_and_mul_triton(gate_up_T2F, emit)
    return silu_and_mul_reference(gate_up_T2F, emit)


def silu_and_mul_reference(gate_up_T2F: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)) -> Bundle:
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return encode(F.silu(gate) * up, emit)


def gelu_and_mul(gate_up_T2F: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)) -> Bundle:
    """gelu(gate) * up of [T, gate | up], with the tanh approximation: [T, F] in the requested formats."""
    if gate_up_T2F.is_cuda:
        from dovetail.core.ops.kernels.gated import gelu_and_mul_triton

        return gelu_and_mul_triton(gate_up_T2F, emit)
    return gelu_and_mul_reference(gate_up_T2F, emit)


def gelu_and_mul_reference(gate_up_T2F: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)) -> Bundle:
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return encode(F.gelu(gate, approximate="tanh") * up, emit)
