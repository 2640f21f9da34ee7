"""Number formats of a quantizer with different ones for some layers. Imports no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.core.interfaces import ModelSpec

Stated = Mapping[str, Any]
"""Capabilities that a quantizer provides."""
EXPERT = "layers.{}.mlp.experts.0.gate_up"
"""Path of a matrix that stands for those of a layer's routed experts."""


def over_layers(stated: Stated, spec: ModelSpec, plain_bits: float) -> Stated:
    """Return capabilities that count `of_layers` in, if it is stated: `weight_bits` is the mean over the model's
    attention and MLP matrices, as is `copy_bits`, `product` that of most weights, and `expert_bits` the mean over
    layers.

    `of_layers` is a sequence of (patterns of paths, capabilities of these layers), of which the first that matches
    counts. Layers that none matches have `stated`. What some of them do not state is None for all. `plain_bits`: bits
    of an unquantized weight.
    """
    if (of_layers := stated.get("of_layers")) is None:
        return stated
    parts: list[Stated] = [stated, *(those for _, those in of_layers)]
    if missing := [key for key in ("weight_bits", "product") if any(part.get(key) is None for part in parts)]:
        return {**stated, **dict.fromkeys(missing)}
    bits, copies, weights = 0.0, 0.0, defaultdict[Any, float](float)
    for path, share in _matrices(spec):
        found = _of(path, of_layers, stated)
        own = _bits(found["weight_bits"], plain_bits)
        bits += share * own
        copies += share * copy_bits(found, found["product"], own)
        weights[found["product"]] += share
    if not weights:
        return stated
    experts = [_of(EXPERT.format(layer), of_layers, stated) for layer in range(spec.layers)]
    expert_bits = [_bits(one.get("expert_bits") or one["weight_bits"], plain_bits) for one in experts]
    return {
        **stated,
        "weight_bits": bits / sum(weights.values()),
        "product": max(weights, key=weights.__getitem__),
        "expert_bits": sum(expert_bits) / len(expert_bits),
        "copy_bits": copies / sum(weights.values()),
        "copies": True,
    }


def copy_bits(stated: Stated, product: str, bits: float) -> float:
    """Return the bits per weight of rounded weights that stay in memory: those of fewer than 8 bits that are multiplied
    in fp8 have any. Capabilities of mixed layers (`copies`) count them already."""
    kept = stated.get("copies") or (product == "fp8" and bits < 8)
    return float(stated.get("copy_bits", 0)) if kept else 0.0


def _of(path: str, of_layers: Sequence[tuple[Sequence[str], Stated]], rest: Stated) -> Stated:
    return next((those for patterns, those in of_layers if any(fnmatch(path, p) for p in patterns)), rest)


def _bits(bits: Any, plain_bits: float) -> float:
    return plain_bits if bits == "model" else float(bits)


def _matrices(spec: ModelSpec) -> Iterator[tuple[str, float]]:
    """Yield (path, number of weights) of the matrices of attention and MLPs. Layers are taken to be alike, and MLPs to
    be gated."""
    if spec.parameters is None:
        return
    queries, others = spec.heads, 2 * spec.kv_heads
    qkv = (queries + others) / (2 * queries + others)
    shares = {
        "attn.qkv": spec.parameters.attention * qkv,
        "attn.o": spec.parameters.attention * (1 - qkv),
        "mlp.gate_up": spec.parameters.mlp * 2 / 3,
        "mlp.down": spec.parameters.mlp / 3,
    }
    for layer in range(spec.layers):
        for name, weights in shares.items():
            yield f"layers.{layer}.{name}", weights / spec.layers
