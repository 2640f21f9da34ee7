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

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces import AttentionLayer, AttnCtx, BatchMeta, HostBounds, TreeMask
from dovetail.core.ops.latents import LATENT, expands, read_latents
from dovetail.core.ops.padding import empty_rows
from dovetail.core.ops.rehearsal import StepLimits, WarmupStep, rehearsing, running
from dovetail.plugins.attention.triton.absorbed import (
    MOST_TILE_ROWS,
    Absorbed,
    launch_absorbed,
    plan_absorbed,
    tile_of,
)
from dovetail.plugins.attention.triton.backend import LaunchPlan, Triton, _has_hopper, _shape
from dovetail.plugins.attention.triton.gather import PAGE, ROOM_BYTES
from dovetail.plugins.attention.triton.latent_rehearsal import absorbed_steps, expanded_steps
from dovetail.plugins.attention.triton.tiles import Geometry, PromptTile, Tiles


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
        attend = launch_absorbed if isinstance(run, Absorbed) else _expanded
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
        return [plan_absorbed(backend, layer, meta, host, slice(0, tokens), q_THD.dtype)]
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
            runs.append(plan_absorbed(backend, layer, cut, bounds, taken, q_THD.dtype))
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
        return tile_of(layer, MOST_TILE_ROWS, rows, tokens, dtype, kv_dtype, device, hopper=hopper)

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
