"""RMSNorm over all heads of q together, and over those of k (OLMo 2, 2025). Ranks add their sums of squares. Shapes: T
tokens, O columns of q|k|v, C columns of q|k."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.interfaces import BuildContext
from dovetail.core.layers.linear import QKVParallel
from dovetail.core.layers.weights import Weight
from dovetail.core.ops.wide_norm import sums_of_squares, wide_qk_norm


class WideQKNorm:
    """Norms of a layer whose q, k and v are matrices of their own."""

    def __init__(self, names: tuple[str, str], build: BuildContext, qkv: QKVParallel, eps: float) -> None:
        self.names, self.qkv, self.eps = names, qkv, eps
        q, k, _ = qkv.parts
        self.columns, self.whole = (q.size, k.size), (q.rows, k.rows)
        # Weights multiply in float32, as in the model's training.
        self.weight_C = torch.empty(sum(self.columns), dtype=torch.float32, device=build.device)
        copies = build.collective.size * k.size / k.rows
        """Ranks that have one kv head."""
        self.shares_2 = torch.tensor([1.0, 1.0 / copies], device=build.device)

    def squares(self, qkv_TO: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, 2], whose sum over ranks `__call__` takes."""
        return sums_of_squares(qkv_TO, self.columns) * self.shares_2

    def __call__(self, qkv_TO: torch.Tensor, squares_T2: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize in place and return qkv. `squares_T2`: None = this rank has all heads."""
        return wide_qk_norm(qkv_TO, self.weight_C, self.columns, self.eps, squares_T2, self.whole)

    def weights(self) -> Iterator[Weight]:
        for part, (name, rows) in enumerate(zip(self.names, self.whole, strict=True)):
            yield Weight(f"{name}.weight", partial(self._take, part), (rows,), "ones")

    def _take(self, part: int, lazy: LazyTensor) -> None:
        self.weight_C.split(self.columns)[part].copy_(self.qkv.output_share(part, lazy))
