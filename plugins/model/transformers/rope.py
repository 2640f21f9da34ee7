"""Rotary frequencies that change with the length of a sequence (dynamic NTK, LongRoPE). Keys in the cache were rotated
with those of their time, so sequences stay within the length for which the frequencies are constant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dovetail.core.rope import CHANGING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def constant_len(config: Any) -> int | None:
    """Return the length up to which frequencies are constant; None = they always are."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    lengths = [
        kind.get("original_max_position_embeddings")
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") in CHANGING
    ]
    return min(lengths, default=None)


def fix_rope(model: PreTrainedModel) -> list[tuple[nn.Module, Any]]:
    """Keep the frequencies of short sequences; without this, each step compares positions on the host. Return the
    modules that would change, with their former types."""
    former = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(kind in CHANGING for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            former.append((module, kinds))
            module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
    return former


@contextmanager
def fixed_rope(model: PreTrainedModel) -> Iterator[None]:
    """fix_rope for a trial: buffers are computed later, by the former types."""
    former = fix_rope(model)
    try:
        yield
    finally:
        for module, kinds in former:
            module.rope_type = kinds
