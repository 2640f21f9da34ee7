"""Attention of a transformers model by this engine's backend. Shapes: T tokens, H query heads, K kv heads, D head dim,
E dimensions of a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from dovetail.core.interfaces import PLAIN, AttentionBackend, AttentionLayer, ForwardContext, Rope

PAGED = "dovetail"
"""Name of this implementation in transformers' interface. It has no masks: the backend makes its own."""


@dataclass
class Step:
    """The step that the model runs, for layers that the library passes no arguments of ours."""

    ctx: ForwardContext | None = None
    """Set during forward alone."""

    def clear(self) -> None:
        self.ctx = None


@dataclass(frozen=True)
class PagedAttention:
    """One layer's attention. The library's module has it as attribute `paged`."""

    backend: AttentionBackend
    layer: AttentionLayer
    step: Step
    rope: Rope | None = None
    """Rotates q and k; None = they are rotated already, or have no rotary positions."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [1, H, T, D], k [1, K, T, D] and v [1, K, T, E] to [1, T, H, E]."""
        layer, (_, heads, tokens, dim) = self.layer, q.shape
        v_dim = v.shape[-1]
        if v_dim < dim:
            v = F.pad(v, (0, dim - v_dim))
        qkv = one_tensor(q, k, v)
        if qkv is None:
            qkv = torch.cat([x[0].transpose(0, 1) for x in (q, k, v)], dim=1).flatten(1)
        out = self.backend.write_and_attend(layer, self.step.ctx.attn[layer.group], qkv, self.rope)
        return out[PLAIN].values.view(1, tokens, heads, dim)[..., :v_dim]


def one_tensor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """Return the [T, (H + 2K) * D] whose columns q, k and v are, as after one matmul; None = they are not."""
    tokens, dim = q.shape[2:]
    heads = [x.shape[1] for x in (q, k, v)]
    columns, first = sum(heads) * dim, q.storage_offset()
    starts = (first, first + heads[0] * dim, first + (heads[0] + heads[1]) * dim)
    for x, start in zip((q, k, v), starts, strict=True):
        apart = x.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()
        if apart or x.shape[-1] != dim or x.storage_offset() != start or x.stride()[1:] != (dim, columns, 1):
            return None
    return q.as_strided((tokens, columns), (columns, 1), first)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **more: Any
) -> tuple[torch.Tensor, None]:
    paged: PagedAttention = module.paged
    return paged(query, key, value), None


AttentionInterface.register(PAGED, _attend)
