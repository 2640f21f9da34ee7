"""Rounding of plain weights to E2M1 with a scale for each block.

Shapes: O outputs, I inputs, G blocks of a row, K inputs of a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.plugins.quant.fp8.format import E4M3, LARGEST

LARGEST_CODE = 6.0
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between adjacent magnitudes of E2M1."""


def round_to_fp4(
    weight_OI: torch.Tensor, block: int, *, nvfp4: bool
) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor | None]:
    """Return (codes uint8 [O, I], scale_OG, no zeros, scale of each row float32 [O] for NVFP4) of a float32 matrix."""
    inputs = weight_OI.shape[1]
    blocks_OGK = F.pad(weight_OI, (0, -inputs % block)).unflatten(1, (-1, block))
    amax_OG = blocks_OGK.abs().amax(-1)
    row_scale_O = None
    if nvfp4:
        whole = (amax_OG.max() / (LARGEST * LARGEST_CODE)).clamp(min=torch.finfo(torch.float32).tiny)
        # The least positive scale, for blocks of zeros.
        stored_OG = (amax_OG / LARGEST_CODE / whole).clamp(2**-9, LARGEST).to(E4M3)
        row_scale_O, scale_OG = whole.expand(len(weight_OI)), stored_OG.float() * whole
    else:
        exponent_OG = amax_OG.clamp(min=2.0**-120).log2().floor() - 2
        stored_OG = scale_OG = torch.exp2(exponent_OG)
    values_OGK = blocks_OGK / scale_OG.unsqueeze(-1)
    magnitudes = torch.bucketize(values_OGK.abs(), torch.tensor(BOUNDS, device=weight_OI.device), out_int32=True)
    codes = magnitudes.to(torch.uint8) | (values_OGK < 0).to(torch.uint8) << 3
    return codes.flatten(1)[:, :inputs], stored_OG, None, row_scale_O
