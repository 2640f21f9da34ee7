"""Activation formats: how a linear layer needs its input, so that the preceding operation can write it that way.

A producer (norm, SiLU-and-multiply, attention, all-reduce + norm) gets `emit`, the formats that its consumers need, and
returns a Bundle with one Activation per format. A router, for example, may need bf16 in addition to a quantized copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of a row's encoded values that a consumer can use."""

    columns: int
    """Values of one sum: a power of two."""
    least: int = 1
    most: int = sys.maxsize
    """Numbers of rows with which it uses them."""

    def of(self, rows: int) -> bool:
        """Whether they are used with so many rows."""
        return self.least <= rows <= self.most


@dataclass(frozen=True, slots=True, eq=False)
class ActFormat:
    """An open record, compared by identity: a third-party quantizer creates its own.

    `encode` is a triton.JITFunction `encode(x_GC, scale_in) -> (values_GC, scale_G)`, which the core's fused kernels
    inline (Triton takes a JITFunction as a constexpr). x_GC is float32: the scale groups of one row, each reduced along
    axis 1, with padded columns set to zero. scale_in is static_scale or 1. `reference` computes the same in torch:
    (x_TC float) -> (values_TC, scale_TG | None).
    """

    name: str
    dtype: torch.dtype | None = None
    """Dtype of the values; None = the model's."""
    group: Literal["none", "tensor", "token"] | int = "none"
    """Values that share one scale: the whole tensor, one token's row, or (int) that many columns of a row."""
    scale_layout: Literal["none", "row", "column"] = "none"
    """Memory order of the scales [T, groups]: row-major or column-major."""
    static_scale: torch.Tensor | None = None
    """Calibrated scale for group == "tensor"."""
    pre_scale: torch.Tensor | None = None
    """[C]: factor applied before encoding (SmoothQuant, AWQ)."""
    perm: torch.Tensor | None = None
    """[C']: column of the input at each place (GPTQ act-order). If there are more places than columns, C stands for a
    column of zeros."""
    places: torch.Tensor | None = None
    """int32 [C']: place of each column, then those of the columns of zeros: the inverse of `perm`. With it, kernels
    that encode store each column at its place, unless scales belong to groups of columns."""
    sums: Sums | None = None
    """Sums that producers write beside the values (Activation.sums)."""
    base: ActFormat | None = None
    """The same format without sums, whose consumers take this one, too."""
    encode: Any = None
    reference: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Another process compares PLAIN by identity, too.
        return "PLAIN" if self is PLAIN else object.__reduce_ex__(self, protocol)


PLAIN = ActFormat("plain")
"""The model's dtype without scales."""


@dataclass(frozen=True, slots=True)
class Activation:
    """values_TC in one format; scale is None for formats without scales."""

    format: ActFormat
    values: torch.Tensor
    scale: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    """bf16 [T, 8 * ceil(C / columns)], as `format.sums` says: the sum of each run's values as eight numbers, three that
    add up to it, each twice, and two zeros, so that a matrix instruction multiplies it by the parts of a number. None
    where the producer does not write it, which consumers must allow."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """One activation in each requested format."""

    items: tuple[Activation, ...]

    def __getitem__(self, fmt: ActFormat) -> Activation:
        for item in self.items:
            if item.format is fmt:
                return item
        for item in self.items:
            # Sums are for those who ask for their format.
            if item.format.base is fmt:
                return Activation(fmt, item.values, item.scale)
            if item.format is fmt.base:
                return item
        have = ", ".join(item.format.name for item in self.items)
        raise KeyError(
            f"activation format {fmt.name!r} was not emitted (have: {have}): name it in `emit` of the producer"
        )


@dataclass(frozen=True, slots=True)
class Partial:
    """Output of a row-parallel matmul before the sum over ranks: the result is the sum of every rank's `values`."""

    values: torch.Tensor
    scale: tuple[torch.Tensor, torch.Tensor] | None = None
    """Scales not yet applied to `values`: per row [T, 1] and per output channel [C], float32. The matmul library skips
    them; the consumer applies them. Channel scales belong to the weight, so no kernel of a step writes them. Set only
    if the layer may defer scales to its consumer, and never before a sum over ranks."""
    plus: torch.Tensor | None = None
    """Second tensor of the sum, which the consumer adds: the other output of a parallel block. Set only if the model's
    norm takes it, without `scale`, and never before a sum over ranks."""

    def completed(self) -> torch.Tensor:
        """Return `values` with what the producer left to the consumer."""
        if self.plus is not None:
            return self.values + self.plus
        if self.scale is None:
            return self.values
        row_T1, column_C = self.scale
        return (self.values.float() * row_T1 * column_C).to(self.values.dtype)
