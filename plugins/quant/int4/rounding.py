"""Round-to-nearest quantization of groups of inputs. Shapes: O outputs, I inputs, G groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from dovetail.core.interfaces.weight import WeightFormat


def round_to_nearest(
    weight_OI: torch.Tensor, group: int, fmt: WeightFormat, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (codes uint8 [O, I], scale_OG, zero uint8 [O, G] or None) of a float32 matrix. `group`: 0 = whole rows.
    The largest magnitude, or the range including 0, fills the codes."""
    outputs, inputs = weight_OI.shape
    size = group or inputs
    groups_OGK = F.pad(weight_OI, (0, -inputs % size)).unflatten(1, (-1, size))
    levels = 2**fmt.bits - 1
    if fmt.zero:
        least, greatest = groups_OGK.amin(-1).clamp(max=0), groups_OGK.amax(-1).clamp(min=0)
        scale_OG = _usable((greatest - least) / levels, scale_dtype)
        zero_OG = (-least / scale_OG).round().clamp(0, levels)
    else:
        scale_OG = _usable(groups_OGK.abs().amax(-1) * 2 / levels, scale_dtype)
        zero_OG = torch.full_like(scale_OG, 2 ** (fmt.bits - 1))
    codes_OGK = (groups_OGK / scale_OG.unsqueeze(-1) + zero_OG.unsqueeze(-1)).round().clamp(0, levels)
    codes_OI = codes_OGK.flatten(1)[:, :inputs].to(torch.uint8)
    return codes_OI, scale_OG, zero_OG.to(torch.uint8) if fmt.zero else None


def _usable(scale_OG: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to the dtype in which scales are stored. Groups of zeros must not divide by zero."""
    rounded = scale_OG.to(dtype).float()
    return rounded.clamp(min=torch.finfo(torch.float16 if dtype is torch.float16 else torch.float32).tiny)
