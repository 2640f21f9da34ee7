"""Rows of few tokens that attend to compressed latents as they are: plan, tiles and launches.

Shapes: T tokens, H query heads, N dims of a query that are not rotated, R rotary dim, D = N + R, L kv rank, V value
dim, O = N + V rows of a head's up-projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.interfaces import MLA, AttentionLayer, BatchMeta, HostBounds
from dovetail.core.ops.kernels.launch import dependent
from dovetail.core.ops.latents import GROUP, LATENT, ROTARY, SCALES
from dovetail.plugins.attention.triton.gpu import has_hopper, processors, shared_bytes_of
from dovetail.plugins.attention.triton.kernels import COMPUTE
from dovetail.plugins.attention.triton.latent_kernel import attend_latents as attend_kernel
from dovetail.plugins.attention.triton.latent_values import project_ranges
from dovetail.plugins.attention.triton.launch_plan import LaunchPlan, make_items, visible_keys
from dovetail.plugins.attention.triton.paged import PagedTriton
from dovetail.plugins.attention.triton.plan import Items
from dovetail.plugins.attention.triton.tiles import Geometry, Tile

MOST_TILE_ROWS = 64
"""Rows of a large tile, tokens x heads: the output has kv_rank columns, which must fit into registers."""
LEAST_TILE_ROWS = 16
"""Rows of a small tile, as many as the tensor cores need."""
FEW = 9
"""With fewer tiles than one for so many SMs, tiles are small."""
MOST_PROJECTED = 64
"""Tokens up to which `project_ranges` joins the ranges of small tiles. Each of its programs looks for its tokens among
all items."""
VALUE_BYTES, PARTS = 128, 16
"""Bytes of a latent column in the block of the up-projection that project_ranges holds, so that rows of 512 columns fit
into 99 KB of shared memory in float32, too, and partial results that it joins at a time."""
HOPPER_KEYS, HOPPER_SIZES = 64, (512, 64)
"""Keys of a block of the kernels for Hopper; kv rank and rotary dim that they support."""
SPLITS, ROOT = 8, 7
"""Tokens of small tiles up to which project_ranges joins the ranges on Hopper; Tile.root of one token."""
FEW_WHOLE = 40
"""Tokens up to which ranges of 256 keys are faster than longer ones, for one program of an SM."""
BLACKWELL = (10, 0)
"""Compute capability."""
EXCHANGE = 8 << 10
"""Shared memory that is set aside for the exchange between warps."""


@dataclass(frozen=True, slots=True)
class LatentTile(Tile):
    """Tile of attend_latents. All heads share a key, so a tile has heads of one token, or several tokens' heads."""

    hopper: bool = False
    """Whether a kernel for Hopper runs in place of the one for all GPUs: attend_latents_small (hopper/latent_small.py)
    with LEAST_TILE_ROWS rows, or else attend_latents_hopper (hopper/latent.py)."""

    def queries(self, group: int) -> int:
        return max(1, self.block_m // group)

    def head_tiles(self, group: int) -> int:
        return ceil_div(group, self.block_m)

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
    ends: tuple[int, ...]
    """Number of tokens before which each list of the plan has all of its own."""


def plan_absorbed(
    backend: PagedTriton, layer: AttentionLayer, meta: BatchMeta, host: HostBounds, tokens: slice, dtype: torch.dtype
) -> Absorbed:
    rows, decode = len(host.counts), host.num_decode
    plane = backend.pools[layer.group].planes[LATENT]
    # Every head attends to the only key.
    geometry = Geometry(layer.heads, 1, layer.head_dim, 0, dtype, plane.dtype, meta.page_tokens)
    lists: list[Items] = []
    ends: list[int] = []
    part_rows = 0
    for first, count in ((0, decode), (decode, rows - decode)):
        if not count:
            continue
        widest = host.widest_decode if first < decode else MOST_TILE_ROWS
        fed = min(tokens.stop - tokens.start, sum(host.counts[first : first + count]))
        tree_T3 = None
        if meta.tree is not None and first < decode:
            tree_T3 = visible_keys(meta.tree, 0, host.widest_decode - 1)
        device = meta.kv_len_B.device
        hopper = backend.config.gluon and has_hopper(device)
        how = dtype, plane.dtype, device
        tile = tile_of(layer, widest, count, fed, *how, hopper=hopper, tree=tree_T3 is not None)
        total = tokens.stop - tokens.start
        # Decode rows come first, and padding last.
        ends.append(fed if first + count < rows else total)
        items, parts = make_items(tile, geometry, meta, host, total, (first, count), part_rows, tree_T3=tree_T3)
        lists.append(items)
        part_rows += parts
    return Absorbed(tokens, meta, LaunchPlan(tuple(lists), part_rows), tuple(ends))


def tile_of(
    layer: AttentionLayer,
    widest: int,
    rows: int,
    tokens: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    *,
    hopper: bool = False,
    tree: bool = False,
) -> LatentTile:
    """Tile for `rows` rows with `tokens` tokens together, none with more than `widest`. `hopper`: whether GPU and
    Triton support the kernels for Hopper. `tree`: the rows feed draft trees, whose masks take registers. Tiles are made
    smaller until they fit into shared memory."""
    assert layer.mla is not None
    # Each tile reads and converts the row's latents, so few large ones are fastest, even half empty. Where few tiles
    # fill the GPU with ranges, small ones lead.
    tiles = max(rows, tokens * layer.heads // MOST_TILE_ROWS)
    many, width = FEW * tiles >= processors(device), layer.heads * widest
    fast = hopper and not tree and _fits_hopper(layer.mla, dtype, kv_dtype)
    if fast and layer.heads == LEAST_TILE_ROWS and widest == 1:
        return _small_tile(tokens)
    if many and width >= LEAST_TILE_ROWS and fast:
        return LatentTile(MOST_TILE_ROWS, HOPPER_KEYS, 4, 2, 1, hopper=True)
    # The fastest on an H200 (benchmarks/NOTES.md, Experts).
    if many and width > LEAST_TILE_ROWS and dtype.itemsize < 4:
        tile = LatentTile(MOST_TILE_ROWS, 32 if tree or _stages_sums(device) else 64, 8, 2, 1)
    elif dtype.itemsize < 4:
        tile = LatentTile(LEAST_TILE_ROWS, 64, 8 if kv_dtype.itemsize == 1 else 4, 2, 1)
    else:
        tile = LatentTile(LEAST_TILE_ROWS, 16, 4, 1, 1)
    shared = shared_bytes_of(device)
    while shared_bytes(layer.mla, tile, dtype.itemsize) > shared and tile.block_n > 16:
        tile = replace(tile, block_n=tile.block_n // 2)
    while shared_bytes(layer.mla, tile, dtype.itemsize) > shared and tile.block_m > LEAST_TILE_ROWS:
        tile = replace(tile, block_m=tile.block_m // 2)
    if tile.block_m > LEAST_TILE_ROWS or tokens > MOST_PROJECTED:
        return tile
    return replace(tile, joins=False, least=tile.block_n)


def _small_tile(tokens: int) -> LatentTile:
    """Tile of attend_latents_small. Joining ranges takes time, too: the more tokens a program of project_ranges has,
    the more results it joins, so with more than SPLITS tokens the last of a tile's ranges joins them. With few tokens,
    a second program of an SM costs more joins than it hides latency."""
    tile = LatentTile(LEAST_TILE_ROWS, HOPPER_KEYS, 4, 1, 1 if tokens <= FEW_WHOLE else 2, hopper=True)
    if tokens <= SPLITS:
        return replace(tile, joins=False, least=HOPPER_KEYS, root=round(ROOT * tokens**0.5))
    return replace(tile, least=256 if tokens <= FEW_WHOLE else 512)


@cache
def _stages_sums(device: torch.device) -> bool:
    """Whether tensor cores have a memory of their own for sums (Blackwell). Those of a large tile pass through shared
    memory, which has no room for them beside blocks of 64 keys."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] >= 10
    )


def _fits_hopper(mla: MLA, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether the kernels for Hopper support sizes and formats. Their blocks fill registers and shared memory at the
    sizes of DeepSeek V2 and V3."""
    narrow = dtype == torch.bfloat16 and kv_dtype == torch.float8_e4m3fn
    return (mla.kv_rank, mla.rope_dim) == HOPPER_SIZES and (narrow or (kv_dtype == dtype and dtype.itemsize == 2))


def shared_bytes(mla: MLA, tile: LatentTile, itemsize: int) -> int:
    """Shared memory of a program: queries and keys with their rotated columns, and latents of further stages."""
    latent, rotated = _blocks(mla)
    each = (tile.block_m + tile.block_n) * (latent + rotated) + (tile.stages - 1) * tile.block_n * latent
    return each * itemsize + EXCHANGE


def _blocks(mla: MLA) -> tuple[int, int]:
    """Return the padded columns of a latent and of its rotated part."""
    return max(16, power_of_2(mla.kv_rank)), max(16, power_of_2(mla.rope_dim))


def launch_absorbed(
    backend: PagedTriton,
    layer: AttentionLayer,
    run: Absorbed,
    q_THD: torch.Tensor,
    up_HOL: torch.Tensor,
    out_THV: torch.Tensor,
) -> None:
    mla = layer.mla
    assert mla is not None
    q_THN, q_THR = q_THD.split((mla.nope_dim, mla.rope_dim), dim=2)
    key_HNL, value_HVL = up_HOL.split((mla.nope_dim, mla.v_dim), dim=1)
    inner_HTL = torch.bmm(q_THN.transpose(0, 1), key_HNL)
    heads, tokens, rank = inner_HTL.shape
    joined = any(items.tile.joins for items in run.plan.lists)
    mixed_THL = q_THD.new_empty(tokens if joined else 0, heads, rank)
    parts = q_THD.new_empty(run.plan.part_rows, heads * rank, dtype=torch.float32)
    lse = q_THD.new_empty(run.plan.part_rows, heads, dtype=torch.float32)
    pool, results = backend.pools[layer.group], (mixed_THL, parts, lse)
    planes = {name: pool.layer(layer.local, name) for name in pool.planes}
    for items in run.plan.lists:
        assert isinstance(items.tile, LatentTile)
        attend = _attend_on_hopper if items.tile.hopper else _attend
        attend(layer, run.meta, planes, items, items.tile, inner_HTL, q_THR, results)
    if joined:
        torch.bmm(mixed_THL.transpose(0, 1), value_HVL.mT, out=out_THV.transpose(0, 1))
    for items, end in zip(run.plan.lists, run.ends, strict=True):
        if not items.tile.joins:
            # Of its own tokens only: the product before wrote something for these, too.
            _project(items, parts, lse, value_HVL, out_THV[:end])


def _attend_on_hopper(
    layer: AttentionLayer,
    meta: BatchMeta,
    planes: Mapping[str, torch.Tensor],
    items: Items,
    tile: LatentTile,
    inner_HTL: torch.Tensor,
    q_THR: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    from dovetail.plugins.attention.triton.hopper.launch import latents

    plan = items.items, items.counts
    latents(layer, inner_HTL, q_THR, planes, meta, tile, *plan, *results, processors(q_THR.device))


def _attend(
    layer: AttentionLayer,
    meta: BatchMeta,
    planes: Mapping[str, torch.Tensor],
    items: Items,
    tile: LatentTile,
    inner_HTL: torch.Tensor,
    q_THR: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    mla = layer.mla
    assert mla is not None
    heads, _, rank = inner_HTL.shape
    mixed_THL, parts, lse = results
    units, (block_l, block_r) = tile.head_tiles(heads), _blocks(mla)
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
        meta.page_table_BP,
        meta.page_table_BP.stride(0),
        items.tree_T3,
        layer.scale,
        H=heads,
        HEADS=tile.heads(heads),
        UNITS=units,
        D=layer.head_dim,
        L=rank,
        R=mla.rope_dim,
        GROUPS=ceil_div(block_l, GROUP) if SCALES in planes else 0,
        SCALES=ceil_div(rank, GROUP),
        PAGE=meta.page_tokens,
        PAGE_COLUMNS=planes[LATENT].shape[-1],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_L=block_l,
        BLOCK_R=block_r,
        JOIN=tile.joins,
        COMPUTE=COMPUTE[q_THR.dtype],
        PRECISION="ieee" if q_THR.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(q_THR),
    )


def _project(
    items: Items,
    parts: torch.Tensor,
    lse: torch.Tensor,
    value_HVL: torch.Tensor,
    out_THV: torch.Tensor,
) -> None:
    tokens, heads, v_dim = out_THV.shape
    rank, works = value_HVL.shape[2], items.items.shape[0]
    block_t, block_v = LEAST_TILE_ROWS, VALUE_BYTES // value_HVL.itemsize
    if value_HVL.itemsize == 4:
        block_v //= 2  # Products in float32 keep a second copy of their blocks.
    project_ranges[heads, ceil_div(v_dim, block_v), ceil_div(tokens, block_t)](
        parts,
        lse,
        items.items,
        value_HVL,
        value_HVL.stride(0),
        value_HVL.stride(1),
        out_THV,
        tokens,
        works,
        H=heads,
        V=v_dim,
        L=rank,
        QUERIES=items.tile.queries(heads),
        BLOCK_T=block_t,
        BLOCK_P=PARTS,
        BLOCK_L=max(16, power_of_2(rank)),
        BLOCK_V=block_v,
        PRECISION="ieee" if out_THV.dtype == torch.float32 else "tf32",
        num_warps=8,
        **dependent(out_THV),
    )
