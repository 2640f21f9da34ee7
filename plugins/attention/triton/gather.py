"""A prompt's pages gathered, for queries that read each key many times.

Reading 8-bit keys, each tile of queries converts them anew between memory and the matrix units, which read 16 bits; and
pages shorter than a block of keys rule out tensor maps. A long prompt has dozens of tiles over the same keys: they are
copied once a layer instead, 16 bits wide, to pages that hold a block and stand in the order of rows. Both 16-bit
formats hold both 8-bit ones exactly, so nothing else changes.

Shapes: B rows, P pages of a row, N pages of all rows, K kv heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dovetail.core.interfaces import BatchMeta
from dovetail.core.ops.kernels.launch import announce, dependent, wait

PAGE = 64
"""Least tokens of a copy's page."""
ROOM_BYTES = 256 << 20
"""Memory that copies may take."""
MOST_ROWS = 256
"""Rows that can be gathered: a program looks at all of them."""
BLOCK = 8192
"""Values of a program."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Where some of a step's rows read their pages. Layers take turns in it."""

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
        """In memory of ROOM_BYTES, for rows from `first_row` on, which have at most so many keys."""
        pages, table = copied_pages(bounds, meta.page_tokens), meta.page_table_BP
        shape = (2, sum(pages), copied_page(meta.page_tokens), kv_heads, head_dim)
        k, v = room.narrow(0, 0, math.prod(shape) * dtype.itemsize).view(dtype).view(shape).unbind()
        return cls(k, v, table.new_empty(len(table), max(pages)), first_row, len(pages))

    @property
    def page_tokens(self) -> int:
        return self.k.shape[1]

    def fill(self, meta: BatchMeta, k: torch.Tensor, v: torch.Tensor) -> None:
        """From a layer's pages."""
        fold, width = self.page_tokens // meta.page_tokens, k[0].numel()
        _gather_pages[len(self.k), fold * triton.cdiv(width, BLOCK)](
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
    """Tokens of a copy's page, which holds one or more pages."""
    return page_tokens * max(1, PAGE // page_tokens)


def copied_pages(bounds: Sequence[int], page_tokens: int) -> list[int]:
    """Pages of each row's copy."""
    tokens = copied_page(page_tokens)
    return [triton.cdiv(bound, tokens) for bound in bounds]


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
    """Program (page of the copy, part of one of the FOLD pages in it). Whose it is follows from the exact lengths."""
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
    if place * PAGE >= length:  # room to spare
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
