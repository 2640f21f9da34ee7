"""Number formats of a quantized checkpoint's weights, from the headers of its tensors. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from dovetail.core.checkpoint import located, open_checkpoint
from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader

if TYPE_CHECKING:
    from dovetail.core.compose import Selected
    from dovetail.core.interfaces import ModelSpec

_LAYER = re.compile(r"\.\d+\.")
"""Part of the names of tensors in layers; embedding and logits have no number."""


def stored_formats(quant: Selected, spec: ModelSpec, plain_bits: float) -> tuple[float, str | None] | None:
    """Return (bits of a weight in memory, on average over the matrices of layers; number format of most matmuls, None =
    the one that the quantizer states). None = the weights are plain or random, or the quantizer does not measure them.
    `plain_bits`: bits of an unquantized weight."""
    quantized = spec.hf is not None and spec.hf.get("quantization_config") is not None
    if spec.checkpoint is None or quant.component.stored is None or not quantized:
        return None
    measure = quant.registered.load(quant.component.stored)
    weights: Counter[str | None] = Counter()
    bits = 0.0
    checkpoint = open_checkpoint(spec.checkpoint)
    for prefix, headers in _matrices(checkpoint.tensors()).items():
        with located(checkpoint):
            found: StoredMatrix | None = measure(spec.hf, prefix, headers)
        if found is None:
            count = sum(prod(header.shape) for name, header in headers.items() if name != "bias")
            found = StoredMatrix(count, plain_bits, "model")
        weights[found.product] += found.weights
        bits += found.weights * found.bits
    return (bits / weights.total(), weights.most_common(1)[0][0]) if weights.total() else None


def _matrices(tensors: Mapping[str, TensorHeader]) -> dict[str, dict[str, TensorHeader]]:
    """Return the headers of each matrix of a layer by the rest of their names. Norms have vectors alone."""
    found: dict[str, dict[str, TensorHeader]] = {}
    for name, header in tensors.items():
        if _LAYER.search(name):
            at = name.find(".weight.")
            prefix = name[:at] if at >= 0 else name.rpartition(".")[0]
            found.setdefault(prefix, {})[name.removeprefix(f"{prefix}.")] = header
    return {name: headers for name, headers in found.items() if any(len(h.shape) > 1 for h in headers.values())}
