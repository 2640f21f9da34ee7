"""Gathered copies of a prompt's pages, for queries that read each key many times.

Tensor cores read 16 bits, so each query tile would convert 8-bit keys again; and pages shorter than a block of keys
rule out tensor maps. A long prompt has dozens of tiles over the same keys. So the keys are copied once per layer, 16
bits wide, to pages that hold a block and are in the order of rows. Both 16-bit formats represent both 8-bit ones
exactly, so results do not change.

Shapes: B rows, P pages of a row, N pages of all rows, K kv heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import BatchMeta
from dovetail.core.ops.kernels.launch import announce, dependent, wait

PAGE = 64
"""Minimum number of tokens in a page of the copy."""
ROOM_BYTES = 256 << 20
"""Size of the buffer for copies."""
MOST_ROWS = 256
"""Maximum number of gathered rows, since each program reads the lengths of all."""
BLOCK = 8192
"""Values copied per program."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Copies of the pages of some rows of a step. All layers use the same buffer, one after another."""

    k: torch.Tensor
    """[N, page tokens, K, D]"""
    v: torch.Tensor
    table_BP: torch.Tensor
    """int32"""
    first_row: int
    rows: int

    @classmethod
    def within(
        cls,
        room: torch.Tensor,
        meta: BatchMeta,
        bounds: Sequence[int],
        first_row: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> Gathered:
        """Lay out copies in `room`, of ROOM_BYTES, for rows from `first_row` on. `bounds`: maximum keys of each row."""
        pages, table = copied_pages(bounds, meta.page_tokens), meta.page_table_BP
        shape = (2, sum(pages), copied_page(meta.page_tokens), kv_heads, head_dim)
        k, v = room.narrow(0, 0, math.prod(shape) * dtype.itemsize).view(dtype).view(shape).unbind()
        return cls(k, v, table.new_empty(len(table), max(pages)), first_row, len(pages))

    @property
    def page_tokens(self) -> int:
        return self.k.shape[1]

    def fill(self, meta: BatchMeta, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy a layer's pages."""
        fold, width = self.page_tokens // meta.page_tokens, k[0].numel()
        _gather_pages[len(self.k), fold * ceil_div(width, BLOCK)](
            k,
            v,
            self.k,
            self.v,
            meta.kv_len_B,
            meta.page_table_BP,
            meta.page_table_BP.stride(0),
            self.table_BP,
            self.table_BP.stride(0),
            self.first_row,
            self.rows,
            PAGE=meta.page_tokens,
            FOLD=fold,
            WIDTH=width,
            ROWS=MOST_ROWS,
            BLOCK=BLOCK,
            num_warps=4,
            **dependent(k),
        )


def copied_page(page_tokens: int) -> int:
    """Tokens in a page of the copy, which holds one or more original pages."""
    return page_tokens * max(1, PAGE // page_tokens)


def copied_pages(bounds: Sequence[int], page_tokens: int) -> list[int]:
    """Number of pages in each row's copy."""
    tokens = copied_page(page_tokens)
    return [ceil_div(bound, tokens) for bound in bounds]


@triton.jit(do_not_specialize=["table_stride", "to_stride", "first_row", "rows"])
def _gather_pages(
    k_ptr,
    v_ptr,
    to_k_ptr,
    to_v_ptr,
    kv_len_ptr,
    table_ptr,
    table_stride,
    to_table_ptr,
    to_stride,
    first_row,
    rows,
    PAGE: tl.constexpr,
    FOLD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (page of the copy, part of one of the FOLD pages in it). Its row follows from the exact lengths."""
    announce(PDL)
    wait(PDL)
    PARTS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    mine, part = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    lengths = tl.load(kv_len_ptr + first_row + row, mask=row < rows, other=0)
    pages = tl.cdiv(lengths, PAGE * FOLD)
    before = tl.cumsum(pages, axis=0) <= mine
    index = tl.sum(before.to(tl.int32), axis=0)
    first = tl.sum(tl.where(before, pages, 0), axis=0)
    place = (mine - first) * FOLD + part // PARTS
    length = tl.sum(tl.where(row == index, lengths, 0), axis=0)
    if place * PAGE >= length:  # unused page of the copy
        return
    at_row = (first_row + index).to(tl.int64)
    page = tl.load(table_ptr + at_row * table_stride + place)
    if part == 0:
        tl.store(to_table_ptr + at_row * to_stride + (mine - first), mine)
    values = part % PARTS * BLOCK + tl.arange(0, BLOCK)
    ok = values < WIDTH
    source = page.to(tl.int64) * WIDTH + values
    to = (mine.to(tl.int64) * FOLD + part // PARTS) * WIDTH + values
    tl.store(to_k_ptr + to, tl.load(k_ptr + source, mask=ok).to(to_k_ptr.dtype.element_ty), mask=ok)
    tl.store(to_v_ptr + to, tl.load(v_ptr + source, mask=ok).to(to_v_ptr.dtype.element_ty), mask=ok)
