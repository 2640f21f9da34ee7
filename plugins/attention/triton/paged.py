"""Attention over pages of keys and values: a launch for each list of work items (launch_plan.py).

Shapes: T tokens, B rows, W items, H query heads, D head dim, C = H * D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from dovetail.core.arithmetic import power_of_2
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
)
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.ops.formats import encode
from dovetail.core.ops.kernels.launch import dependent
from dovetail.core.ops.kv_write import FLOAT8
from dovetail.core.ops.padding import empty_rows
from dovetail.plugins.attention.config import TritonConfig
from dovetail.plugins.attention.triton.gather import ROOM_BYTES
from dovetail.plugins.attention.triton.gpu import gpu_name, has_hopper, processors
from dovetail.plugins.attention.triton.kernels import COMPUTE, attend_items
from dovetail.plugins.attention.triton.launch_plan import LaunchPlan, make_plan, shape_of
from dovetail.plugins.attention.triton.plan import Items
from dovetail.plugins.attention.triton.tiles import DECODE_ROWS, DecodeTile, Geometry, PromptTile, Tiles
from dovetail.plugins.attention.triton.tuning import TUNED_ROWS, DecodeTunable, TunedTiles


@dataclass(frozen=True, slots=True)
class _Writes:
    """Extra inputs of a launch that also writes the step's keys and values."""

    tokens: int
    """Number of tokens of the longest row."""
    rope: Rope | None
    norm: QKNorm | None


class PagedTriton(AttentionBackend):
    """All but attention over compressed latents."""

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

    def _plan(self, layer: AttentionLayer, ctx: AttnCtx, q: torch.Tensor) -> LaunchPlan:
        kv_dtype = self.pools[layer.group].planes["k"].dtype
        geometry = Geometry.of(layer, q.dtype, kv_dtype, ctx.meta.page_tokens)
        if geometry not in ctx.state:
            ctx.state[geometry] = self.make_plan(geometry, ctx.meta, ctx.host, q.shape[0])
        return ctx.state[geometry]

    def make_plan(self, geometry: Geometry, meta: BatchMeta, host: HostBounds, tokens: int) -> LaunchPlan:
        device = meta.kv_len_B.device
        hopper = self.config.gluon and has_hopper(device)
        tiles = self.tiles or TunedTiles(geometry, host.num_decode, gpu_name(device))
        return make_plan(tiles, geometry, meta, host, tokens, partial(self.room_on, device), hopper)

    def tunables(self, layer: AttentionLayer, build: BuildContext, rows: int) -> Sequence[Tunable]:
        # Without weights, a model is built on the meta device.
        if build.device.type == "cpu" or rows not in TUNED_ROWS or layer.mla is not None:
            return ()
        device = torch.device("cuda", torch.cuda.current_device())
        geometry = Geometry.of(layer, build.dtype, build.kv_dtype, build.page_tokens)
        shape = shape_of(geometry, device, self.config.gluon and has_hopper(device))
        make = partial(type(self), self.config)
        return [DecodeTunable(make, geometry, rows, build.max_len, shape, processors(device))]

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
                processors(q.device),
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


def _tensor_map(plane: torch.Tensor, rows: int) -> TensorDescriptor:
    """Tensor map of token slots x columns, read in blocks of one head's keys."""
    slots = plane.flatten(0, 1).flatten(1)
    return TensorDescriptor(slots, list(slots.shape), list(slots.stride()), [rows, plane.shape[-1]])
