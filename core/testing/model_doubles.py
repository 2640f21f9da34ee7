"""Collectives, attention and a quantizer that check how a model calls them, for the contract suite of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    Activation,
    AttentionBackend,
    AttentionLayer,
    AttnCtx,
    Bundle,
    LinearMethod,
    LinearShape,
    Partial,
    Quantizer,
    Residual,
    RowShard,
    Sums,
)
from dovetail.core.ops.formats import sums_of
from dovetail.core.testing.model_driver import Alone
from dovetail.core.testing.reference import build as build_component


class WatchedCollective(Alone):
    """Single rank that fails if it is called while `forbidden`."""

    forbidden = False

    def boundary(self, *args: Any) -> tuple[Bundle, torch.Tensor]:
        self._check()
        return super().boundary(*args)

    def reduce(self, x: torch.Tensor | Partial | RowShard) -> torch.Tensor:
        self._check()
        return super().reduce(x)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._check()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._check()
        return x

    def whole(self, residual: Residual) -> torch.Tensor:
        self._check()
        return super().whole(residual)

    def _check(self) -> None:
        assert not self.forbidden, "`layers` must yield every collective call instead of making it"


class OverwritesOutputs(Alone):
    """Single rank that overwrites a boundary's output at the second next call, as `Collective.overlapped` permits."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.given: list[Bundle] = []

    def boundary(self, x: torch.Tensor | Partial, *args: Any) -> tuple[Bundle, torch.Tensor]:
        if self.overlapped and isinstance(x, Partial):
            for item in self.given[-2].items if len(self.given) > 1 else ():
                item.values.fill_(float("nan"))
        bundle, residual = super().boundary(x, *args)
        if not self.overlapped:
            self.given = []
        elif isinstance(x, Partial):
            self.given = [*self.given[-1:], bundle]
        return bundle, residual


class SpyAttention(AttentionBackend):
    """The reference backend, which records the layers it is called with."""

    def __init__(self) -> None:
        super().__init__(None)
        self.inner: AttentionBackend = build_component("attention", "sdpa")
        self.seen: list[AttentionLayer] = []

    def bind(self, pools: Any) -> None:
        super().bind(pools)
        self.inner.bind(pools)

    def plan_device(self, *args: Any) -> AttnCtx:
        return self.inner.plan_device(*args)

    def attend(
        self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> Bundle:
        self.seen.append(layer)
        return self.inner.attend(layer, ctx, q, emit)

    def attend_mla(
        self,
        layer: AttentionLayer,
        ctx: AttnCtx,
        q: torch.Tensor,
        up_HOL: torch.Tensor,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> Bundle:
        self.seen.append(layer)
        return self.inner.attend_mla(layer, ctx, q, up_HOL, emit)


class TaggingQuantizer(Quantizer):
    """Unquantized matmuls whose inputs must have a format that is unique to the layer."""

    def __init__(self) -> None:
        super().__init__(None)
        self.inner: Quantizer = build_component("quant", "none")
        self.paths: list[str] = []
        self.applied: set[str] = set()
        self.summed: set[str] = set()
        """Layers that got sums of their inputs."""

    def linear(self, path: str, shape: LinearShape) -> LinearMethod:
        self.paths.append(path)
        return _Tagging(self, path, self.inner.linear(path, shape))


class _Tagging(LinearMethod):
    def __init__(self, owner: TaggingQuantizer, path: str, inner: LinearMethod) -> None:
        self.owner, self.path, self.inner = owner, path, inner
        # Halved by the encoder and doubled before the matmul, so that plain input gives another result.
        self.input = ActFormat(f"tagged {path}", reference=lambda x: (x / 2, None))
        self.sums = Sums(8)

    def create(self, shape: LinearShape, device: torch.device) -> dict[str, torch.Tensor]:
        return self.inner.create(shape, device)

    def load(self, params: dict[str, torch.Tensor], part: slice, tensors: Mapping[str, torch.Tensor]) -> None:
        self.inner.load(params, part, tensors)

    def finish(self, params: dict[str, torch.Tensor]) -> None:
        self.inner.finish(params)

    def apply(self, params: dict[str, torch.Tensor], x: Activation, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert x.format is self.input, f"{self.path} must get format {self.input.name!r}, got {x.format.name!r}"
        self.owner.applied.add(self.path)
        if x.sums is not None:
            assert torch.equal(x.sums, sums_of(x.values, 8)), f"{self.path} got the sums of other values"
            self.owner.summed.add(self.path)
        return self.inner.apply(params, Activation(PLAIN, x.values * 2), bias)
