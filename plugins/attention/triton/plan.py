"""The kernel that divides a step into work items for the attention kernels.

A work item is a tile of one row's queries over a range of its keys. `plan_items` creates items on the device from exact
lengths, so the host launches a grid that depends only on capacities. Long rows are split into ranges of keys
(FlashDecoding, Dao et al. 2023) of about equal work over the whole batch, and their partial results are joined by
log-sum-exp. Tokens that belong to no row become items without keys, which write zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dovetail.plugins.attention.triton.gather import Gathered
from dovetail.plugins.attention.triton.tiles import Tile

ITEM = tl.constexpr(11)
"""Number of int32 fields of an item: row (-1: unused), first token, number of tokens, index of the first token's key,
first key that one of them sees, start and end of the range, first partial row (-1: write the output), row length,
number of ranges of the tile, the tile's first item."""


@dataclass(frozen=True, slots=True)
class Items:
    """One launch of an attention kernel: rows of a class, divided into work items."""

    tile: Tile
    items: torch.Tensor
    """int32 [W, ITEM]"""
    counts: torch.Tensor
    """int32, zero between launches: number of finished ranges per tile. Empty if ranges use mailboxes, or are joined
    by another kernel."""
    gathered: Gathered | None
    """Copies of the pages that the rows read; None = the pages themselves."""
    first_pages: torch.Tensor
    """int32: for each item, the pages of the first tile.prefetch_keys keys of its range."""
    mail: torch.Tensor
    """Mailboxes of all programs, int32 of tile.box_words each, EMPTY between launches; one word if no row is split."""
    tree_T3: torch.Tensor | None
    """int64: root and visible keys of each token of decode rows with draft trees (`visible`); None = causal."""


