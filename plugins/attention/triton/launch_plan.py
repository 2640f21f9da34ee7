"""Work items of a step, in a list for decode rows and one for other rows.

Nothing here depends on lengths. Grids and buffers depend on the number of tokens and rows, the number of decode rows,
and the tokens of the longest decode row. So a CUDA graph serves all steps that fit its token and row counts, whatever
their lengths, if their rows are in the same two classes; unused rows are empty.

Shapes: T tokens, B rows, W items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import BatchMeta, HostBounds, TreeMask
from dovetail.core.ops.trees import within_window
from dovetail.plugins.attention.triton.draft_rehearsal import request_steps
from dovetail.plugins.attention.triton.gather import Gathered
from dovetail.plugins.attention.triton.gpu import processors, shared_bytes_of
from dovetail.plugins.attention.triton.plan import ITEM, Items, plan_items
from dovetail.plugins.attention.triton.tiles import EMPTY, Geometry, Shape, Tile, Tiles

MANY_PROGRAMS = 3
"""Programs per SM, counting whole rows, from which rows of up to SHORT_KEYS keys are not split."""
SHORT_KEYS = 2048
"""Number of keys up to which splitting rows then gains less by balancing than joining the ranges costs."""
ROWS_AT_ONCE = 256
"""Rows that a program of plan_items processes at once."""
WHOLE = 1 << 30
"""Minimum range length, in keys, that prevents any row from being split."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    lists: tuple[Items, ...]
    part_rows: int
    """Number of rows of partial results; 0 = no row is split."""


def shape_of(geometry: Geometry, device: torch.device, hopper: bool) -> Shape:
    dtypes = geometry.dtype, geometry.kv_dtype
    return Shape(geometry.group, geometry.head_dim, *dtypes, geometry.page_tokens, hopper, shared_bytes_of(device))


def make_plan(
    tiles: Tiles,
    geometry: Geometry,
    meta: BatchMeta,
    host: HostBounds,
    tokens: int,
    room: Callable[[], torch.Tensor],
    hopper: bool = False,
) -> LaunchPlan:
    """Create work items for both classes of rows. `room`: memory for gathered pages. `hopper`: as in Shape."""
    window, kv_heads, dim, dtype = geometry.window, geometry.kv_heads, geometry.head_dim, geometry.dtype
    device = meta.kv_len_B.device
    shape = shape_of(geometry, device, hopper)
    rows, decode = len(host.counts), host.num_decode
    launches: list[tuple[int, int, Tile, Gathered | None, torch.Tensor | None]] = []
    if decode:
        programs = kv_heads / processors(device)
        # The kernels for Hopper have no tree masks.
        decodes = shape if meta.tree is None else replace(shape, hopper=False)
        tree_T3 = None if meta.tree is None else visible_keys(meta.tree, window, host.widest_decode - 1)
        request_steps(tiles, decodes, host.widest_decode, programs)
        launches.append((0, decode, tiles.decode(decodes, host.widest_decode, decode * programs), None, tree_T3))
    if decode < rows:
        gathered, bounds = None, host.bounds[decode:]
        fed = min(tokens - decode, sum(host.counts[decode:]))
        if not window and tiles.gather(shape, fed, bounds, kv_heads):
            gathered = Gathered.within(room(), meta, bounds, decode, kv_heads, dim, dtype)
            shape = replace(shape, kv_dtype=dtype, page_tokens=gathered.page_tokens)
        launches.append((decode, rows - decode, tiles.prefill(shape, fed, rows - decode), gathered, None))
    lists, part_rows = [], 0
    for first_row, count, tile, gathered, tree_T3 in launches:
        items, parts = make_items(tile, geometry, meta, host, tokens, (first_row, count), part_rows, gathered, tree_T3)
        lists.append(items)
        part_rows += parts
    return LaunchPlan(tuple(lists), part_rows)


def make_items(
    tile: Tile,
    geometry: Geometry,
    meta: BatchMeta,
    host: HostBounds,
    tokens: int,
    rows: tuple[int, int],
    part_rows: int,
    gathered: Gathered | None = None,
    tree_T3: torch.Tensor | None = None,
) -> tuple[Items, int]:
    """Create the work items of `rows`, the first and how many, and return them with their number of partial rows, which
    are counted from `part_rows` on. `tokens`: those of the step. `tree_T3`: the rows of `visible`, if these rows feed
    trees."""
    (first_row, count), window, device = rows, geometry.window, meta.kv_len_B.device
    queries, units = tile.queries(geometry.group), geometry.kv_heads * tile.head_tiles(geometry.group)
    last = first_row + count == len(host.counts)
    # Every row may end in a partly filled tile, and so may the tokens that belong to no row.
    own = tokens if last else min(tokens, sum(host.counts[first_row : first_row + count]))
    whole = own // queries + count + 1
    target = ceil_div(tile.programs * processors(device), units)
    longest = max(host.bounds[first_row : first_row + count])
    many = whole * units >= MANY_PROGRAMS * processors(device)
    split = longest > (SHORT_KEYS if many else tile.least)
    capacity = whole + target if split else whole
    items = torch.empty(capacity, ITEM.value, dtype=torch.int32, device=device)
    grain, words = tile.grain(meta.page_tokens), tile.box_words(geometry.head_dim)
    entries = tile.prefetch_keys // grain
    first_pages = torch.empty(capacity * entries, dtype=torch.int32, device=device)
    plan_items[(count + 2,)](
        meta.row_start_B1,
        meta.kv_len_B,
        items,
        meta.page_table_BP,
        first_pages,
        first_row,
        count,
        tokens if last else 0,
        part_rows,
        target,
        tile.least if split else WHOLE,
        tile.root,
        capacity,
        int(tree_T3 is not None),
        int(not tile.joins),
        window,
        queries,
        tile.span,
        meta.page_table_BP.stride(0),
        meta.page_tokens,
        entries,
        grain,
        ROWS=ROWS_AT_ONCE,
        BLOCK=64,
        num_warps=1,
    )
    counts = torch.zeros(0 if words or not tile.joins else capacity * units, dtype=torch.int32, device=device)
    # Fill at least one word: attend_decode reads the plan without waiting for its preceding kernel, so that kernel must
    # not be plan_items. The fill kernel starts only after plan_items has ended.
    boxes = capacity * units * words if split else min(1, words)
    mail = torch.full((boxes,), EMPTY, dtype=torch.int32, device=device)
    parts = capacity * queries if (split and not words) or not tile.joins else 0
    return Items(tile, items, counts, gathered, first_pages, mail, tree_T3), parts


def visible_keys(tree: TreeMask, window: int, most: int) -> torch.Tensor:
    """Return the rows of `visible`, [T, 3]. `most`: most drafts of a row."""
    return torch.stack((tree.root_T, *within_window(tree, window, most)), 1)
