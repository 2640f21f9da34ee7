"""Norm layers. Each can be passed as `norm` to Collective.boundary."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.interfaces import PLAIN, ActFormat, BuildContext, Bundle
from dovetail.core.layers.weights import Weight
from dovetail.core.ops import layer_norm, rms_norm


class RMSNorm:
    def __init__(self, name: str, build: BuildContext, channels: int, eps: float, offset: float = 0.0) -> None:
        """`offset`: added to the checkpoint's weight. Gemma stores weight - 1 and multiplies in float32."""
        self.name, self.eps, self.offset = name, eps, offset
        dtype = torch.float32 if offset else build.dtype
        self.weight = torch.empty(channels, dtype=dtype, device=build.device)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        emit: tuple[ActFormat, ...] = (PLAIN,),
        scale: tuple[torch.Tensor, torch.Tensor] | None = None,
        after: RMSNorm | None = None,
    ) -> tuple[Bundle, torch.Tensor]:
        """`after`: norm of x before the residual is added."""
        first = None if after is None else (after.weight, after.eps)
        return rms_norm(x, residual, self.weight, self.eps, emit, scale, first)

    def weights(self) -> Iterator[Weight]:
        def take(lazy: LazyTensor) -> None:
            self.weight.copy_(lazy[:]).add_(self.offset)

        yield Weight(f"{self.name}.weight", take, tuple(self.weight.shape), "zeros" if self.offset else "ones")


class LayerNorm:
    def __init__(self, name: str, build: BuildContext, channels: int, eps: float) -> None:
        self.name, self.eps = name, eps
        self.weight, self.bias = (torch.empty(channels, dtype=build.dtype, device=build.device) for _ in range(2))

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        emit: tuple[ActFormat, ...] = (PLAIN,),
        plus: torch.Tensor | None = None,
    ) -> tuple[Bundle, torch.Tensor]:
        return layer_norm(x, residual, self.weight, self.bias, self.eps, emit, plus)

    def weights(self) -> Iterator[Weight]:
        yield Weight(f"{self.name}.weight", lambda lazy: self.weight.copy_(lazy[:]), tuple(self.weight.shape), "ones")
        yield Weight(f"{self.name}.bias", lambda lazy: self.bias.copy_(lazy[:]), tuple(self.bias.shape), "zeros")
