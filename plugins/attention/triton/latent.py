"""Host side of attention over compressed latents: which rows are absorbed, which expanded, and their launches.

Rows of many tokens are expanded (expanded.py). All other rows, and every row while a graph is captured, are absorbed
(latent_kernel.py, on Hopper hopper/latent.py and hopper/latent_small.py).

Shapes: T tokens, H query heads, N dims of a query that are not rotated, R rotary dim, D = N + R, L kv rank, V value
dim, O = N + V rows of a head's up-projection.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from dovetail.core.interfaces import AttentionLayer, AttnCtx, BatchMeta, HostBounds, TreeMask
from dovetail.core.ops.latents import LATENT, expands
from dovetail.core.ops.padding import empty_rows
from dovetail.core.ops.rehearsal import StepLimits, WarmupStep, running
from dovetail.plugins.attention.triton.absorbed import (
    LEAST_TILE_ROWS,
    MOST_TILE_ROWS,
    Absorbed,
    launch_absorbed,
    plan_absorbed,
    tile_of,
)
from dovetail.plugins.attention.triton.expanded import (
    Expanded,
    attend_expanded,
    heads_at_once,
    numbers_of_heads,
    pages_beside,
    plan_expanded,
    prompt_tile,
)
from dovetail.plugins.attention.triton.gpu import has_hopper
from dovetail.plugins.attention.triton.latent_rehearsal import absorbed_steps, decoded_steps, expanded_steps
from dovetail.plugins.attention.triton.paged import PagedTriton


def attend_latents(
    backend: PagedTriton, layer: AttentionLayer, ctx: AttnCtx, q_THD: torch.Tensor, up_HOL: torch.Tensor
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
        attend = launch_absorbed if isinstance(run, Absorbed) else attend_expanded
        attend(backend, layer, run, q_THD[run.tokens], up_HOL, out_THV[run.tokens])
    return out_TC


def _plan(backend: PagedTriton, layer: AttentionLayer, ctx: AttnCtx, q_THD: torch.Tensor) -> list[Absorbed | Expanded]:
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
        heads = heads_at_once(backend, layer, bounds.bounds, q_THD) if expanded[row] else 0
        if heads:
            runs.append(plan_expanded(backend, layer, cut, bounds, taken, heads, q_THD.dtype))
        else:
            runs.append(plan_absorbed(backend, layer, cut, bounds, taken, q_THD.dtype))
        first, first_token = row + 1, last_token
    return runs


def _all_steps(
    backend: PagedTriton, layer: AttentionLayer, meta: BatchMeta, dtype: torch.dtype, limits: StepLimits
) -> list[WarmupStep]:
    """Return steps that launch every kernel of the layer."""
    mla, device, kv_dtype = layer.mla, meta.kv_len_B.device, backend.pools[layer.group].planes[LATENT].dtype
    assert mla is not None
    hopper = backend.config.gluon and has_hopper(device)
    chain = mla.v_dim <= mla.nope_dim + mla.rope_dim
    most = next((count - 1 for count in range(1, limits.longest + 1) if chain and expands(mla, count)), limits.longest)

    def absorbed(rows: int, tokens: int) -> Hashable:
        return tile_of(layer, MOST_TILE_ROWS, rows, tokens, dtype, kv_dtype, device, hopper=hopper)

    def decoded(rows: int) -> Hashable | None:
        tile = tile_of(layer, 1, rows, rows, dtype, kv_dtype, device, hopper=hopper)
        return tile.joins if tile.hopper and tile.block_m == LEAST_TILE_ROWS else None

    def expanded(rows: int, tokens: int) -> Hashable:
        return prompt_tile(backend, layer, dtype, device, tokens, rows)

    def pages(heads: int) -> int:
        return pages_beside(backend, layer, heads, dtype, device)

    found = [*absorbed_steps(limits, most, absorbed), *decoded_steps(limits, decoded)]
    if most < limits.longest:
        found += expanded_steps(limits, most + 1, numbers_of_heads(layer), pages, expanded)
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
