"""Kernels of draft trees (core.ops.trees).

Shapes: T tokens, B rows, R rows that sample, S slots, K drafts of a row, D longest path, W sampled positions of a row.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.interfaces.attention import KVPool, TreeMask
from dovetail.core.interfaces.spec_decode import AcceptedPath
from dovetail.core.ops.step import Accepted, TokenLayout
from dovetail.core.ops.trees import TreeState


@triton.jit(do_not_specialize=["vocab"], do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr", "most_ptr"])
def _write_tree(
    drafts_ptr,
    parents_ptr,
    count_ptr,
    slots_ptr,
    lengths_ptr,
    most_ptr,
    tokens_ptr,
    tokens_stride,
    number_ptr,
    kept_parents_ptr,
    kept_bits_ptr,
    kept_stride,
    vocab,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    count = tl.minimum(tl.load(count_ptr + row).to(tl.int64), tl.load(most_ptr + row))
    k = tl.arange(0, BLOCK)
    draft = tl.load(drafts_ptr + row * K + k, mask=k < K, other=-1).to(tl.int64)
    parent = tl.load(parents_ptr + row * K + k, mask=k < K, other=-1).to(tl.int64)
    known = (draft >= 0) & (draft < vocab) & (parent >= -1) & (parent < k)
    parent = tl.where(known, parent, -1)
    up = parent
    bits = tl.full((BLOCK,), 1, tl.int64) << k.to(tl.int64)
    for _ in range(DEPTH - 1):
        bits |= tl.where(up >= 0, tl.full((BLOCK,), 1, tl.int64) << tl.maximum(up, 0), 0)
        up = tl.where(up >= 0, tl.sum(tl.where(k[None, :] == up[:, None], parent[None, :], 0), axis=1), -1)
    ends = (k >= count) | (known == 0) | (up >= 0)
    kept = tl.min(tl.where(ends, k, K), axis=0).to(tl.int64)
    place = tokens_ptr + slot * tokens_stride + tl.load(lengths_ptr + row) + k
    tl.store(place, tl.where(k < kept, draft, 0).to(tl.int32), mask=k < K)
    tl.store(kept_parents_ptr + slot * kept_stride + k, parent, mask=k < K)
    tl.store(kept_bits_ptr + slot * kept_stride + k, tl.where(k < kept, bits, 0), mask=k < K)
    tl.store(number_ptr + slot, kept)


def write_tree_triton(
    drafts_BK: torch.Tensor,
    parents_BK: torch.Tensor,
    count_B: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    most_B: torch.Tensor,
    tokens_SL: torch.Tensor,
    drafts_S: torch.Tensor,
    trees: TreeState,
    vocab: int,
) -> None:
    rows, most = drafts_BK.shape
    if rows:
        _write_tree[(rows,)](
            drafts_BK.contiguous(),
            parents_BK.contiguous(),
            count_B.contiguous(),
            slots_B.contiguous(),
            lengths_B.contiguous(),
            most_B.contiguous(),
            tokens_SL,
            tokens_SL.stride(0),
            drafts_S,
            trees.parents_SK,
            trees.bits_SK,
            trees.bits_SK.shape[1],
            vocab,
            K=most,
            DEPTH=trees.depth,
            BLOCK=power_of_2(most),
            num_warps=4,
        )


@triton.jit
def _count_bits(bits):
    """core.ops.trees.count_bits"""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    return (((bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F) * 0x0101010101010101) >> 56


@triton.jit(do_not_specialize=["total", "decodes"])
def _place_tree(
    index_ptr,
    rows_ptr,
    token_slots_ptr,
    computed_ptr,
    kept_bits_ptr,
    positions_ptr,
    root_ptr,
    bits_ptr,
    total,
    decodes,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = token < total
    index = tl.load(index_ptr + token, mask=ok, other=0)
    slot = tl.load(token_slots_ptr + token, mask=ok, other=0)
    root = tl.load(computed_ptr + slot, mask=ok, other=0)
    draft = index - root - 1
    fed = ok & (tl.load(rows_ptr + token, mask=ok, other=0) < decodes) & (draft >= 0) & (draft < K)
    bits = tl.load(kept_bits_ptr + slot * K + draft, mask=fed, other=0)
    tl.store(positions_ptr + token, tl.where(fed, root + _count_bits(bits), index), mask=ok)
    tl.store(root_ptr + token, root, mask=ok)
    tl.store(bits_ptr + token, bits, mask=ok)


def place_tree_triton(tokens: TokenLayout, computed_S: torch.Tensor, trees: TreeState, decodes: int) -> TokenLayout:
    total = len(tokens.ids_T)
    # Align each tensor to 16 bytes. Otherwise Triton would compile separate kernels for odd totals.
    made_3T = tokens.positions_T.new_empty(3, total + total % 2).narrow(1, 0, total)
    positions_T, root_T, bits_T = made_3T.unbind(0)
    _place_tree[(ceil_div(total, 256),)](
        tokens.positions_T,
        tokens.rows_T,
        tokens.slots_T,
        computed_S,
        trees.bits_SK,
        positions_T,
        root_T,
        bits_T,
        total,
        decodes,
        K=trees.bits_SK.shape[1],
        BLOCK=256,
        num_warps=4,
    )
    return replace(tokens, positions_T=positions_T, index_T=tokens.positions_T, tree=TreeMask(root_T, bits_T))


@triton.jit(
    do_not_specialize_on_alignment=[
        *("slots_ptr", "base_ptr", "limit_ptr", "accepted_ptr", "lengths_ptr", "drafted_ptr", "root_ptr"),
    ]
)
def _accept_tree(
    drawn_ptr,
    slots_ptr,
    base_ptr,
    limit_ptr,
    tokens_ptr,
    tokens_stride,
    computed_ptr,
    drafts_ptr,
    parents_ptr,
    path_ptr,
    taken_ptr,
    accepted_ptr,
    lengths_ptr,
    drafted_ptr,
    root_ptr,
    padding,
    W: tl.constexpr,
    K: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PATH: tl.constexpr,
):
    """Position w > 0 of a row is draft w - 1."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    base = tl.load(base_ptr + row)
    count = tl.minimum(tl.load(drafts_ptr + slot), tl.load(limit_ptr + row))
    w = tl.arange(0, BLOCK)
    drawn = tl.load(drawn_ptr + row * W + w, mask=w < W, other=-1)
    is_draft = (w > 0) & (w <= count) & (w < W)
    draft = tl.load(tokens_ptr + slot * tokens_stride + base + w - 1, mask=is_draft, other=-1).to(tl.int64)
    parent = tl.load(parents_ptr + slot * K + w - 1, mask=is_draft, other=-2) + 1
    d = tl.arange(0, PATH)
    path = tl.zeros((PATH,), tl.int64)
    taken = tl.zeros((PATH,), tl.int64) + tl.sum(tl.where(w == 0, drawn, 0), axis=0)
    at = tl.zeros((), tl.int32)
    accepted = tl.zeros((), tl.int32)
    for depth in range(DEPTH):
        last = tl.sum(tl.where(w == at, drawn, 0), axis=0)
        agrees = is_draft & (parent == at) & (draft == last)
        following = tl.min(tl.where(agrees, w, BLOCK), axis=0)
        # The walk has ended before if it accepted fewer than `depth` drafts.
        found = (following < BLOCK) & (accepted == depth)
        at = tl.where(found, following, at)
        accepted += found.to(tl.int32)
        path = tl.where(d > depth, at.to(tl.int64), path)
        taken = tl.where(d > depth, tl.sum(tl.where(w == at, drawn, 0), axis=0), taken)
    ok = d <= DEPTH
    tl.store(path_ptr + row * (DEPTH + 1) + d, path, mask=ok)
    tl.store(taken_ptr + row * (DEPTH + 1) + d, taken, mask=ok)
    real = slot != padding
    # All threads must have read their drafts before any is overwritten.
    tl.debug_barrier()
    place = tokens_ptr + slot * tokens_stride + base + d
    tl.store(place, tl.maximum(taken, 0).to(tl.int32), mask=ok & (d <= accepted) & real)
    if real:
        tl.store(computed_ptr + slot, base + accepted)
        tl.store(drafts_ptr + slot, tl.zeros((), tl.int64))
    tl.store(accepted_ptr + row, accepted.to(tl.int64))
    tl.store(lengths_ptr + row, base + accepted + 1)
    tl.store(drafted_ptr + row, count)
    tl.store(root_ptr + row, base - 1)


