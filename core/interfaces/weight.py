"""Weight formats: how codes of a quantized matrix become numbers. The core packs, decodes and multiplies any of them.

A weight is (decode(code) - zero) * scale * row_scale, with a scale, and perhaps a zero, for each group of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from dovetail.core.arithmetic import ceil_div

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ShiftedDecoder:
    """Decodes with fewer instructions to (value + shift) * unit. What is added is subtracted together with the zero, or
    by matrix instructions."""

    decode: Any
    """A triton.JITFunction that is called as `WeightFormat.decode_words` is."""
    shift: float
    """With each zero added, an exact number of the dtype when multiplied by `unit`."""
    unit: float = 1.0
    """A power of two."""

    @property
    def less(self) -> int:
        """Bits in E4M3 of shift times -unit."""
        return _bits_in_e4m3(-self.shift * self.unit)


@lru_cache
def _bits_in_e4m3(value: float) -> int:
    """Every launch needs them."""
    import torch

    return int(torch.tensor(value, device="cpu").to(torch.float8_e4m3fn).view(torch.int8).item())


@dataclass(frozen=True, slots=True, eq=False)
class WeightFormat:
    """An open record, compared by identity: a third-party quantizer creates its own.

    `decode` is a triton.JITFunction `decode(code, DTYPE: tl.constexpr) -> value` that the core's matmul kernels inline.
    Codes are int32 of any shape; values must be exact in DTYPE, bf16, fp16 or E4M3. `reference` computes the same in
    torch: uint8 codes -> float32.
    """

    name: str
    bits: int
    """Bits of information of a code, which plans of memory count."""
    stored_bits: Literal[4, 8]
    """Bits that a code takes in the int32 words of a packed matrix."""
    reference: Callable[[torch.Tensor], torch.Tensor]
    decode: Any = None
    decode_words: Any = None
    """The same for several codes in one instruction of an NVIDIA GPU, `decode_words(words, AT: tl.constexpr, DTYPE:
    tl.constexpr)`, from the codes at bit AT of int32 words, for bf16 and fp16. None = `decode`."""
    zero: bool = False
    """Whether each group has a zero, in units of decoded values."""
    e4m3: bool = False
    """Whether decoded values, less uint8 zeros up to the largest code, are exact in E4M3."""
    narrow_words: bool = False
    """Whether `decode_words` also serves E4M3. Others are decoded to fp16 first."""
    shifted: Mapping[torch.dtype, ShiftedDecoder] = field(default_factory=dict)
    """Faster decoders by the dtype that is multiplied, for whole zeros: bf16, fp16 or E4M3. That of bf16 or fp16 also
    serves zeros that are no integers, and scales in a dtype with more bits, unless there is one of float32: it returns
    float32 for any dtype, which is multiplied by the scale before it is rounded."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [outputs, inputs] of codes. Shapes: O outputs, W words of a row, G groups of a row."""

    format: WeightFormat
    inputs: int
    group: int
    """Inputs that share a scale; 0 = all. The last group may be shorter."""
    codes: torch.Tensor
    """int32 [O, W], see dovetail.core.ops.packing."""
    scale: torch.Tensor
    """[O, G], any floating-point dtype, in any order in memory: kernels read fastest what
    dovetail.core.ops.packing.empty_by_group allocates, and Hopper's kernel reads nothing else. Of a weight without
    zeros also int32 [O, ceil(G / 4)], words of four scales in E4M3 (dovetail.core.ops.packing.pack_scales), which are
    read faster than their bytes. In E4M3 none is negative or NaN."""
    zero: torch.Tensor | None = None
    """[O, G], uint8 or floating point, in the same order as `scale`; None = 0."""
    row_scale: torch.Tensor | None = None
    """float32 [O]; None = 1."""
    rounded_scale: torch.Tensor | None = None
    """float32 [O], scales with which matmuls of many rows round the weight to E4M3 once more, for the library's matmul
    (`dovetail.core.ops.packing.scales_to_round`). None = it is multiplied as it is."""
    rounded: torch.Tensor | None = None
    """E4M3 [O, inputs], the weight divided by `rounded_scale`; None = it is rounded in each matmul of many rows."""

    @property
    def groups(self) -> int:
        """Number of groups of a row."""
        return ceil_div(self.inputs, self.group) if self.group else 1

    @property
    def steps(self) -> tuple[int, int]:
        """Strides of outputs and groups, or words of groups, in `scale` and `zero`."""
        outputs, groups = self.scale.stride()[-2:]
        if self.zero is not None and self.scale.shape != self.zero.shape:
            raise ValueError(
                f"scale has the shape {tuple(self.scale.shape)} and zero {tuple(self.zero.shape)}: each group has one "
                "of both, and scales in words have no zeros"
            )
        # A dimension of one has any stride.
        if self.zero is not None and any(
            of_scale != of_zero and size > 1
            for of_scale, of_zero, size in zip(self.scale.stride(), self.zero.stride(), self.scale.shape, strict=True)
        ):
            raise ValueError(
                f"scale has the strides {self.scale.stride()} and zero {self.zero.stride()}: kernels read both in the "
                "same order"
            )
        return outputs, groups
