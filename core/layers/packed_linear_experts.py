"""Experts by the linear methods of a quantizer, whose packed matrices are stacked and multiplied together.

With act-order (GPTQ), each expert has an order of its own for the columns of its matrices. Inputs of the first product
are put in that order as rows are gathered. The channels between the products are computed in the order that the second
one needs: the rows of gate and up are moved once, after loading. Where a rank has some channels of each group, groups
are filled up with channels of zeros, for which gate and up have rows of zeros.

Shapes: T tokens, E experts, C hidden channels, F channels of an expert, P places of channels with those of zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from dovetail.core.interfaces import (
    PLAIN,
    SWIGLU,
    ActFormat,
    Activation,
    ExpertBias,
    ExpertShape,
    GatedActivation,
)
from dovetail.core.interfaces.expert import Routing
from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.layers.looped_experts import LoopedExperts
from dovetail.core.layers.packed import PackedLinear
from dovetail.core.ops.packing import LANES
from dovetail.core.ops.stacked_experts import StackedExperts, fits_strips, stacked_gated_experts

OWN = ("create", "finish", "apply", "packed", "allocate")
"""Methods of PackedLinear whose results this module computes otherwise."""


class PackedLinearExperts(LoopedExperts):
    """Where all methods are PackedLinear with equal formats, the tensors of the experts are stacked, and each method
    loads into a view of them. `order` [E, columns], int32, is the column of the input at each place. Otherwise the
    experts are multiplied one after another, as in the base class."""

    up: PackedLinear
    """A method that stands for those of all experts."""
    down: PackedLinear

    def stacks(self, device: torch.device) -> bool:
        """Whether the tensors of all experts can be stacked. Nothing is allocated."""
        return not any(isinstance(self._common(side, device), str) for side in range(2))

    @property
    def scatters(self) -> bool:
        """Whether channels of the second product are in any group (act-order), so that a part has some of all."""
        return any(isinstance(down, PackedLinear) and _is_ordered(down) for _, down in self.methods)

    def create(self, shape: ExpertShape, device: torch.device) -> dict[str, torch.Tensor]:
        sides = [self._common(side, device) for side in range(2)]
        self._differs = next((side for side in sides if isinstance(side, str)), "")
        if self._differs:
            return super().create(shape, device)
        self.up, self.down = (side for side in sides if isinstance(side, PackedLinear))
        self.stacked, self.input, self.between = True, _unordered(self.up), _unordered(self.down)
        params: dict[str, torch.Tensor] = {}
        for name, method in (("up", self.up), ("down", self.down)):
            made = method.allocate(device, shape.experts, 2 * self._places if name == "up" else None)
            if _is_ordered(method):
                made["order"] = torch.empty(shape.experts, method.width, dtype=torch.int32, device=device)
            params |= {f"{name}.{key}": tensor for key, tensor in made.items()}
        return params

    @property
    def _places(self) -> int:
        """P"""
        return self.down.width if _is_ordered(self.down) else self.shape.intermediate

    def reason(self) -> str:
        return f" ({self._differs})" if self._differs else ""

    def finish(self, params: dict[str, torch.Tensor]) -> None:
        if not self.stacked:
            super().finish(params)
            return
        for side, name in enumerate(("up", "down")):
            if (order_EI := params.get(f"{name}.order")) is not None:
                for own, methods in zip(order_EI, self.methods, strict=True):
                    method = methods[side]
                    assert isinstance(method, PackedLinear) and method.input.perm is not None
                    own.copy_(method.input.perm)
                    # `apply` reads the stacked orders. Those of each expert would take three times their memory.
                    method.input = method.activations
        if (order_EP := params.get("down.order")) is not None:
            for expert, order_P in enumerate(order_EP.long()):
                rows = order_P.clamp(max=self.shape.intermediate - 1)
                rows = torch.cat((rows, rows + self.shape.intermediate))
                nothing = (order_P == self.shape.intermediate).repeat(2)
                for name, tensor in self._params(params, expert, 0).items():
                    if name != "order":
                        tensor.copy_(tensor[rows])
                    if name == "scale":
                        tensor[nothing] = 0.0

    def apply(
        self,
        params: dict[str, torch.Tensor],
        x: Activation,
        routing: Routing,
        activation: GatedActivation = SWIGLU,
        bias: ExpertBias | None = None,
    ) -> torch.Tensor:
        if not self.stacked:
            return super().apply(params, x, routing, activation, bias)
        weights = StackedExperts(self._packed(params, "up"), self._packed(params, "down"), params.get("up.order"))
        if bias is not None and (order_EP := params.get("down.order")) is not None:
            bias = replace(bias, up=_moved(bias.up, order_EP.long()))
        between, dtype = self.between, self.shape.dtype
        return stacked_gated_experts(x, routing, weights, activation, bias, between=between, dtype=dtype)

    def _packed(self, params: Mapping[str, torch.Tensor], side: str) -> PackedWeight:
        """Return the matrices of all experts."""
        method: PackedLinear = getattr(self, side)
        names = ("codes", "scale", "zero", "row_scale")
        return PackedWeight(method.format, method.width, method.step, *(params.get(f"{side}.{name}") for name in names))

    def _params(self, params: Mapping[str, torch.Tensor], expert: int, side: int) -> dict[str, torch.Tensor]:
        if not self.stacked:
            return super()._params(params, expert, side)
        prefix = ("up.", "down.")[side]
        return {name.removeprefix(prefix): x[expert] for name, x in params.items() if name.startswith(prefix)}

    def _common(self, side: int, device: torch.device) -> PackedLinear | str:
        """Return a method that stands for those of all experts, or the reason why none does."""
        first: PackedLinear | None = None
        for methods, shapes in zip(self.methods, self.shapes, strict=True):
            method = methods[side]
            if not isinstance(method, PackedLinear) or any(
                getattr(type(method), name) is not getattr(PackedLinear, name) for name in OWN
            ):
                return f"{type(method).__name__} does not store or multiply as PackedLinear does"
            method.prepare(shapes[side], device)
            # The first product computes the channels that fill groups of the second one.
            fills = side == 1 and _is_ordered(method)
            if not _multiplies(fmt := _unordered(method)) or (method.width != shapes[side].inp and not fills):
                return f"inputs have the format {fmt.name} and {method.width} columns"
            if not fits_strips(method.step):
                return f"{method.step} inputs share a scale, neither a multiple nor a divisor of {LANES}"
            first = first or method
            if _traits(method) != _traits(first):
                return "experts have unlike formats"
        assert first is not None
        return first


def _multiplies(fmt: ActFormat) -> bool:
    """Whether the kernel takes an input format: plain, or E4M3 with a scale per row."""
    if fmt is PLAIN:
        return True
    of_rows = fmt.group == "token" and fmt.dtype is torch.float8_e4m3fn
    return of_rows and fmt.pre_scale is None and fmt.perm is None


def _is_ordered(method: PackedLinear) -> bool:
    """Whether the columns have an order that `prepare` or `load` sets, and inputs are else in `activations`."""
    given = method.input
    if given.perm is None:
        return False
    plain = method.activations
    alike = (given.dtype, given.group) == (plain.dtype, plain.group) and given.pre_scale is plain.pre_scale
    return plain.perm is None and alike


def _unordered(method: PackedLinear) -> ActFormat:
    """Return the input format after `prepare`, without an order of the columns."""
    return method.activations if _is_ordered(method) else method.input


def _moved(bias_EO: torch.Tensor, order_EP: torch.Tensor) -> torch.Tensor:
    """Return the biases of gate and up, which follow each other, in the order of places; 0 for channels of zeros."""
    gate, up = (F.pad(half, (0, 1)).gather(1, order_EP) for half in bias_EO.chunk(2, dim=1))
    return torch.cat((gate, up), dim=1)


def _traits(method: PackedLinear) -> tuple[object, ...]:
    """Return what methods whose tensors are stacked have in common."""
    scales = method.scale_dtype, method.zero_dtype, method.row_scale
    return method.format, method.width, method.step, _unordered(method), _is_ordered(method), *scales
