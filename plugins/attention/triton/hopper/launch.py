"""Launch functions of `attend_prompts`, `attend_decode`, `attend_latents_hopper` and `attend_latents_small`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dovetail.core.interfaces import AttentionLayer, BatchMeta, QKNorm, Rope
from dovetail.core.ops.kernels.gluon import line_layout
from dovetail.core.ops.kernels.launch import dependent
from dovetail.core.ops.latents import LATENT, ROTARY, SCALES
from dovetail.plugins.attention.triton.hopper.decode import attend_decode
from dovetail.plugins.attention.triton.hopper.fetch import BOX, ROWS
from dovetail.plugins.attention.triton.hopper.kernel import attend_prompts
from dovetail.plugins.attention.triton.hopper.latent import attend_latents_hopper
from dovetail.plugins.attention.triton.hopper.latent_small import RESIDENTS as SMALL_RESIDENTS
from dovetail.plugins.attention.triton.hopper.latent_small import ROWS as SMALL_ROWS
from dovetail.plugins.attention.triton.hopper.latent_small import attend_latents_small
from dovetail.plugins.attention.triton.tiles import DecodeTile, PromptTile, Tile, packed_heads, padded_dim


def attend(
    layer: AttentionLayer,
    q_THD: torch.Tensor,
    k_SKN: torch.Tensor,
    v_SKV: torch.Tensor,
    page_tokens: int,
    table_BP: torch.Tensor,
    tile: PromptTile,
    items: torch.Tensor,
    counts: torch.Tensor,
    out: torch.Tensor,
    parts: torch.Tensor,
    lse: torch.Tensor,
    processors: int,
    shared_SR: torch.Tensor | None = None,
) -> None:
    """Launch attend_prompts over token slots S. A key is a head's row of `k_SKN`, followed by the slot's row of
    `shared_SR`, which all heads share. The tensors may be views of some heads among more: `out` is then one of
    [T, all heads, V], and else [T, H * V]. The rest as in attend_items."""
    (_, heads, dim), (_, kv_heads, own), value = q_THD.shape, k_SKN.shape, v_SKV.shape[2]
    group = heads // kv_heads
    pack = packed_heads(group)
    works = items.shape[0] * kv_heads * tile.head_tiles(group)
    box = [BOX.value, 1, BOX.value]
    attend_prompts[(min(works, processors) if tile.persistent else works,)](
        _tensor_map(q_THD, [ROWS.value // pack, pack, BOX.value]),
        _tensor_map(k_SKN, box),
        _tensor_map(v_SKV, box),
        None if shared_SR is None else _tensor_map(shared_SR.unsqueeze(1), box),
        out,
        parts,
        lse,
        counts,
        items,
        works,
        table_BP,
        table_BP.stride(0),
        layer.scale,
        layer.k_scale,
        layer.v_scale,
        layer.sinks,
        H=heads,
        K=kv_heads,
        D=dim,
        BLOCK_D=padded_dim(own),
        V=value,
        BLOCK_V=padded_dim(value),
        OUT_HEADS=out.stride(0) // value,
        PACK=pack,
        WINDOW=layer.window,
        PAGE=page_tokens,
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        HEAD_SCALES=isinstance(layer.k_scale, torch.Tensor),
        SOFT_CAP=layer.soft_cap or None,
        num_warps=tile.warps,
        **dependent(q_THD),
    )


def decode(
    layer: AttentionLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table_BP: torch.Tensor,
    tile: DecodeTile,
    items: torch.Tensor,
    first_pages: torch.Tensor,
    mail: torch.Tensor,
    out_TC: torch.Tensor,
    writes: bool,
    rope: Rope | None,
    norm: QKNorm | None,
) -> None:
    """Launch attend_decode. `writes`: q holds q|k|v before norm and rotary, and keys and values are written too."""
    attend_decode[layer.kv_heads * tile.head_tiles(layer.heads // layer.kv_heads), items.shape[0]](
        q,
        out_TC,
        mail,
        items,
        first_pages,
        table_BP,
        table_BP.stride(0),
        layer.scale,
        layer.k_scale,
        layer.v_scale,
        layer.sinks,
        k,
        v,
        None if rope is None else rope.table,
        None if norm is None else norm.q_weight_D,
        None if norm is None else norm.k_weight_D,
        0.0 if norm is None else norm.eps,
        H=layer.heads,
        K=layer.kv_heads,
        D=layer.head_dim,
        BLOCK_D=padded_dim(layer.head_dim),
        M=tile.block_m,
        Q=tile.tokens,
        WINDOW=layer.window,
        PAGE=k.shape[1],
        GRAIN=tile.grain(k.shape[1]),
        SLABS=tile.slabs,
        PLACES=tile.stages,
        HEAD_SCALES=isinstance(layer.k_scale, torch.Tensor),
        WRITES=writes,
        HALF=0 if rope is None else rope.table.shape[-1] // 2,
        LARGEST=torch.finfo(k.dtype).max if k.element_size() == 1 else None,
        SOFT_CAP=layer.soft_cap or None,
        num_warps=tile.warps,
        **dependent(q),
    )


def latents(
    layer: AttentionLayer,
    inner_HTL: torch.Tensor,
    rotary_q: torch.Tensor,
    planes: Mapping[str, torch.Tensor],
    meta: BatchMeta,
    tile: Tile,
    items: torch.Tensor,
    counts: torch.Tensor,
    mixed_THL: torch.Tensor,
    parts: torch.Tensor,
    lse: torch.Tensor,
    processors: int,
) -> None:
    """Launch attend_latents_small if `tile` has as few rows, or else attend_latents_hopper. `rotary_q`: view of queries
    [T, H, D] from the first rotated column on. `planes`: those of the layer (core.ops.latents)."""
    assert layer.mla is not None
    units = tile.head_tiles(layer.heads)
    works, latent = items.shape[0] * units, planes[LATENT]
    kernel, residents, options = attend_latents_hopper, 1, {}
    if tile.block_m == SMALL_ROWS.value:
        kernel, residents, options = attend_latents_small, SMALL_RESIDENTS, {"JOIN": tile.joins}
    kernel[(min(works, residents * processors),)](
        inner_HTL,
        rotary_q,
        inner_HTL.shape[1],
        latent.view(torch.int32) if SCALES in planes else latent,
        planes.get(SCALES),
        planes.get(ROTARY),
        mixed_THL,
        parts,
        lse,
        counts,
        items,
        works,
        meta.page_table_BP,
        meta.page_table_BP.stride(0),
        layer.scale,
        H=layer.heads,
        HEADS=min(layer.heads, tile.block_m),
        UNITS=units,
        D=layer.head_dim,
        L=layer.mla.kv_rank,
        R=layer.mla.rope_dim,
        PAGE=meta.page_tokens,
        num_warps=4,
        **options,
        **dependent(inner_HTL),
    )


def _tensor_map(x: torch.Tensor, box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), box, line_layout(16, x.dim()))