def accept_tree_triton(
    tokens_RW: torch.Tensor,
    slots_R: torch.Tensor,
    base_R: torch.Tensor,
    limit_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    computed_S: torch.Tensor,
    drafts_S: torch.Tensor,
    trees: TreeState,
) -> tuple[Accepted, torch.Tensor, AcceptedPath]:
    tokens_RW, slots_R = tokens_RW.contiguous(), slots_R.contiguous()
    rows, width = tokens_RW.shape
    path_RD, taken_RD = tokens_RW.new_empty(2, rows, trees.depth + 1).unbind(0)
    accepted_R, lengths_R, drafted_R, root_R = tokens_RW.new_empty(4, rows).unbind(0)
    if rows:
        _accept_tree[(rows,)](
            tokens_RW,
            slots_R,
            base_R.contiguous(),
            limit_R.contiguous(),
            tokens_SL,
            tokens_SL.stride(0),
            computed_S,
            drafts_S,
            trees.parents_SK,
            path_RD,
            taken_RD,
            accepted_R,
            lengths_R,
            drafted_R,
            root_R,
            len(computed_S) - 1,
            W=width,
            K=trees.parents_SK.shape[1],
            DEPTH=trees.depth,
            BLOCK=power_of_2(width),
            PATH=power_of_2(trees.depth + 1),
            num_warps=1,
        )
    return Accepted(accepted_R, lengths_R, drafted_R), taken_RD, AcceptedPath(slots_R, root_R, path_RD, accepted_R)


