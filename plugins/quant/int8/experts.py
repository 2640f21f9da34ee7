"""Routed experts in int8, with a scale per output channel, and inputs with one per row."""

from __future__ import annotations

import torch

from dovetail.core.layers.scaled_experts import ScaledExperts
from dovetail.plugins.quant.int8.format import INT8_TOKEN, quantize_rows


class Int8Experts(ScaledExperts):
    input = INT8_TOKEN

    def quantize(self, weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_rows(weight_OI)
