"""Host side of attention over compressed latents: which rows are absorbed, which expanded, and their launches.

Rows of many tokens are expanded: their latents are copied from the pages and multiplied by the up-projections, for as
many heads at a time as fit into the buffer for copies, and the kernels for keys and values attend over the result. All
other rows, and every row while a graph is captured, are absorbed (latent_kernel.py, on Hopper hopper/latent.py).

Shapes: T tokens, H query heads, N dims of a query that are not rotated, R rotary dim, D = N + R, L kv rank, V value
dim, O = N + V rows of a head's up-projection, S keys of expanded rows, B rows, P pages.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
import triton

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import MLA, AttentionLayer, AttnCtx, BatchMeta, HostBounds, TreeMask
from dovetail.core.ops.kernels.launch import dependent
from dovetail.core.ops.latents import GROUP, LATENT, ROTARY, SCALES, expands, read_latents
from dovetail.core.ops.padding import empty_rows
from dovetail.core.ops.rehearsal import StepLimits, WarmupStep, rehearsing, running
from dovetail.plugins.attention.triton.backend import (
    COMPUTE,
    LaunchPlan,
    Triton,
    _has_hopper,
    _processors,
    _shape,
    make_items,
    shared_bytes_of,
    visible_keys,
)
from dovetail.plugins.attention.triton.gather import PAGE, ROOM_BYTES
from dovetail.plugins.attention.triton.latent_kernel import attend_latents as attend_kernel
from dovetail.plugins.attention.triton.latent_rehearsal import absorbed_steps, expanded_steps
from dovetail.plugins.attention.triton.plan import Items
from dovetail.plugins.attention.triton.tiles import Geometry, PromptTile, Tile, Tiles

MOST_TILE_ROWS = 64
"""Rows of a large tile, tokens x heads: the output has kv_rank columns, which must fit into registers."""
LEAST_TILE_ROWS = 16
"""Rows of a small tile, as many as the tensor cores need."""
FEW = 9
"""With fewer tiles than one for so many SMs, tiles are small."""
HOPPER_KEYS, HOPPER_SIZES = 64, (512, 64)
"""Keys of a block of attend_latents_hopper; kv rank and rotary dim that it supports."""
EXCHANGE = 8 << 10
"""Shared memory that is set aside for the exchange between warps."""


@dataclass(frozen=True, slots=True)
class LatentTile(Tile):
    """Tile of attend_latents. All heads share a key, so a tile has heads of one token, or several tokens' heads."""

    hopper: bool = False
    """Whether attend_latents_hopper (hopper/latent.py) runs in place of the kernel for all GPUs."""

    def queries(self, group: int) -> int:
        return max(1, self.block_m // group)

    def head_tiles(self, group: int) -> int:
        return triton.cdiv(group, self.block_m)

    def heads(self, group: int) -> int:
        """Heads of a tile."""
        return min(group, self.block_m)


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Consecutive rows that are absorbed."""

    tokens: slice
    meta: BatchMeta
    """Metadata of these rows; tokens are counted from the first of them."""
    plan: LaunchPlan


@dataclass(frozen=True, slots=True)
class Expanded:
    """Consecutive rows that are expanded."""

    tokens: slice
    meta: BatchMeta
    """Metadata of these rows, with a page table of the copies."""
    plan: LaunchPlan
    slots_S: torch.Tensor
    """int64: token slot of each copied latent. Copies past a row's length repeat its last one."""
    heads: int
    """Heads that are expanded at a time, a divisor of all."""


def attend_latents(
    backend: Triton, layer: AttentionLayer, ctx: AttnCtx, q_THD: torch.Tensor, up_HOL: torch.Tensor
) -> torch.Tensor:
    """Return [T, H * V]."""
    mla = layer.mla
    assert mla is not None
    out_TC = empty_rows(len(q_THD), layer.heads * mla.v_dim, q_THD.dtype, q_THD.device)
    key = mla, layer.heads, q_THD.dtype
    if key not in ctx.state:
        ctx.state[key] = _plan(backend, layer, ctx, q_THD)
    out_THV = out_TC.view(len(q_THD), layer.heads, mla.v_dim)
    for run in ctx.state[key]:
        if run.tokens.start == run.tokens.stop:
            continue
        attend = _absorbed if isinstance(run, Absorbed) else _expanded
        attend(backend, layer, run, q_THD[run.tokens], up_HOL, out_THV[run.tokens])
    return out_TC


def _plan(backend: Triton, layer: AttentionLayer, ctx: AttnCtx, q_THD: torch.Tensor) -> list[Absorbed | Expanded]:
    meta, host, tokens = ctx.meta, ctx.host, len(q_THD)
    mla, rows = layer.mla, len(host.counts)
    assert mla is not None
    if (now := running()) is not None:
        now.steps.update(dict.fromkeys(_all_steps(backend, layer, meta, q_THD.dtype, now.limits)))
    if not rows or not tokens:
        return []
    if sum(host.counts) > tokens:
        # Capacities of a graph: only the device knows the rows' tokens.
        return [_plan_absorbed(backend, layer, meta, host, slice(0, tokens), q_THD.dtype)]
    chain = meta.tree is None and mla.v_dim <= mla.nope_dim + mla.rope_dim
    expanded = [row >= host.num_decode and chain and expands(mla, count) for row, count in enumerate(host.counts)]
    runs: list[Absorbed | Expanded] = []
    first = first_token = 0
    for row in range(rows):
        if row + 1 < rows and expanded[row + 1] == expanded[row]:
            continue
        last_token = first_token + sum(host.counts[first : row + 1])
        taken = slice(first_token, tokens if row + 1 == rows else last_token)
        cut, bounds = _cut(meta, host, first, row + 1, taken)
        heads = _heads_at_once(layer, bounds.bounds, q_THD.dtype) if expanded[row] else 0
        if heads:
            runs.append(_plan_expanded(backend, layer, cut, bounds, taken, heads, q_THD.dtype))
        else:
            runs.append(_plan_absorbed(backend, layer, cut, bounds, taken, q_THD.dtype))
        first, first_token = row + 1, last_token
    return runs


def _all_steps(
    backend: Triton, layer: AttentionLayer, meta: BatchMeta, dtype: torch.dtype, limits: StepLimits
) -> list[WarmupStep]:
    """Return steps that launch every kernel of the layer."""
    mla, device, kv_dtype = layer.mla, meta.kv_len_B.device, backend.pools[layer.group].planes[LATENT].dtype
    assert mla is not None
    hopper = backend.config.gluon and _has_hopper(device)
    chain = mla.v_dim <= mla.nope_dim + mla.rope_dim
    most = next((count - 1 for count in range(1, limits.longest + 1) if chain and expands(mla, count)), limits.longest)

    def absorbed(rows: int, tokens: int) -> Hashable:
        tiles = max(rows, tokens * layer.heads // MOST_TILE_ROWS)
        return _tile(layer, MOST_TILE_ROWS, tiles, dtype, kv_dtype, device, hopper=hopper)

    def expanded(rows: int, tokens: int) -> Hashable:
        shape = _shape(Geometry(1, 1, layer.head_dim, 0, dtype, dtype, PAGE), device, hopper)
        tile = Tiles().prefill(shape, tokens, rows)
        return replace(tile, persistent=False) if isinstance(tile, PromptTile) else tile

    def pages(heads: int) -> int:
        return ROOM_BYTES // (2 * heads * PAGE * layer.head_dim * dtype.itemsize)

    found = list(absorbed_steps(limits, most, absorbed))
    if most < limits.longest:
        found += expanded_steps(limits, most + 1, _divisors(layer.heads), pages, expanded)
    return [step for _, step in found]


def _cut(meta: BatchMeta, host: HostBounds, first: int, end: int, tokens: slice) -> tuple[BatchMeta, HostBounds]:
    """Return metadata and bounds of the rows [first, end), whose tokens are those of the step from `tokens.start` on.
    Only what kernels read is changed."""
    decode = max(0, min(end, host.num_decode) - first)
    tree = meta.tree
    part = replace(
        meta,
        row_start_B1=meta.row_start_B1[first : end + 1] - tokens.start,
        kv_len_B=meta.kv_len_B[first:end],
        page_table_BP=meta.page_table_BP[first:end],
        tree=None if tree is None else TreeMask(tree.root_T[tokens], tree.ancestors_T[tokens]),
    )
    return part, HostBounds(host.counts[first:end], host.bounds[first:end], decode, host.decode_width)


# Absorbed


def _plan_absorbed(
    backend: Triton, layer: AttentionLayer, meta: BatchMeta, host: HostBounds, tokens: slice, dtype: torch.dtype
) -> Absorbed:
    rows, decode = len(host.counts), host.num_decode
    plane = backend.pools[layer.group].planes[LATENT]
    # Every head attends to the only key.
    geometry = Geometry(layer.heads, 1, layer.head_dim, 0, dtype, plane.dtype, meta.page_tokens)
    lists: list[Items] = []
    part_rows = 0
    for first, count in ((0, decode), (decode, rows - decode)):
        if not count:
            continue
        widest = host.widest_decode if first < decode else MOST_TILE_ROWS
        fed = min(tokens.stop - tokens.start, sum(host.counts[first : first + count]))
        tiles = max(count, fed * layer.heads // MOST_TILE_ROWS)
        tree_T3 = None
        if meta.tree is not None and first < decode:
            tree_T3 = visible_keys(meta.tree, 0, host.widest_decode - 1)
        device = meta.kv_len_B.device
        hopper = backend.config.gluon and _has_hopper(device)
        tile = _tile(layer, widest, tiles, dtype, plane.dtype, device, hopper=hopper, tree=tree_T3 is not None)
        total = tokens.stop - tokens.start
        items, parts = make_items(tile, geometry, meta, host, total, (first, count), part_rows, tree_T3=tree_T3)
        lists.append(items)
        part_rows += parts
    return Absorbed(tokens, meta, LaunchPlan(tuple(lists), part_rows))


def _tile(
    layer: AttentionLayer,
    tokens: int,
    tiles: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    *,
    hopper: bool = False,
    tree: bool = False,
) -> LatentTile:
    """Tile for rows of at most `tokens` tokens. `tiles`: rows, or tiles of MOST_TILE_ROWS if they are more. `hopper`:
    whether GPU and Triton support attend_latents_hopper. `tree`: the rows feed draft trees, whose masks take registers.
    Tiles are made smaller until they fit into shared memory."""
    assert layer.mla is not None
    if dtype.itemsize == 4:
        return LatentTile(16, 16, 4, 1, 1)
    # Each tile reads and converts the row's latents, so few large ones are fastest, even half empty, and three quarters
    # empty with the kernel for Hopper. But the ranges of a row are joined by one program a tile: where few tiles fill
    # the GPU with ranges, small ones join in parallel.
    many, width = FEW * tiles >= _processors(device), layer.heads * tokens
    if many and width >= LEAST_TILE_ROWS and hopper and not tree and _fits_hopper(layer.mla, dtype, kv_dtype):
        return LatentTile(MOST_TILE_ROWS, HOPPER_KEYS, 4, 2, 1, hopper=True)
    # The fastest on an H200 (benchmarks/NOTES.md, Experts).
    large = many and width > LEAST_TILE_ROWS
    rows, warps = (MOST_TILE_ROWS, 8) if large else (LEAST_TILE_ROWS, 8 if kv_dtype.itemsize == 1 else 4)
    keys = 32 if large and tree else 64
    tile = LatentTile(rows, keys, warps, 2, 1)
    shared = shared_bytes_of(device)
    while _shared_bytes(layer.mla, tile, dtype.itemsize) > shared and tile.block_n > 16:
        tile = replace(tile, block_n=tile.block_n // 2)
    while _shared_bytes(layer.mla, tile, dtype.itemsize) > shared and tile.block_m > LEAST_TILE_ROWS:
        tile = replace(tile, block_m=tile.block_m // 2)
    return tile


def _fits_hopper(mla: MLA, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether attend_latents_hopper supports sizes and formats. Its blocks fill registers and shared memory at the
    sizes of DeepSeek V2 and V3."""
    narrow = dtype == torch.bfloat16 and kv_dtype == torch.float8_e4m3fn
    return (mla.kv_rank, mla.rope_dim) == HOPPER_SIZES and (narrow or (kv_dtype == dtype and dtype.itemsize == 2))


def _shared_bytes(mla: MLA, tile: LatentTile, itemsize: int) -> int:
    """Shared memory of a program: queries and keys with their rotated columns, and latents of further stages."""
    latent, rotated = _blocks(mla)
    each = (tile.block_m + tile.block_n) * (latent + rotated) + (tile.stages - 1) * tile.block_n * latent
    return each * itemsize + EXCHANGE


def _blocks(mla: MLA) -> tuple[int, int]:
    """Return the padded columns of a latent and of its rotated part."""
    return max(16, triton.next_power_of_2(mla.kv_rank)), max(16, triton.next_power_of_2(mla.rope_dim))


def _absorbed(
    backend: Triton,
    layer: AttentionLayer,
    run: Absorbed,
    q_THD: torch.Tensor,
    up_HOL: torch.Tensor,
    out_THV: torch.Tensor,
) -> None:
    mla, pool = layer.mla, backend.pools[layer.group]
    assert mla is not None
    q_THN, q_THR = q_THD.split((mla.nope_dim, mla.rope_dim), dim=2)
    key_HNL, value_HVL = up_HOL.split((mla.nope_dim, mla.v_dim), dim=1)
    inner_HTL = torch.bmm(q_THN.transpose(0, 1), key_HNL)
    heads, tokens, rank = inner_HTL.shape
    mixed_THL = q_THD.new_empty(tokens, heads, rank)
    parts = q_THD.new_empty(run.plan.part_rows, heads * rank, dtype=torch.float32)
    lse = q_THD.new_empty(run.plan.part_rows, heads, dtype=torch.float32)
    planes = {name: pool.layer(layer.local, name) for name in pool.planes}
    block_l, block_r = _blocks(mla)
    scaled = SCALES in planes
    for items in run.plan.lists:
        tile = items.tile
        assert isinstance(tile, LatentTile)
        units = tile.head_tiles(heads)
        if tile.hopper:
            from dovetail.plugins.attention.triton.hopper.launch import latents

            results, processors = (mixed_THL, parts, lse), _processors(q_THD.device)
            latents(
                layer,
                inner_HTL,
                q_THR,
                planes,
                run.meta,
                tile.heads(heads),
                units,
                items.items,
                items.counts,
                *results,
                processors,
            )
            continue
        attend_kernel[units, items.items.shape[0]](
            inner_HTL,
            inner_HTL.stride(0),
            inner_HTL.stride(1),
            q_THR,
            planes[LATENT],
            planes.get(SCALES),
            planes.get(ROTARY),
            mixed_THL,
            parts,
            lse,
            items.counts,
            items.items,
            run.meta.page_table_BP,
            run.meta.page_table_BP.stride(0),
            items.tree_T3,
            layer.scale,
            H=heads,
            HEADS=tile.heads(heads),
            UNITS=units,
            D=layer.head_dim,
            L=rank,
            R=mla.rope_dim,
            GROUPS=ceil_div(block_l, GROUP) if scaled else 0,
            SCALES=ceil_div(rank, GROUP),
            PAGE=run.meta.page_tokens,
            PAGE_COLUMNS=planes[LATENT].shape[-1],
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_L=block_l,
            BLOCK_R=block_r,
            COMPUTE=COMPUTE[q_THD.dtype],
            PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
            num_warps=tile.warps,
            num_stages=tile.stages,
            **dependent(q_THD),
        )
    torch.bmm(mixed_THL.transpose(0, 1), value_HVL.mT, out=out_THV.transpose(0, 1))


# Expanded


def _copied_pages(bounds: Sequence[int]) -> int:
    return sum(ceil_div(bound, PAGE) for bound in bounds)


def _heads_at_once(layer: AttentionLayer, bounds: Sequence[int], dtype: torch.dtype) -> int:
    """Return how many heads' keys and values fit into the buffer for copies; 0 = not even one."""
    each = 2 * _copied_pages(bounds) * PAGE * layer.head_dim * dtype.itemsize
    return next((heads for heads in _divisors(layer.heads) if heads * each <= ROOM_BYTES), 0)


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the greatest first."""
    return [each for each in range(number, 0, -1) if number % each == 0]


def _plan_expanded(
    backend: Triton,
    layer: AttentionLayer,
    meta: BatchMeta,
    host: HostBounds,
    tokens: slice,
    heads: int,
    dtype: torch.dtype,
) -> Expanded:
    """Rows follow each other in the copies. Their places are computed from exact lengths, on the device."""
    device, rows = meta.kv_len_B.device, len(host.counts)
    len_B = meta.kv_len_B.long()
    pages_B = (len_B + PAGE - 1) // PAGE
    end_B = pages_B.cumsum(0)
    start_B = end_B - pages_B
    longest = max(ceil_div(bound, PAGE) for bound in host.bounds)
    table_BP = (start_B.unsqueeze(1) + torch.arange(longest, device=device)).int()
    page_P = torch.arange(_copied_pages(host.bounds), device=device)
    row_P = torch.searchsorted(end_B, page_P, right=True).clamp(max=rows - 1)
    key_PS = ((page_P - start_B.index_select(0, row_P)) * PAGE).unsqueeze(1) + torch.arange(PAGE, device=device)
    last_P = len_B.index_select(0, row_P) - 1
    key_PS = torch.minimum(key_PS, last_P.unsqueeze(1)).clamp(min=0)
    from_PS = meta.page_table_BP.index_select(0, row_P).gather(1, key_PS // meta.page_tokens).long()
    # A row without keys, of a step's spare rows, has no page in its table.
    slots_PS = torch.where(last_P.unsqueeze(1) < 0, 0, from_PS * meta.page_tokens + key_PS % meta.page_tokens)
    copied = replace(meta, page_table_BP=table_BP, page_tokens=PAGE)
    geometry = Geometry(heads, heads, layer.head_dim, 0, dtype, dtype, PAGE)
    plan = backend.make_plan(geometry, copied, host, tokens.stop - tokens.start)
    return Expanded(tokens, copied, plan, slots_PS.flatten(), heads)


def _expanded(
    backend: Triton,
    layer: AttentionLayer,
    run: Expanded,
    q_THD: torch.Tensor,
    up_HOL: torch.Tensor,
    out_THV: torch.Tensor,
) -> None:
    mla, heads, keys = layer.mla, run.heads, len(run.slots_S)
    assert mla is not None
    nope, value = mla.nope_dim, mla.v_dim
    key_HNL, value_HVL = up_HOL.split((nope, value), dim=1)
    latent_SL, rotary_SR = read_latents(layer, backend.pools[layer.group], run.slots_S, q_THD.dtype)
    shape = 2, keys, heads, layer.head_dim
    room = backend.room_on(q_THD.device).view(q_THD.dtype)
    k_SHD, v_SHD = room.narrow(0, 0, math.prod(shape)).view(shape).unbind()
    k_SHD.narrow(2, nope, mla.rope_dim).copy_(rotary_SR.unsqueeze(1))
    # The kernels have values as wide as keys.
    v_SHD.narrow(2, value, layer.head_dim - value).zero_()
    k_pages, v_pages = (x.view(-1, PAGE, heads, layer.head_dim) for x in (k_SHD, v_SHD))
    some = replace(layer, heads=heads, kv_heads=heads, mla=None)
    latent_HSL = latent_SL.expand(heads, -1, -1)
    k_HSN, v_HSV = k_SHD.narrow(2, 0, nope).transpose(0, 1), v_SHD.narrow(2, 0, value).transpose(0, 1)
    # All rounds launch the same kernels.
    for first in range(0, heads if rehearsing() else layer.heads, heads):
        torch.bmm(latent_HSL, key_HNL.narrow(0, first, heads).mT, out=k_HSN)
        torch.bmm(latent_HSL, value_HVL.narrow(0, first, heads).mT, out=v_HSV)
        out_TC = empty_rows(len(q_THD), heads * layer.head_dim, q_THD.dtype, q_THD.device)
        q_own = q_THD.narrow(1, first, heads).contiguous()
        backend.launch(some, run.meta, q_own, k_pages, v_pages, run.plan, out_TC)
        out_THD = out_TC.view(len(q_THD), heads, layer.head_dim)
        out_THV.narrow(1, first, heads).copy_(out_THD.narrow(2, 0, value))
