"""Paged attention in Triton. A step has two lists of work items, for decode rows and for other rows.

Nothing here depends on lengths. Grids and buffers depend on the number of tokens and rows, the number of decode rows,
and the tokens of the longest decode row. So a CUDA graph serves all steps that fit its token and row counts, whatever
their lengths, if their rows are in the same two classes; unused rows are empty.

Shapes: T tokens, B rows, W items, H query heads, D head dim, C = H * D columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.host import shared_bytes
from dovetail.core.interfaces import (
    PLAIN,
    ActFormat,
    AttentionBackend,
    AttentionLayer,
    AttnCtx,
    BatchMeta,
    BuildContext,
    Bundle,
    HostBounds,
    QKNorm,
    Rope,
    TreeMask,
)
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.ops.formats import encode
from dovetail.core.ops.kernels.launch import HOPPER, dependent
from dovetail.core.ops.kv_write import FLOAT8
from dovetail.core.ops.padding import empty_rows
from dovetail.core.ops.tiles import HOPPER_SHARED
from dovetail.core.ops.trees import within_window
from dovetail.plugins.attention.config import TritonConfig
from dovetail.plugins.attention.triton.draft_rehearsal import request_steps
from dovetail.plugins.attention.triton.gather import ROOM_BYTES, Gathered
from dovetail.plugins.attention.triton.kernels import attend_items
from dovetail.plugins.attention.triton.plan import ITEM, Items, plan_items
from dovetail.plugins.attention.triton.tiles import (
    DECODE_ROWS,
    EMPTY,
    DecodeTile,
    Geometry,
    PromptTile,
    Shape,
    Tile,
    Tiles,
)
from dovetail.plugins.attention.triton.tuning import TUNED_ROWS, DecodeTunable, TunedTiles

log = logging.getLogger(__name__)

COMPUTE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
MANY_PROGRAMS = 3
"""Programs per SM, counting whole rows, from which rows of up to SHORT_KEYS keys are not split."""
SHORT_KEYS = 2048
"""Number of keys up to which splitting rows then gains less by balancing than joining the ranges costs."""
ROWS_AT_ONCE = 256
"""Rows that a program of plan_items processes at once."""
WHOLE = 1 << 30
"""Minimum range length, in keys, that prevents any row from being split."""
INTERPRETED_PROCESSORS = 4
"""Number of SMs to plan for in Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    lists: tuple[Items, ...]
    part_rows: int
    """Number of rows of partial results; 0 = no row is split."""


@dataclass(frozen=True, slots=True)
class _Writes:
    """Extra inputs of a launch that also writes the step's keys and values."""

    tokens: int
    """Number of tokens of the longest row."""
    rope: Rope | None
    norm: QKNorm | None


