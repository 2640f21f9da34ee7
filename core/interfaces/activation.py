"""Activation formats: how a linear layer wants its input, so that the producer before it can write it that way
directly.

A producer (norm, SiLU-and-multiply, attention, all-reduce + norm) gets `emit`, the formats its consumers asked for, and
returns a Bundle with one Activation per format: a router may want bf16 beside a quantized copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class ActFormat:
    """An open record: a third-party quantizer makes its own. Compared by identity.

    `encode` is a triton.JITFunction `encode(x_GC, scale_in) -> (values_GC, scale_G)` that the core's fused kernels
    inline (Triton takes a JITFunction as a constexpr). x_GC is float32: scale groups of one row, each reduced along
    axis 1, padded columns zero; scale_in is static_scale or 1. `reference` computes the same in torch: (x_TC float) ->
    (values_TC, scale_TG | None).
    """

    name: str
    dtype: torch.dtype | None = None
    """Of the values; None = the model's own."""
    group: Literal["none", "tensor", "token"] | int = "none"
    """Values that share a scale: the whole tensor, a token's row, or so many consecutive columns of a row."""
    scale_layout: Literal["none", "row", "column"] = "none"
    """Memory order of the scales of shape [T, groups]: row-major or column-major."""
    static_scale: torch.Tensor | None = None
    """Calibrated scale, for group == "tensor"."""
    pre_scale: torch.Tensor | None = None
    """[C] multiplied in before encoding (SmoothQuant, AWQ)."""
    perm: torch.Tensor | None = None
    """[C] column order the consumer wants (GPTQ act-order)."""
    encode: Any = None
    reference: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] | None = None


PLAIN = ActFormat("plain")
"""The model's own dtype, unscaled."""


@dataclass(frozen=True, slots=True)
class Activation:
    """values_TC in a format; scale is None for unscaled formats."""

    format: ActFormat
    values: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Bundle:
    """The same activation in each format that was asked for."""

    items: tuple[Activation, ...]

    def __getitem__(self, fmt: ActFormat) -> Activation:
        for item in self.items:
            if item.format is fmt:
                return item
        have = ", ".join(item.format.name for item in self.items)
        raise KeyError(
            f"activation format {fmt.name!r} was not emitted (have: {have}): name it in `emit` of the producer"
        )


@dataclass(frozen=True, slots=True)
class Partial:
    """A row-parallel product before its sum over ranks: the full value is the sum of every rank's `values`."""

    values: torch.Tensor
    scale: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of each row [T, 1] and of each column [C], float32, which the values still lack: a library's product without them
    is quicker. Those of columns are the weight's: no kernel of a step writes them. Only where the layer was told that
    what follows takes scales, and never before a sum over ranks."""

    def scaled(self) -> torch.Tensor:
        if self.scale is None:
            return self.values
        row_T1, column_C = self.scale
        return (self.values.float() * row_T1 * column_C).to(self.values.dtype)
