"""Norm layers. Each can be passed as `norm` to Collective.boundary."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dovetail.core.checkpoint import LazyTensor
from dovetail.core.interfaces import PLAIN, ActFormat, BuildContext, Bundle
from dovetail.core.layers.weights import Weight
from dovetail.core.ops import layer_norm, rms_norm


class RMSNorm:
    def __init__(
        self, name: str, build: BuildContext, channels: int, eps: float, offset: float = 0.0, fp32: bool = False
    ) -> None:
        """`offset`: added to the checkpoint's weight. Gemma stores weight - 1 and multiplies in float32. `fp32`:
        multiply in float32 also without an offset, as OLMo 2 does."""
        self.name, self.eps, self.offset = name, eps, offset
        dtype = torch.float32 if offset or fp32 else build.dtype
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


class NoNorm:
    """Takes the place of a norm whose blocks read the residual itself (OLMo 2, 2025)."""

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        emit: tuple[ActFormat, ...] = (PLAIN,),
        scale: tuple[torch.Tensor, torch.Tensor] | None = None,
        after: RMSNorm | None = None,
    ) -> tuple[Bundle, torch.Tensor]:
        """Return (x + residual in the requested formats, x + residual). `after`: norm of x before the sum."""
        first = None if after is None else (after.weight, after.eps)
        return rms_norm(x, residual, None, 0.0, emit, scale, first)


class LayerNorm:
    def __init__(self, name: str, build: BuildContext, channels: int, eps: float, biased: bool = True) -> None:
        """`biased`: whether the checkpoint has a bias."""
        self.name, self.eps, self.biased = name, eps, biased
        self.weight, self.bias = (torch.zeros(channels, dtype=build.dtype, device=build.device) for _ in range(2))

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
        if self.biased:
            yield Weight(f"{self.name}.bias", lambda lazy: self.bias.copy_(lazy[:]), tuple(self.bias.shape), "zeros")
