"""RMSNorm as a layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.interfaces import PLAIN, ActFormat, BuildContext, Bundle
from dovetail.core.layers.weights import Weight
from dovetail.core.ops import rms_norm


class RMSNorm:
    """Also the `norm` that Collective.boundary takes."""

    def __init__(self, name: str, build: BuildContext, channels: int, eps: float) -> None:
        self.name, self.eps = name, eps
        self.weight = torch.empty(channels, dtype=build.dtype, device=build.device)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> tuple[Bundle, torch.Tensor]:
        return rms_norm(x, residual, self.weight, self.eps, emit)

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.name}.weight", self._take, tuple(self.weight.shape), "ones")

    def _take(self, lazy: LazyTensor) -> None:
        self.weight.copy_(lazy[:])
