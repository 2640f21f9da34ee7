"""GELU of a plain MLP (Hendrycks and Gimpel 2016). Shapes: T tokens, F intermediate columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Bundle
from dovetail.core.ops.formats import encode


def gelu(x_TF: torch.Tensor, tanh: bool = False, emit: tuple[ActFormat, ...] = (PLAIN,)) -> Bundle:
    """GELU in the requested formats. `tanh` selects the approximation that GPT-2 and GPT-J were trained with."""
    if x_TF.is_cuda:
        from dovetail.core.ops.kernels.activations import gelu_triton

        return gelu_triton(x_TF, tanh, emit)
    return gelu_reference(x_TF, tanh, emit)


def gelu_reference(x_TF: torch.Tensor, tanh: bool = False, emit: tuple[ActFormat, ...] = (PLAIN,)) -> Bundle:
    return encode(F.gelu(x_TF, approximate="tanh" if tanh else "none"), emit)
