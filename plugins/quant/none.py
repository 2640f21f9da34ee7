"""quant=none: all layers stay plain."""

from __future__ import annotations

from dovetail.core.interfaces import LinearMethod, LinearShape, Quantizer
from dovetail.core.layers.plain import PlainLinear


class Unquantized(Quantizer):
    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        return PlainLinear()