@triton.jit(
    do_not_specialize=[
        *("first_row", "rows", "tokens", "first_part", "target", "least", "root", "capacity", "tree", "window"),
        *("partial", "queries", "block_n", "table_stride", "page_tokens", "entries", "grain"),
    ],
    # Those of consecutive rows of a step may begin anywhere.
    do_not_specialize_on_alignment=["row_start_ptr", "kv_len_ptr", "table_ptr"],
)
def plan_items(
    row_start_ptr,
    kv_len_ptr,
    items_ptr,
    table_ptr,
    first_pages_ptr,
    first_row,
    rows,
    tokens,
    first_part,
    target,
    least,
    root,
    capacity,
    tree,
    partial,
    window,
    queries,
    block_n,
    table_stride,
    page_tokens,
    entries,
    grain,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the items of rows [first_row, first_row + rows). If `tokens`, the step's token count, is not 0, also write
    items for the tokens past the last row.

    Ranges have at least `least` keys and at least `root` times the cube root of the longest row's keys; a very large
    `least` leaves every row whole. If `partial` is not 0, whole rows have a partial result, too. For each item,
    `entries` pages of its range are stored too, `grain` keys apart.
    Program r < rows writes the items of one row, program `rows` those of the padding, and the last one marks unused
    items. No argument but ROWS and BLOCK is a constant, so one compiled kernel serves steps of every shape.
    """
    mine = tl.program_id(0)
    # 64 bits, for up to 2 ** 17 tokens with 2 ** 17 keys each.
    total = tl.zeros((), tl.int64)
    longest = tl.full((), 1, tl.int32)
    for base in range(0, rows + 1, ROWS):
        _, _, _, work, tiles = _rows_to_plan(
            row_start_ptr, kv_len_ptr, first_row, rows, base, tokens, window, queries, block_n, ROWS
        )
        total += tl.sum(tiles.to(tl.int64) * work, axis=0)
        longest = tl.maximum(longest, tl.max(work, axis=0))
    least = tl.maximum(least, (root * tl.exp2(tl.log2(longest.to(tl.float32)) / 3)).to(tl.int32))
    chunk = tl.maximum(tl.cdiv(total, target).to(tl.int32), least)
    my_start, my_count, my_length, my_work, my_tiles, my_splits, my_first, placed = 0, 0, 0, 0, 0, 0, 0, 0
    for base in range(0, rows + 1, ROWS):
        start, count, length, work, tiles = _rows_to_plan(
            row_start_ptr, kv_len_ptr, first_row, rows, base, tokens, window, queries, block_n, ROWS
        )
        splits = tl.maximum((work + chunk // 2) // chunk, 1)
        items = tiles * splits
        is_mine = base + tl.arange(0, ROWS) == mine
        my_start += tl.sum(tl.where(is_mine, start, 0), axis=0)
        my_count += tl.sum(tl.where(is_mine, count, 0), axis=0)
        my_length += tl.sum(tl.where(is_mine, length, 0), axis=0)
        my_work += tl.sum(tl.where(is_mine, work, 0), axis=0)
        my_tiles += tl.sum(tl.where(is_mine, tiles, 0), axis=0)
        my_splits += tl.sum(tl.where(is_mine, splits, 0), axis=0)
        my_first += tl.sum(tl.where(is_mine, placed + tl.cumsum(items, axis=0) - items, 0), axis=0)
        placed += tl.sum(items, axis=0)
    my_splits = tl.maximum(my_splits, 1)
    my_items = my_tiles * my_splits
    my_range = tl.cdiv(my_work, my_splits * block_n) * block_n
    if mine == rows + 1:
        my_first = placed
        my_items = capacity - placed

    for i in range(0, my_items, BLOCK):
        index = i + tl.arange(0, BLOCK)
        ok = index < my_items
        place = index % my_splits
        # The last tile of a prompt sees the most keys. It comes first, so that the programs end at similar times.
        query = (my_tiles - 1 - index // my_splits) * queries
        # Tokens of no row have no keys, but kernels that rotate queries read the table of angles for them, too.
        at = tl.maximum(my_length - my_count + query, 0)
        n = tl.minimum(my_count - query, queries)
        # A draft of a tree may have the position after the root.
        least_at = tl.where(tree != 0, my_length - my_count, at)
        seen_from = tl.where(window > 0, tl.maximum(least_at - window + 1, 0), 0)
        seen_to = tl.where(tree != 0, my_length, tl.minimum(at + n, my_length))
        lo = seen_from // block_n * block_n + place * my_range
        hi = tl.where(my_splits > 1, tl.minimum(seen_to, lo + my_range), seen_to)
        part = tl.where((my_splits > 1) | (partial != 0), first_part + (my_first + index) * queries, -1)
        item_row = tl.where(mine > rows, -1, first_row + tl.minimum(mine, rows - 1)) + tl.zeros((BLOCK,), tl.int32)
        to = items_ptr + (my_first + index) * ITEM
        tl.store(to, item_row, mask=ok)
        tl.store(to + 1, my_start + query, mask=ok)
        tl.store(to + 2, n, mask=ok)
        tl.store(to + 3, at, mask=ok)
        tl.store(to + 4, seen_from, mask=ok)
        tl.store(to + 5, lo, mask=ok)
        tl.store(to + 6, hi, mask=ok)
        tl.store(to + 7, part, mask=ok)
        tl.store(to + 8, my_length, mask=ok)
        tl.store(to + 9, my_splits + tl.zeros((BLOCK,), tl.int32), mask=ok)
        tl.store(to + 10, my_first + index - place, mask=ok)

    if mine < rows:
        for i in range(0, my_items * entries, BLOCK):
            entry = i + tl.arange(0, BLOCK)
            index = entry // entries
            ok = index < my_items
            query = tl.where(tree != 0, 0, (my_tiles - 1 - index // my_splits) * queries)
            seen_from = tl.where(window > 0, tl.maximum(my_length - my_count + query - window + 1, 0), 0)
            key = seen_from // block_n * block_n + index % my_splits * my_range + entry % entries * grain
            at = table_ptr + (first_row + mine).to(tl.int64) * table_stride + key // page_tokens
            page = tl.load(at, mask=ok & (key < my_length), other=0)
            tl.store(first_pages_ptr + my_first * entries + entry, page, mask=ok)


@triton.jit
def _rows_to_plan(
    row_start_ptr, kv_len_ptr, first_row, rows, base, tokens, window, queries, block_n, ROWS: tl.constexpr
):
    """Return (first token, tokens, length, keys to read, tiles) of ROWS rows from `base` on. Row `rows` is padding."""
    row = base + tl.arange(0, ROWS)
    real = row < rows
    start = tl.load(row_start_ptr + first_row + row, mask=row <= rows, other=0)
    end = tl.load(row_start_ptr + first_row + row + 1, mask=real, other=0)
    end = tl.where(row == rows, tl.maximum(tokens, start), end)
    count = tl.where(row <= rows, end - start, 0)
    length = tl.load(kv_len_ptr + first_row + row, mask=real, other=0)
    length = tl.where(count > 0, length, 0)
    work = tl.where(window > 0, tl.minimum(length, window + count + block_n), length)
    return start, count, length, work, tl.cdiv(count, queries)