@triton.jit(
    do_not_specialize=["layer_stride"], do_not_specialize_on_alignment=["slots_ptr", "root_ptr", "accepted_ptr"]
)
def _keep_path(
    plane_ptr,
    layer_stride,
    table_ptr,
    slots_ptr,
    root_ptr,
    path_ptr,
    accepted_ptr,
    padding,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, layer, part of the columns). A draft moves to an index below all later drafts of its path, so the
    moves of a path are in order."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot == padding:
        return
    accepted = tl.load(accepted_ptr + row)
    root = tl.load(root_ptr + row)
    table = table_ptr + slot * P
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    plane = plane_ptr + tl.program_id(1).to(tl.int64) * layer_stride
    for depth in range(1, DEPTH + 1):
        index = tl.load(path_ptr + row * (DEPTH + 1) + depth)
        if (depth <= accepted) & (index != depth):
            source = root + index
            to = root + depth
            page = tl.load(table + source // PAGE).to(tl.int64)
            into = tl.load(table + to // PAGE).to(tl.int64)
            values = tl.load(plane + (page * PAGE + source % PAGE) * COLUMNS + column, mask=column < COLUMNS)
            tl.store(plane + (into * PAGE + to % PAGE) * COLUMNS + column, values, mask=column < COLUMNS)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def keep_path_triton(pool: KVPool, table_SP: torch.Tensor, path: AcceptedPath) -> None:
    rows = len(path.slots_R)
    for plane in pool.planes.values() if rows else ():
        columns = math.prod(plane.shape[3:])
        block = min(1024, power_of_2(columns))
        _keep_path[(rows, len(plane), ceil_div(columns, block))](
            # Values are moved as they are, whatever their format.
            plane.view(_WORDS[plane.itemsize]),
            plane.stride(0),
            table_SP,
            path.slots_R,
            path.root_R,
            path.index_RD,
            path.accepted_R,
            len(table_SP) - 1,
            P=table_SP.shape[1],
            PAGE=pool.group.page_tokens,
            COLUMNS=columns,
            DEPTH=path.index_RD.shape[1] - 1,
            BLOCK=block,
            num_warps=4,
        )
