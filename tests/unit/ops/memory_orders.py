"""Orders in memory of the scales and zeros of a packed weight, or of those of experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops import packing


def by_group(weight: PackedWeight) -> PackedWeight:
    """Return the same weight, with outputs of a group next to each other."""
    zero_OG = weight.zero if weight.zero is None else packing.by_group(weight.zero)
    return replace(weight, scale=packing.by_group(weight.scale), zero=zero_OG)


def as_kept(weight: PackedWeight) -> PackedWeight:
    """Return the same weight as PackedLinear keeps it: scales in E4M3 in words, unless there are zeros."""
    if weight.scale.dtype is torch.float8_e4m3fn and weight.zero is None:
        return replace(weight, scale=packing.pack_scales(weight.scale))
    return by_group(weight)
