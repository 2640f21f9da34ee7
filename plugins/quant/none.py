"""quant=none: all layers stay plain."""

from __future__ import annotations

from dovetail.core.interfaces import ExpertMethod, ExpertShape, LinearMethod, LinearShape, Quantizer
from dovetail.core.layers.plain import PlainLinear
from dovetail.core.layers.plain_experts import PlainExperts


class Unquantized(Quantizer):
    slot_paths = True

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        return PlainLinear()

    def experts(self, path: str, shape: ExpertShape) -> ExpertMethod:
        return PlainExperts()
