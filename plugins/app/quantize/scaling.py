"""Scales of input channels that a preceding norm or matrix takes over: AWQ (Lin et al. 2023) and SmoothQuant (Xiao et
al. 2022). Shapes: O outputs, I inputs."""

from __future__ import annotations

import torch

from dovetail.plugins.app.quantize.grid import Grid, round_to_nearest

STEPS = 20


def awq_scale(weight_OI: torch.Tensor, gram_II: torch.Tensor, mean_I: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the scale mean**alpha whose alpha in [0, 1) has the least squared error of the outputs, when the scaled
    weights are rounded. `mean_I`: mean magnitude of each input; `gram_II`: Gram matrix of the inputs."""
    best, least = torch.ones_like(mean_I), torch.inf
    for step in range(STEPS):
        scale_I = mean_I.clamp(min=1e-5) ** (step / STEPS)
        scale_I /= (scale_I.max() * scale_I.min()).sqrt()
        off_OI = round_to_nearest(weight_OI * scale_I, grid).values(torch.float32) / scale_I - weight_OI
        error = ((off_OI @ gram_II) * off_OI).sum().item()
        if error < least:
            best, least = scale_I, error
    return best


def smooth_scale(weight_OI: torch.Tensor, largest_I: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return max|x|**alpha / max|w|**(1 - alpha) of each input. `largest_I`: its largest magnitude."""
    weights_I = weight_OI.abs().amax(0).clamp(min=1e-5)
    return (largest_I.clamp(min=1e-5) ** alpha / weights_I ** (1 - alpha)).clamp(min=1e-5)


def fold(before: torch.Tensor, scale_I: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide a norm's weight [I], or the rows of a matrix [I, ...], by the scale. Returns (the result in its dtype, the
    scale that this is exactly for a norm, whose weight was rounded)."""
    divided = (before.float() / scale_I.view(-1, *[1] * (before.dim() - 1))).to(before.dtype)
    if before.dim() > 1:
        return divided, scale_I
    usable = (divided != 0) & before.isfinite()
    return torch.where(usable, divided, before), torch.where(usable, before.float() / divided.float(), 1.0)
