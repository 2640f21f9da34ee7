"""Row encoding inside a kernel, with `encode` inlined. Shapes: T tokens, C columns, G scale groups of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation, Bundle
from dovetail.core.ops.formats import SUM_COLUMNS, encode, scales_of_row
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.padding import empty_rows


@dataclass(frozen=True, slots=True)
class EncodeTarget:
    """Output tensors of one fused format, and the launch arguments for them that all producers have in common."""

    fmt: ActFormat | None
    width: int
    """Columns of the values, including those of zeros that `fmt.perm` adds."""
    values: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    sums: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls,
        fmt: ActFormat | None,
        tokens: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sums: bool = True,
    ) -> EncodeTarget:
        """`sums`: whether the producer writes those of Activation."""
        if fmt is None:
            return cls(None, columns)
        width = columns if fmt.perm is None else len(fmt.perm)
        values = empty_rows(tokens, width, fmt.dtype or dtype, device)
        summed = None
        if sums and fmt.sums is not None and fmt.sums.of(tokens):
            summed = empty_rows(tokens, SUM_COLUMNS * ceil_div(width, fmt.sums.columns), torch.bfloat16, device)
        if fmt.group == "none":
            return cls(fmt, width, values, None, summed)
        if fmt.group == "tensor":
            return cls(fmt, width, values, fmt.static_scale, summed)
        groups = scales_of_row(fmt, columns)
        if fmt.scale_layout == "column":
            scale = torch.empty(groups, tokens, dtype=torch.float32, device=device).t()
        else:
            scale = empty_rows(tokens, groups, torch.float32, device)
        return cls(fmt, width, values, scale, summed)

    def block(self, whole_row: bool = False) -> int:
        """Columns per program. A scale per row needs a program that reads the whole row."""
        group = self.fmt.group if self.fmt is not None else "none"
        block = power_of_2(self.width)
        if not whole_row and group != "token":
            block = min(block, 1024)
        return max(block, group if isinstance(group, int) else 1, self._summed)

    @property
    def _summed(self) -> int:
        """Columns of a sum; 0 = none is written."""
        return 0 if self.sums is None or self.fmt is None or self.fmt.sums is None else self.fmt.sums.columns

    def arguments(self, block: int) -> dict:
        """Keyword arguments for `encode_row`, for rows in blocks of this many columns."""
        fmt = self.fmt
        dynamic = fmt is not None and (fmt.group == "token" or isinstance(fmt.group, int))
        return {
            "values_ptr": self.values,
            "scale_ptr": self.scale if dynamic else None,
            "static_ptr": None if fmt is None else fmt.static_scale,
            "pre_ptr": None if fmt is None else fmt.pre_scale,
            "place_ptr": None if fmt is None else fmt.places,
            "width": self.width,
            "scale_st": self.scale.stride(0) if dynamic else 0,
            "scale_sg": self.scale.stride(1) if dynamic else 0,
            "sums_ptr": self.sums,
            "ENCODE": None if fmt is None else fmt.encode,
            "GROUP": fmt.group if fmt is not None and isinstance(fmt.group, int) else block,
            "SUMS": self._summed,
        }

    def activation(self) -> Activation:
        return Activation(self.fmt, self.values, self.scale, self.sums)


def collect(
    emit: tuple[ActFormat, ...], rest: tuple[ActFormat, ...], plain: torch.Tensor | None, target: EncodeTarget
) -> Bundle:
    """Bundle a fused kernel's outputs. Formats that it could not fuse are encoded from the plain output."""
    items = [] if target.fmt is None else [target.activation()]
    if PLAIN in emit:
        items.append(Activation(PLAIN, plain))
    return Bundle((*items, *encode(plain, rest).items))