class Triton(AttentionBackend):
    config: TritonConfig
    exact_lengths = "device"
    tiles: Tiles | None = None
    """In place of the tuned ones, for benchmarks."""

    def __init__(self, config: TritonConfig) -> None:
        super().__init__(config)
        self._room: torch.Tensor | None = None

    def plan_device(self, meta: BatchMeta, host: HostBounds, state: object) -> AttnCtx:
        # Items depend on a layer's window and heads, so the first layer of each geometry makes them.
        return AttnCtx(meta, host, {})

    def attend(
        self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor, emit: tuple[ActFormat, ...] = (PLAIN,)
    ) -> Bundle:
        return self._run(layer, ctx, q.contiguous(), emit, None)

    def write_and_attend(
        self,
        layer: AttentionLayer,
        ctx: AttnCtx,
        qkv: torch.Tensor,
        rope: Rope | None,
        qk_norm: QKNorm | None = None,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> Bundle:
        host = ctx.host
        # A tile that holds all tokens of a row can write them itself. Longer rows would be written by several tiles.
        longest = host.widest_decode
        one_tile = longest <= 1 or longest * (layer.heads // layer.kv_heads) <= DECODE_ROWS
        if host.num_decode < len(host.counts) or not one_tile or ctx.meta.tree is not None:
            return super().write_and_attend(layer, ctx, qkv, rope, qk_norm, emit)
        if longest > 1 and isinstance(self._plan(layer, ctx, qkv).lists[0].tile, DecodeTile):
            # Several of its tiles would write the keys of a row.
            return super().write_and_attend(layer, ctx, qkv, rope, qk_norm, emit)
        return self._run(layer, ctx, qkv.contiguous(), emit, _Writes(longest, rope, qk_norm))

    def _run(
        self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor, emit: tuple[ActFormat, ...], writes: _Writes | None
    ) -> Bundle:
        tokens, columns = q.shape[0], layer.heads * layer.head_dim
        out_TC = empty_rows(tokens, columns, q.dtype, q.device)
        if tokens:
            k, v = (self.pools[layer.group].layer(layer.local, name) for name in ("k", "v"))
            self.launch(layer, ctx.meta, q, k, v, self._plan(layer, ctx, q), out_TC, writes)
        return encode(out_TC, emit)

    def launch(
        self,
        layer: AttentionLayer,
        meta: BatchMeta,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: LaunchPlan,
        out_TC: torch.Tensor,
        writes: _Writes | None = None,
    ) -> None:
        """Attend over the pages k and v."""
        parts = q.new_empty(plan.part_rows, out_TC.shape[1], dtype=torch.float32)
        lse = q.new_empty(plan.part_rows, layer.heads, dtype=torch.float32)
        for items in plan.lists:
            self._attend(layer, meta, q, k, v, items, out_TC, parts, lse, writes)

    def attend_mla(
        self,
        layer: AttentionLayer,
        ctx: AttnCtx,
        q: torch.Tensor,
        up_HOL: torch.Tensor,
        emit: tuple[ActFormat, ...] = (PLAIN,),
    ) -> Bundle:
        from dovetail.plugins.attention.triton.latent import attend_latents

        return encode(attend_latents(self, layer, ctx, q.contiguous(), up_HOL), emit)

    def _plan(self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor) -> LaunchPlan:
        kv_dtype = self.pools[layer.group].planes["k"].dtype
        geometry = Geometry.of(layer, q.dtype, kv_dtype, ctx.meta.page_tokens)
        if geometry not in ctx.state:
            ctx.state[geometry] = self.make_plan(geometry, ctx.meta, ctx.host, q.shape[0])
        return ctx.state[geometry]

    def make_plan(self, geometry: Geometry, meta: BatchMeta, host: HostBounds, tokens: int) -> LaunchPlan:
        device = meta.kv_len_B.device
        hopper = self.config.gluon and _has_hopper(device)
        tiles = self.tiles or TunedTiles(geometry, host.num_decode, _gpu(device))
        return _make_plan(tiles, geometry, meta, host, tokens, partial(self.room_on, device), hopper)

    def tunables(self, layer: AttentionLayer, build: BuildContext, rows: int) -> Sequence[Tunable]:
        # Without weights, a model is built on the meta device.
        if build.device.type == "cpu" or rows not in TUNED_ROWS or layer.mla is not None:
            return ()
        device = torch.device("cuda", torch.cuda.current_device())
        geometry = Geometry.of(layer, build.dtype, build.kv_dtype, build.page_tokens)
        shape = _shape(geometry, device, self.config.gluon and _has_hopper(device))
        make = partial(type(self), self.config)
        return [DecodeTunable(make, geometry, rows, build.max_len, shape, _processors(device))]

    def room_on(self, device: torch.device) -> torch.Tensor:
        """Buffer for copied or expanded pages. Allocated once and kept, so the warm-up step at start-up measures it."""
        if self._room is None:
            self._room = torch.empty(ROOM_BYTES, dtype=torch.uint8, device=device)
        return self._room

    def _attend(
        self,
        layer: AttentionLayer,
        meta: BatchMeta,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        items: Items,
        out_TC: torch.Tensor,
        parts: torch.Tensor,
        lse: torch.Tensor,
        writes: _Writes | None,
    ) -> None:
        tile, dim = items.tile, layer.head_dim
        k_from, v_from, table, page_tokens = k, v, meta.page_table_BP, meta.page_tokens
        if (copy := items.gathered) is not None:
            copy.fill(meta, k, v)
            k_from, v_from, table, page_tokens = copy.k, copy.v, copy.table_BP, copy.page_tokens
        if isinstance(tile, PromptTile):
            from dovetail.plugins.attention.triton.hopper.launch import attend

            attend(
                layer,
                q.view(-1, layer.heads, dim),
                k_from.flatten(0, 1),
                v_from.flatten(0, 1),
                page_tokens,
                table,
                tile,
                items.items,
                items.counts,
                out_TC,
                parts,
                lse,
                _processors(q.device),
            )
            return
        if isinstance(tile, DecodeTile):
            from dovetail.plugins.attention.triton.hopper.launch import decode

            rope, norm = (None, None) if writes is None else (writes.rope, writes.norm)
            lists = (items.items, items.first_pages, items.mail)
            decode(layer, q, k, v, table, tile, *lists, out_TC, writes is not None, rope, norm)
            return
        compute = torch.float16 if k_from.dtype in FLOAT8 and q.dtype.itemsize == 2 else q.dtype
        # The interpreter does not support inline assembly.
        pairs = tile.pairs and q.is_cuda
        if pairs:
            v_from = v_from.view(torch.int16)
        attend_items[layer.kv_heads, items.items.shape[0]](
            q,
            _tensor_map(k_from, tile.block_n) if tile.tma else k_from,
            _tensor_map(v_from, tile.block_n) if tile.tma else v_from,
            out_TC,
            parts,
            lse,
            items.counts,
            items.items,
            table,
            table.stride(0),
            items.tree_T3,
            layer.scale,
            layer.k_scale,
            layer.v_scale,
            layer.sinks,
            k,
            v,
            None if writes is None or writes.rope is None else writes.rope.table,
            None if writes is None or writes.norm is None else writes.norm.q_weight_D,
            None if writes is None or writes.norm is None else writes.norm.k_weight_D,
            0.0 if writes is None or writes.norm is None else writes.norm.eps,
            H=layer.heads,
            K=layer.kv_heads,
            D=dim,
            WINDOW=layer.window,
            PAGE=page_tokens,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=max(16, power_of_2(dim)),
            COMPUTE=COMPUTE[compute],
            PRECISION="ieee" if compute == torch.float32 else "tf32",
            HEAD_SCALES=isinstance(layer.k_scale, torch.Tensor),
            ONE_LOOP=tile.block_m <= 32,
            KEY_WARPS=tile.key_warps,
            TMA=tile.tma,
            PAIRS=pairs,
            WRITES=0 if writes is None else writes.tokens,
            HALF=0 if writes is None or writes.rope is None else writes.rope.table.shape[-1] // 2,
            LARGEST=torch.finfo(k.dtype).max if k.dtype in FLOAT8 else None,
            SOFT_CAP=layer.soft_cap or None,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **dependent(q),
        )


def _shape(geometry: Geometry, device: torch.device, hopper: bool) -> Shape:
    dtypes = geometry.dtype, geometry.kv_dtype
    return Shape(geometry.group, geometry.head_dim, *dtypes, geometry.page_tokens, hopper, shared_bytes_of(device))


def _make_plan(
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
    shape = _shape(geometry, device, hopper)
    rows, decode = len(host.counts), host.num_decode
    launches: list[tuple[int, int, Tile, Gathered | None, torch.Tensor | None]] = []
    if decode:
        programs = kv_heads / _processors(device)
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
    target = ceil_div(tile.programs * _processors(device), units)
    longest = max(host.bounds[first_row : first_row + count])
    many = whole * units >= MANY_PROGRAMS * _processors(device)
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


def _tensor_map(plane: torch.Tensor, rows: int) -> TensorDescriptor:
    """Tensor map of token slots x columns, read in blocks of one head's keys."""
    slots = plane.flatten(0, 1).flatten(1)
    return TensorDescriptor(slots, list(slots.shape), list(slots.stride()), [rows, plane.shape[-1]])


@cache
def _has_hopper(device: torch.device) -> bool:
    """Whether GPU and Triton support the kernels for Hopper."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) != HOPPER:
        return False
    try:
        from dovetail.plugins.attention.triton.hopper import launch  # noqa: F401
    except (ImportError, AttributeError) as error:
        log.warning(
            "attention=triton: prompts, single tokens and latents use the kernels for all GPUs, half to three quarters "
            "as fast: the kernels for Hopper do not support the Gluon version of Triton %s (%s)",
            triton.__version__,
            error,
        )
        return False
    return True


@cache
def _gpu(device: torch.device) -> str:
    """Name of the GPU in tuning tables."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else ""


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes_of(device: torch.device) -> int:
    """Maximum shared memory of a program."""
    return shared_bytes(device) if device.type == "cuda" else HOPPER_SHARED
