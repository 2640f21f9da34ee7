"""Output of a work item. The last program to arrive joins the partial results of a row's ranges by log-sum-exp.

Shapes: M rows of a query tile (tokens x query heads), D columns of a head's output, C = H * D columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.plugins.attention.triton.scores import LOW


@triton.jit
def store_range(
    acc,
    total,
    m,
    out_ptr,
    part_ptr,
    lse_ptr,
    count_ptr,
    offset,
    ok,
    exists,
    query,
    head,
    dims,
    part,
    splits,
    first_item,
    unit,
    H: tl.constexpr,
    UNITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    JOIN: tl.constexpr = True,
):
    """Store the weighted sum of values acc [M, D], given the sum of weights and the maximum score [M] in base 2.

    Program axis 1 is the item, and `unit` of UNITS is the program's part of it. `offset` [M]: places in the output.
    `query`, `head` [M]: token within the tile, and head. `part`, `splits`, `first_item`: fields of the item. If not
    JOIN, every item has a partial result, and another kernel joins them.
    """
    # A query that saw no key gives zeros.
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out = out_ptr + offset[:, None] + dims[None, :]
    if part < 0:
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=ok)
    else:
        # Partial results [parts, H, D] of the tile's tokens, and their log-sum-exp [parts, H].
        to = (part + query).to(tl.int64) * H + head
        tl.store(part_ptr + (to * D)[:, None] + dims[None, :], acc, mask=ok)
        # NaN stays NaN.
        tl.store(lse_ptr + to, tl.where(total == 0, float("-inf"), m + tl.log2(total)), mask=exists)
        if JOIN:
            # The tile's last program to arrive joins all ranges, in their order.
            tl.debug_barrier()
            count_ptr += first_item * UNITS + unit
            if tl.atomic_add(count_ptr, 1, sem="acq_rel") == splits - 1:
                tl.store(count_ptr, 0)
                row0 = part - (tl.program_id(1) - first_item) * QUERIES
                m = tl.full((BLOCK_M,), LOW, tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
                acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                for split in range(splits):
                    at_part = (row0 + split * QUERIES + query).to(tl.int64) * H + head
                    lse = tl.load(lse_ptr + at_part, mask=exists, other=float("-inf"), cache_modifier=".cg")
                    x = tl.load(
                        part_ptr + (at_part * D)[:, None] + dims[None, :], mask=ok, other=0.0, cache_modifier=".cg"
                    )
                    new_m = tl.maximum(m, lse)
                    weight = tl.exp2(lse - new_m)
                    alpha = tl.exp2(m - new_m)
                    total = total * alpha + weight
                    acc = acc * alpha[:, None] + weight[:, None] * x
                    m = new_m
                acc = acc / tl.where(total > 0, total, 1.0)[:, None]
                tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=ok)
