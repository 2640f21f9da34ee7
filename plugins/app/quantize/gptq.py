"""GPTQ (Frantar et al. 2022). Shapes: O outputs, I inputs, G groups of inputs, K inputs of a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from dovetail.plugins.app.quantize.grid import Grid, Quantized

BLOCK = 128


def gptq(
    weight_OI: torch.Tensor,
    gram_II: torch.Tensor,
    grid: Grid,
    damping: float = 0.01,
    act_order: Literal["none", "static", "group"] = "none",
) -> Quantized:
    """Quantize columns one after another. The error of each is made up for by those that follow, as the inverse of the
    Hessian, the Gram matrix of the inputs, prescribes; later blocks of columns are corrected a block at a time."""
    outputs, inputs = weight_OI.shape
    size, device = grid.size(inputs), weight_OI.device
    order_I = (
        gram_II.diagonal().argsort(descending=True) if act_order != "none" else torch.arange(inputs, device=device)
    )
    # Group of each column in the order of quantization.
    group_I = (order_I if act_order == "static" else torch.arange(inputs, device=device)) // size
    scale_OG, zero_OG = grid.fit(grid.grouped(weight_OI.float()))
    w_OI = weight_OI.float()[:, order_I]
    codes_OI, factor_II = torch.empty_like(w_OI), _factor(gram_II[order_I][:, order_I], damping)
    block = grid.group or BLOCK
    for start in range(0, inputs, block):
        end = min(start + block, inputs)
        if act_order != "static" and grid.group:
            g = start // size
            scale_OG[:, g : g + 1], zero_OG[:, g : g + 1] = grid.fit(w_OI[:, None, start:end])
        error_OK = torch.empty(outputs, end - start, device=device)
        for i in range(start, end):
            scale_O, zero_O = scale_OG[:, group_I[i]], zero_OG[:, group_I[i]]
            codes_OI[:, i] = grid.codes(w_OI[:, i], scale_O, zero_O)
            error_O = (w_OI[:, i] - (codes_OI[:, i] - zero_O) * scale_O) / factor_II[i, i]
            w_OI[:, i + 1 : end] -= error_O[:, None] * factor_II[i, i + 1 : end]
            error_OK[:, i - start] = error_O
        w_OI[:, end:] -= error_OK @ factor_II[start:end, end:]
    back_I = order_I.argsort()
    found = Quantized.of(grid, codes_OI[:, back_I], scale_OG, zero_OG)
    return replace(found, group_I=group_I[back_I].to(torch.int32)) if act_order == "group" else found


def _factor(gram_II: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped Hessian."""
    hessian_II = gram_II.clone()
    diagonal_I = hessian_II.diagonal()
    # An input that is always 0 has no influence; 1 keeps the matrix regular, and its weights round to nearest.
    diagonal_I[diagonal_I == 0] = 1.0
    diagonal_I += damping * diagonal_I.mean()
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(hessian_II))
    return torch.linalg.cholesky(inverse_II, upper=True)
