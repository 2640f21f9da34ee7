"""Norm and rotate compressed latents, write them to pages, and rotate queries, in one pass.
Shapes: T tokens, H query heads, D query head dim (nope + R), L kv rank, R rotary dim."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.interfaces.attention import AttentionLayer, BatchMeta, KVPool, LatentNorm, Rope
from dovetail.core.ops.kernels.norm import weigh
from dovetail.core.ops.latents import GROUP, LARGEST, LATENT, ROTARY, SCALES, SMALLEST_SCALE

HEADS_PER_PROGRAM = 8
MOST, LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _rotate(x_ptr, out_ptr, exists, table_ptr, position, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr):
    """Rotate columns with their partners, HALF columns later, and store them in the output's dtype. x_ptr and out_ptr
    point at the first rotated column of each row."""
    dims = tl.arange(0, HALF_BLOCK)[None, :]
    ok = exists & (dims < HALF)
    x1 = tl.load(x_ptr + dims, mask=ok, other=0.0)
    x2 = tl.load(x_ptr + HALF + dims, mask=ok, other=0.0)
    dtype: tl.constexpr = x1.dtype
    if table_ptr is not None:
        row = table_ptr + position * (2 * HALF)
        cos = tl.load(row + dims, mask=dims < HALF, other=1.0)
        sin = tl.load(row + HALF + dims, mask=dims < HALF, other=0.0)
        a, b = x1.to(tl.float32), x2.to(tl.float32)
        x1, x2 = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)
    tl.store(out_ptr + dims, x1.to(out_ptr.dtype.element_ty), mask=ok)
    tl.store(out_ptr + HALF + dims, x2.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["q_stride", "latent_stride"])
def _latent_write(
    q_ptr,
    q_stride,
    latent_ptr,
    latent_stride,
    out_ptr,
    page_ptr,
    scale_ptr,
    rotary_ptr,
    write_ptr,
    positions_ptr,
    table_ptr,
    weight_ptr,
    eps,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    L: tl.constexpr,
    PAGE_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    L_BLOCK: tl.constexpr,
):
    """Program (token, part): part 0 writes the latent, the others HEADS queries each. GROUPS: groups of L_BLOCK columns
    with a scale; 0 = latents are not scaled, and their rotated columns follow them in the page."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    D: tl.constexpr = NOPE + 2 * HALF
    if part > 0:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        dims = tl.arange(0, NOPE_BLOCK)[None, :]
        source = q_ptr + token * q_stride + head * D
        to = out_ptr + (token * H + head) * D
        ok = (head < H) & (dims < NOPE)
        tl.store(to + dims, tl.load(source + dims, mask=ok, other=0.0), mask=ok)
        _rotate(source + NOPE, to + NOPE, head < H, table_ptr, position, HALF, HALF_BLOCK)
    else:
        dtype: tl.constexpr = latent_ptr.dtype.element_ty
        slot = tl.load(write_ptr + token).to(tl.int64)
        columns = tl.arange(0, L_BLOCK)
        inside = columns < L
        row = latent_ptr + token * latent_stride
        x = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, axis=0) / L + eps)
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        x = weigh(x * inverse, weight, dtype, weight_ptr.dtype.element_ty).to(dtype)
        exists = tl.full((1, 1), 1, tl.int1)
        page = page_ptr + slot * PAGE_COLUMNS
        if GROUPS:
            grouped = tl.reshape(x.to(tl.float32), (GROUPS, L_BLOCK // GROUPS))
            scale = tl.maximum(tl.max(tl.abs(grouped), axis=1) / MOST, LEAST_SCALE)
            values = tl.clamp(grouped / scale[:, None], -MOST, MOST)
            groups: tl.constexpr = (L * GROUPS + L_BLOCK - 1) // L_BLOCK
            group = tl.arange(0, GROUPS)
            tl.store(scale_ptr + slot * groups + group, scale, mask=group < groups)
            tl.store(page + columns, tl.reshape(values, (L_BLOCK,)).to(page_ptr.dtype.element_ty), mask=inside)
            key = rotary_ptr + slot * (2 * HALF) + tl.zeros((1, 1), tl.int32)
        else:
            tl.store(page + columns, x.to(page_ptr.dtype.element_ty), mask=inside)
            key = page + L + tl.zeros((1, 1), tl.int32)
        _rotate(row + L + tl.zeros((1, 1), tl.int32), key, exists, table_ptr, position, HALF, HALF_BLOCK)


def latent_write_triton(
    layer: AttentionLayer,
    meta: BatchMeta,
    pool: KVPool,
    q: torch.Tensor,
    latents: torch.Tensor,
    rope: Rope | None,
    norm: LatentNorm,
) -> torch.Tensor:
    mla = layer.mla
    assert mla is not None
    tokens, heads = len(q), layer.heads
    q_THD = q.new_empty(tokens, heads, mla.nope_dim + mla.rope_dim)
    planes = {name: pool.layer(layer.local, name) for name in pool.planes}
    block, half = max(power_of_2(mla.kv_rank), 16), mla.rope_dim // 2
    if tokens:
        _latent_write[(tokens, 1 + ceil_div(heads, HEADS_PER_PROGRAM))](
            _with_dense_rows(q),
            q.stride(0),
            _with_dense_rows(latents),
            latents.stride(0),
            q_THD,
            planes[LATENT],
            planes.get(SCALES),
            planes.get(ROTARY),
            meta.write_T,
            meta.positions_T,
            None if rope is None else rope.table,
            norm.weight_L,
            norm.eps,
            H=heads,
            NOPE=mla.nope_dim,
            HALF=half,
            L=mla.kv_rank,
            PAGE_COLUMNS=planes[LATENT].shape[-1],
            GROUPS=ceil_div(block, GROUP) if SCALES in planes else 0,
            HEADS=HEADS_PER_PROGRAM,
            NOPE_BLOCK=power_of_2(mla.nope_dim),
            HALF_BLOCK=power_of_2(half),
            L_BLOCK=block,
            num_warps=2,
        )
    return q_THD


def _with_dense_rows(x_TC: torch.Tensor) -> torch.Tensor:
    assert x_TC.stride(1) == 1 or x_TC.shape[1] == 1, "columns must be adjacent"
    return x_TC
