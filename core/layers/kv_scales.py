"""Scales of K and V in an 8-bit cache, from the quantizer or from the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.errors import TensorError, shown
from dovetail.core.interfaces import BuildContext
from dovetail.core.layers.weights import Weight
from dovetail.core.ops.kv_write import FLOAT8


class KVScales:
    """Scales `k` and `v` of one attention layer, as AttentionLayer takes them; 1 for unscaled cache formats."""

    k: float | torch.Tensor
    v: float | torch.Tensor

    def __init__(self, prefix: str, index: int, build: BuildContext, kv_heads: int, local: int) -> None:
        """`prefix`: checkpoint prefix of the attention layer. `local`: number of this rank's kv heads of `kv_heads`."""
        self.prefix, self.kv_heads = prefix, kv_heads
        self.start = build.collective.rank * kv_heads // build.collective.size
        self.names = build.quantizer.kv_scale_tensors
        self.used = build.kv_dtype in FLOAT8
        self.k, self.v = build.quantizer.kv_scales(index) if self.used else (1.0, 1.0)
        if self.names and self.used:
            self.k, self.v = torch.ones(2, local, dtype=torch.float32, device=build.device).unbind(0)

    def weights(self) -> Iterator[Weight]:
        for name, scale_K in zip(self.names, (self.k, self.v), strict=False):
            yield Weight(f"{self.prefix}.{name}", partial(self._take, f"{self.prefix}.{name}", scale_K))

    def _take(self, name: str, scale_K: float | torch.Tensor, lazy: LazyTensor) -> None:
        """Load one scale for all heads, or one per head."""
        found = lazy[...].float().flatten()
        if len(found) not in (1, self.kv_heads) or not (found.isfinite() & (found > 0)).all():
            raise TensorError(
                name,
                f"is {shown(found.tolist())}; it must be one positive number, or one for each of {self.kv_heads} kv "
                "heads",
            )
        if isinstance(scale_K, torch.Tensor):
            scale_K.copy_(found if len(found) == 1 else found[self.start : self.start + len(scale_K)])
