"""Attention of rows of many tokens over compressed latents: their keys and values are expanded first.

Latents are copied from the pages and multiplied by the up-projections, for as many heads at a time as fit into the
buffer for copies. On Hopper, attend_prompts reads the rotary columns, which all heads share, from the copy, and the
other columns of keys and values from the result of one matmul. The kernels for all GPUs need keys with their rotary
columns, and values as wide as those.

Shapes: T tokens, H query heads, N dims of a query that are not rotated, R rotary dim, D = N + R, L kv rank, V value
dim, O = N + V rows of a head's up-projection, S keys, B rows, P pages.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.interfaces import MLA, AttentionLayer, BatchMeta, HostBounds
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.latents import GROUP, LATENT, ROTARY, SCALES
from dovetail.core.ops.padding import empty_rows
from dovetail.core.ops.rehearsal import rehearsing
from dovetail.plugins.attention.triton.gather import PAGE, ROOM_BYTES
from dovetail.plugins.attention.triton.gpu import has_hopper, processors
from dovetail.plugins.attention.triton.launch_plan import LaunchPlan, shape_of
from dovetail.plugins.attention.triton.paged import PagedTriton
from dovetail.plugins.attention.triton.tiles import Geometry, PromptTile, Tiles, padded_dim

BOX = 64
"""Columns of a box of attend_prompts. The keys of all heads share one box at most."""
SLOTS = 8
"""Latents that a program copies."""


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


def joins_rotary(backend: PagedTriton, layer: AttentionLayer, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attend_prompts reads the columns that all heads share apart from those of each head."""
    mla = _mla(layer)
    return (
        backend.config.gluon
        and has_hopper(device)
        and dtype.itemsize == 2
        and mla.nope_dim in (BOX, 2 * BOX)
        and mla.rope_dim <= BOX
        and mla.rope_dim % 8 == mla.v_dim % 8 == 0
        and padded_dim(mla.v_dim) in (BOX, 2 * BOX)
    )


def numbers_of_heads(layer: AttentionLayer) -> list[int]:
    """Return the numbers of heads that may be expanded at a time, the greatest first: the divisors of all."""
    return [each for each in range(layer.heads, 0, -1) if layer.heads % each == 0]


def heads_at_once(backend: PagedTriton, layer: AttentionLayer, bounds: Sequence[int], q_THD: torch.Tensor) -> int:
    """Return how many heads' keys and values fit into the buffer for copies; 0 = not even one."""
    pages = _copied_pages(bounds)
    fits = (
        heads
        for heads in numbers_of_heads(layer)
        if pages <= pages_beside(backend, layer, heads, q_THD.dtype, q_THD.device)
    )
    return next(fits, 0)