@triton.jit
def encode_row(
    y,
    row,
    start,
    C,
    values_ptr,
    scale_ptr,
    static_ptr,
    pre_ptr,
    place_ptr,
    width,
    scale_st,
    scale_sg,
    sums_ptr,
    ENCODE: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode columns [start, start + BLOCK) of a row. y is float32 [BLOCK] and zero past C, up to `width` columns.
    Column c is stored at place_ptr[c]; None = in its own place."""
    cols = start + tl.arange(0, BLOCK)
    if pre_ptr is not None:
        y = y * tl.load(pre_ptr + cols, mask=cols < C, other=0.0).to(tl.float32)
    scale_in = 1.0
    if static_ptr is not None:
        scale_in = tl.load(static_ptr).to(tl.float32)
    values, scale = ENCODE(tl.reshape(y, (BLOCK // GROUP, GROUP)), scale_in)
    values = tl.reshape(values, (BLOCK,)).to(values_ptr.dtype.element_ty)
    places = cols
    if place_ptr is not None:
        places = tl.load(place_ptr + cols, mask=cols < width, other=0)
    tl.store(values_ptr + row * width + places, values, mask=cols < width)
    if scale_ptr is not None:
        groups = start // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scale_ptr + row * scale_st + groups * scale_sg, scale, mask=groups * GROUP < C)
    if sums_ptr is not None:
        _store_sums(values, row, start, width, sums_ptr, SUMS, BLOCK)


@triton.jit
def _store_sums(values, row, start, width, sums_ptr, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sum of every SUMS values as ActFormat.sums says."""
    RUNS: tl.constexpr = BLOCK // SUMS
    sums = tl.sum(tl.reshape(values.to(tl.float32), (RUNS, SUMS)), 1)
    large = sums.to(tl.bfloat16)
    rest = sums - large.to(tl.float32)
    medium = rest.to(tl.bfloat16)
    small = (rest - medium.to(tl.float32)).to(tl.bfloat16)
    column = tl.arange(0, 8)[None, :]
    parts = tl.where(column < 2, large[:, None], tl.where(column < 4, medium[:, None], small[:, None]))
    parts = tl.where(column < 6, parts, 0.0)
    runs = start // SUMS + tl.arange(0, RUNS)
    at = (row * tl.cdiv(width, SUMS) + runs) * 8
    tl.store(sums_ptr + at[:, None] + column, parts, mask=(runs * SUMS < width)[:, None])


@triton.jit
def encode_plain(x_GC, scale_in):
    """Encoding of a format that differs from plain in the order of columns alone."""
    return x_GC, scale_in


@triton.jit
def _encode(
    x_ptr,
    C,
    values_ptr,
    scale_ptr,
    static_ptr,
    pre_ptr,
    place_ptr,
    width,
    scale_st,
    scale_sg,
    sums_ptr,
    ENCODE: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    cols = start + tl.arange(0, BLOCK)
    y = tl.load(x_ptr + row * C + cols, mask=cols < C, other=0.0).to(tl.float32)
    encode_row(
        y,
        row,
        start,
        C,
        values_ptr,
        scale_ptr,
        static_ptr,
        pre_ptr,
        place_ptr,
        width,
        scale_st,
        scale_sg,
        sums_ptr,
        ENCODE,
        GROUP,
        SUMS,
        BLOCK,
    )


def encode_triton(x_TC: torch.Tensor, fmt: ActFormat) -> Activation:
    x_TC = x_TC.contiguous()
    tokens, columns = x_TC.shape
    target = EncodeTarget.allocate(fmt, tokens, columns, x_TC.dtype, x_TC.device)
    if tokens:
        block = target.block()
        grid = (tokens, ceil_div(target.width, block))
        whole = tokens if grid[1] == 1 else None
        _encode[grid](
            x_TC, columns, **target.arguments(block), BLOCK=block, num_warps=warps(block, whole), **dependent(x_TC)
        )
    return target.activation()


FEW_ROWS = 256
"""Number of rows up to which kernels with one program per row use more threads."""


def warps(block: int, rows: int | None = None) -> int:
    """Warps for about 16 elements per thread. `rows`: number of rows, for kernels with one program per row. With few
    rows a thread gets fewer elements, since one program's time is then the kernel's (benchmarks/kernels.py)."""
    elements = 16
    if rows is not None and rows <= FEW_ROWS:
        elements = 4 if rows > 16 else 8
    return max(1, min(32, block // (32 * elements)))
