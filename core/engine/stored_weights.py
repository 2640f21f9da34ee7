"""Number formats of a quantized checkpoint's weights, from the headers of its tensors. Imports no torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from dovetail.core.checkpoint import located, open_checkpoint
from dovetail.core.compose.capabilities import Host
from dovetail.core.interfaces.checkpoint import StoredMatrix, TensorHeader

if TYPE_CHECKING:
    from dovetail.core.compose import Selected
    from dovetail.core.interfaces import ModelSpec

_LAYER = re.compile(r"\.\d+\.")
"""Part of the names of tensors in layers; embedding and logits have no number."""
_EXPERTS = re.compile(r"\.experts(\.|$)")
_HEAD = "lm_head"
"""Name of the matrix of logits in checkpoints; any other table is the embedding."""


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """Number formats of a quantized checkpoint's weights in memory."""

    bits: float
    """Bits of a weight, on average over the matrices of layers, but for those of routed experts."""
    product: str | None
    """Number format of most matmuls; None = the one that the quantizer states."""
    head: StoredMatrix | None
    """Matrix of logits, or the embedding if the file has no other table; None = plain."""
    embedding: StoredMatrix | None
    """None = plain."""
    expert_bits: float | None
    """The same as `bits` for routed experts; None = the file has none."""


def table_formats(stated: Mapping[str, Any], stored: StoredFormats | None) -> dict[str, Any]:
    """Return `head_bits`, `head_product`, `embedding_bits` and `expert_bits` of Formats: those of the file if it has
    quantized tables or experts, and else the quantizer's capabilities of these names."""
    found = {key: stated.get(key) for key in ("head_bits", "head_product", "embedding_bits", "expert_bits")}
    if stored is not None and stored.expert_bits is not None:
        found["expert_bits"] = stored.expert_bits
    if stored is not None and stored.head is not None:
        found |= {"head_bits": stored.head.bits, "head_product": stored.head.product}
    if stored is not None and stored.embedding is not None:
        found["embedding_bits"] = stored.embedding.bits
    if found["head_product"] == "model":
        found["head_product"] = None
    return found


def stored_formats(quant: Selected, spec: ModelSpec, plain_bits: float) -> StoredFormats | None:
    """Return the formats that the headers show; None = the weights are plain or random, or the quantizer does not
    measure them. `plain_bits`: bits of an unquantized weight."""
    quantized = spec.hf is not None and spec.hf.get("quantization_config") is not None
    if spec.checkpoint is None or quant.component.stored is None or not quantized:
        return None
    measure = quant.registered.load(quant.component.stored)
    fixed: Any = quant.capabilities(Host(device="cuda")).provides.get("fixed_product") or ()
    weights: Counter[str | None] = Counter()
    # Weights and their bits, of routed experts and of others.
    sums = {True: [0, 0.0], False: [0, 0.0]}
    tables: dict[str, StoredMatrix | None] = {}
    checkpoint = open_checkpoint(spec.checkpoint)
    for prefix, headers in _matrices(checkpoint.tensors()).items():
        with located(checkpoint):
            found: StoredMatrix | None = measure(spec.hf, prefix, headers)
        if found is not None and (fixed is True or found.product in fixed):
            found = replace(found, product=None)
        if not _LAYER.search(f"{prefix}."):
            tables[prefix.rpartition(".")[2]] = found
            continue
        if found is None:
            count = sum(prod(header.shape) for name, header in headers.items() if name != "bias")
            found = StoredMatrix(count, plain_bits, "model")
        weights[found.product] += found.weights
        counted = sums[_EXPERTS.search(prefix) is not None]
        counted[0] += found.weights
        counted[1] += found.weights * found.bits
    if not weights.total():
        return None
    of_experts, rest = (bits / count if count else None for count, bits in (sums[True], sums[False]))
    (product, _), *_ = weights.most_common(1)
    embedding = next((one for name, one in tables.items() if name != _HEAD), None)
    bits = of_experts if rest is None else rest
    assert bits is not None
    return StoredFormats(bits, product, tables.get(_HEAD, embedding), embedding, of_experts)


def _matrices(tensors: Mapping[str, TensorHeader]) -> dict[str, dict[str, TensorHeader]]:
    """Return the headers of each matrix by the rest of their names. Norms have vectors alone."""
    found: dict[str, dict[str, TensorHeader]] = {}
    for name, header in tensors.items():
        at = name.find(".weight.")
        prefix = name[:at] if at >= 0 else name.rpartition(".")[0]
        found.setdefault(prefix, {})[name.removeprefix(f"{prefix}.")] = header
    return {name: headers for name, headers in found.items() if any(len(h.shape) > 1 for h in headers.values())}