def pages_beside(
    backend: PagedTriton, layer: AttentionLayer, heads: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Return how many pages of the copy fit into the buffer with keys and values of so many heads."""
    mla = _mla(layer)
    joined = joins_rotary(backend, layer, dtype, device)
    columns = mla.nope_dim + mla.v_dim if joined else 2 * layer.head_dim
    return ROOM_BYTES // (heads * PAGE * columns * dtype.itemsize)


def prompt_tile(
    backend: PagedTriton, layer: AttentionLayer, dtype: torch.dtype, device: torch.device, tokens: int, rows: int
) -> Hashable:
    """Return what identifies the kernels that attend to expanded keys, besides the number of heads."""
    hopper = backend.config.gluon and has_hopper(device)
    shape = shape_of(_geometry(backend, layer, 1, dtype, device), device, hopper)
    tile = (backend.tiles or Tiles()).prefill(shape, tokens, rows)
    return replace(tile, persistent=False) if isinstance(tile, PromptTile) else tile


def _geometry(
    backend: PagedTriton, layer: AttentionLayer, heads: int, dtype: torch.dtype, device: torch.device
) -> Geometry:
    """Facts by which the tile is chosen. With rotary columns apart, it is one for the columns of each head."""
    mla = _mla(layer)
    joined = joins_rotary(backend, layer, dtype, device)
    dim = max(mla.nope_dim, padded_dim(mla.v_dim)) if joined else layer.head_dim
    return Geometry(heads, heads, dim, 0, dtype, dtype, PAGE)


def _copied_pages(bounds: Sequence[int]) -> int:
    return sum(ceil_div(bound, PAGE) for bound in bounds)


def plan_expanded(
    backend: PagedTriton,
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
    # Selecting whole rows of the table would take memory for a row of it per page.
    at_PS = row_P.unsqueeze(1) * meta.page_table_BP.shape[1] + key_PS // meta.page_tokens
    from_PS = meta.page_table_BP.take(at_PS).long()
    # A row without keys, of a step's spare rows, has no page in its table.
    slots_PS = torch.where(last_P.unsqueeze(1) < 0, 0, from_PS * meta.page_tokens + key_PS % meta.page_tokens)
    copied = replace(meta, page_table_BP=table_BP, page_tokens=PAGE)
    plan = backend.make_plan(_geometry(backend, layer, heads, dtype, device), copied, host, tokens.stop - tokens.start)
    return Expanded(tokens, copied, plan, slots_PS.flatten(), heads)


def attend_expanded(
    backend: PagedTriton,
    layer: AttentionLayer,
    run: Expanded,
    q_THD: torch.Tensor,
    up_HOL: torch.Tensor,
    out_THV: torch.Tensor,
) -> None:
    """Write the attention of the run's tokens to `out_THV`, a view of the output's rows."""
    copies = _copy_latents(backend, layer, run, q_THD.dtype)
    joined = joins_rotary(backend, layer, q_THD.dtype, q_THD.device)
    attend = _rotary_apart if joined else _whole_keys
    # All rounds launch the same kernels.
    for first in range(0, run.heads if rehearsing() else layer.heads, run.heads):
        own = q_THD.narrow(1, first, run.heads), up_HOL.narrow(0, first, run.heads), out_THV.narrow(1, first, run.heads)
        attend(backend, layer, run, copies, *own)


@dataclass(frozen=True, slots=True)
class _Copies:
    """A run's latents, and memory for keys and values."""

    latent_SL: torch.Tensor
    rotary_SR: torch.Tensor
    room: torch.Tensor


def _rotary_apart(
    backend: PagedTriton,
    layer: AttentionLayer,
    run: Expanded,
    copies: _Copies,
    q_THD: torch.Tensor,
    up_HOL: torch.Tensor,
    out_THV: torch.Tensor,
) -> None:
    from dovetail.plugins.attention.triton.hopper.launch import attend

    mla, keys = _mla(layer), len(copies.latent_SL)
    heads, columns, _ = up_HOL.shape
    both_SC = copies.room.narrow(0, 0, keys * heads * columns).view(keys, heads * columns)
    torch.mm(copies.latent_SL, up_HOL.flatten(0, 1).mT, out=both_SC)
    k_SHN, v_SHV = both_SC.view(keys, heads, columns).split((mla.nope_dim, mla.v_dim), dim=2)
    parts = q_THD.new_empty(run.plan.part_rows, heads * mla.v_dim, dtype=torch.float32)
    lse = q_THD.new_empty(run.plan.part_rows, heads, dtype=torch.float32)
    for items in run.plan.lists:
        assert isinstance(items.tile, PromptTile)
        attend(
            layer,
            q_THD,
            k_SHN,
            v_SHV,
            PAGE,
            run.meta.page_table_BP,
            items.tile,
            items.items,
            items.counts,
            out_THV,
            parts,
            lse,
            processors(q_THD.device),
            copies.rotary_SR,
        )


def _whole_keys(
    backend: PagedTriton,
    layer: AttentionLayer,
    run: Expanded,
    copies: _Copies,
    q_THD: torch.Tensor,
    up_HOL: torch.Tensor,
    out_THV: torch.Tensor,
) -> None:
    mla, keys, heads = _mla(layer), len(copies.latent_SL), len(up_HOL)
    nope, value = mla.nope_dim, mla.v_dim
    shape = 2, keys, heads, layer.head_dim
    k_SHD, v_SHD = copies.room.narrow(0, 0, math.prod(shape)).view(shape).unbind()
    k_SHD.narrow(2, nope, mla.rope_dim).copy_(copies.rotary_SR.unsqueeze(1))
    # The kernels have values as wide as keys.
    v_SHD.narrow(2, value, layer.head_dim - value).zero_()
    latent_HSL, (key_HNL, value_HVL) = copies.latent_SL.expand(heads, -1, -1), up_HOL.split((nope, value), dim=1)
    torch.bmm(latent_HSL, key_HNL.mT, out=k_SHD.narrow(2, 0, nope).transpose(0, 1))
    torch.bmm(latent_HSL, value_HVL.mT, out=v_SHD.narrow(2, 0, value).transpose(0, 1))
    out_TC = empty_rows(len(q_THD), heads * layer.head_dim, q_THD.dtype, q_THD.device)
    k_pages, v_pages = (x.view(-1, PAGE, heads, layer.head_dim) for x in (k_SHD, v_SHD))
    some = replace(layer, heads=heads, kv_heads=heads, mla=None)
    backend.launch(some, run.meta, q_THD.contiguous(), k_pages, v_pages, run.plan, out_TC)
    out_THV.copy_(out_TC.view(len(q_THD), heads, layer.head_dim).narrow(2, 0, value))


def _mla(layer: AttentionLayer) -> MLA:
    assert layer.mla is not None
    return layer.mla


def _copy_latents(backend: PagedTriton, layer: AttentionLayer, run: Expanded, dtype: torch.dtype) -> _Copies:
    """Copy the run's latents in `dtype`."""
    mla, pool, slots_S = _mla(layer), backend.pools[layer.group], run.slots_S
    latent_SL = slots_S.new_empty(len(slots_S), mla.kv_rank, dtype=dtype)
    rotary_SR = slots_S.new_empty(len(slots_S), mla.rope_dim, dtype=dtype)
    stored = pool.layer(layer.local, LATENT)
    scaled = SCALES in pool.planes
    groups = ceil_div(mla.kv_rank, GROUP) if scaled else 0
    _copy[ceil_div(len(slots_S), SLOTS),](
        stored,
        pool.layer(layer.local, SCALES) if scaled else None,
        pool.layer(layer.local, ROTARY) if scaled else stored,
        slots_S,
        latent_SL,
        rotary_SR,
        len(slots_S),
        L=mla.kv_rank,
        R=mla.rope_dim,
        COLUMNS=stored.shape[-1],
        SCALES=groups,
        GROUP=GROUP,
        SLOTS=SLOTS,
        BLOCK_L=power_of_2(mla.kv_rank),
        BLOCK_R=power_of_2(mla.rope_dim),
        num_warps=4,
        **dependent(stored),
    )
    return _Copies(latent_SL, rotary_SR, backend.room_on(slots_S.device).view(dtype))


@triton.jit(do_not_specialize=["slots"])
def _copy(
    page_ptr,
    scale_ptr,
    rotary_ptr,
    slot_ptr,
    latent_ptr,
    to_rotary_ptr,
    slots,
    L: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (SLOTS latents). SCALES: scales of a latent; 0 = latents have none, and are followed by their rotary
    columns."""
    announce(PDL)
    wait(PDL)
    index = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    exists = index < slots
    slot = tl.load(slot_ptr + index, mask=exists, other=0)
    column, rotated = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_R)
    ok = exists[:, None] & (column < L)[None, :]
    x = tl.load(page_ptr + slot[:, None] * COLUMNS + column[None, :], mask=ok)
    if SCALES:
        x = x.to(tl.float32) * tl.load(scale_ptr + slot[:, None] * SCALES + (column // GROUP)[None, :], mask=ok)
        at = rotary_ptr + slot[:, None] * R
    else:
        at = rotary_ptr + slot[:, None] * COLUMNS + L
    to = index.to(tl.int64)[:, None]
    tl.store(latent_ptr + to * L + column[None, :], x.to(latent_ptr.dtype.element_ty), mask=ok)
    there = exists[:, None] & (rotated < R)[None, :]
    y = tl.load(at + rotated[None, :], mask=there)
    tl.store(to_rotary_ptr + to * R + rotated[None, :], y.to(to_rotary_ptr.dtype.element_ty), mask=there)
