"""Attention over compressed latents for Hopper, absorbed, in tiles of 16 rows.

With few heads a tile of 64 rows (latent.py) is mostly empty, and its two warp groups wait for each other in every
block. Here latents are the left operands of both products, since matrix instructions have 64 rows of those and as few
columns as 16: scores are [keys, rows], the output is [columns, rows], and one warp group has all columns of the output
in its registers. Two such programs run on an SM: one reads and converts while the other multiplies. Latents of 8 bits
are loaded into registers a block ahead.

Shapes: M rows of a tile (16), N keys of a block (64), L kv rank, R rotary dim, H heads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.core.ops.kernels.gluon import barrier
from dovetail.plugins.attention.triton.hopper.fetch import BOX, ITEM_FIELDS
from dovetail.plugins.attention.triton.hopper.latent_fetch import (
    BYTES,
    GROUP,
    LATENT_FACTOR,
    PAIRS,
    ROTATED,
    copy_box,
    latent_item,
    scaled,
)
from dovetail.plugins.attention.triton.hopper.latent_rows import QUERY_FACTOR, hidden_zero, narrowed, rows_of_tile
from dovetail.plugins.attention.triton.scores import LOG2_E, LOW

ROWS = gl.constexpr(16)
"""Rows of a tile."""
RESIDENTS = 2
"""Programs that run on an SM."""
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
"""Layout of queries and of the output in memory."""
GROUPED = gl.constexpr(gl.BlockedLayout([1, 1, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0]))
"""Layout of words of 8-bit latents: keys, groups of columns with a scale, words of a group."""


@gluon.jit
def _load_queries(q, rotary_q, sources, first, count, unit, tokens, H: gl.constexpr, HEADS: gl.constexpr,
                  D: gl.constexpr, L: gl.constexpr, R: gl.constexpr):  # fmt: skip
    """Copy the tile's queries. For 8-bit latents they are multiplied as in latent.py."""
    q_ptr, rotary_q_ptr = sources
    NARROW: gl.constexpr = q.dtype != rotary_q.dtype
    query, head, exists = rows_of_tile(count, unit, H, HEADS, ROWS, gl.SliceLayout(1, WIDE))
    token = gl.where(exists, first + query, first).to(gl.int64)
    at = q_ptr + ((head.to(gl.int64) * tokens + token) * L)[:, None] + gl.arange(0, L, gl.SliceLayout(0, WIDE))[None, :]
    x = gl.load(at, mask=exists[:, None], other=0.0)
    query, head, exists = rows_of_tile(count, unit, H, HEADS, ROWS, gl.SliceLayout(1, PAIRS))
    token = gl.where(exists, first + query, first).to(gl.int64)
    at = rotary_q_ptr + ((token * H + head) * D)[:, None] + gl.arange(0, R, gl.SliceLayout(0, PAIRS))[None, :]
    rotated = gl.load(at, mask=exists[:, None], other=0.0)
    if NARROW:
        q.store(narrowed(x))
        rotary_q.store((rotated.to(gl.float32) * (QUERY_FACTOR * LATENT_FACTOR)).to(rotary_q.dtype))
    else:
        q.store(x)
        rotary_q.store(rotated)


@gluon.jit
def _pages(table, keys, hi, PAGE: gl.constexpr):
    """Return the pages of keys. What is computed from them at once waits for this load, so they are kept as they are
    until the next block."""
    return gl.load(table + keys // PAGE, mask=keys < hi, other=0)


@gluon.jit
def _load_block(page_ptr, scale_ptr, slot, exists, L: gl.constexpr):
    """Return words of a block's 8-bit latents [N, G, W] and their scales [N, G]."""
    GROUPS: gl.constexpr = L // GROUP
    M: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, GROUPED))
    slot, exists = gl.convert_layout(slot, M)[:, None], gl.convert_layout(exists, M)[:, None]
    group = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, GROUPED)))[None, :]
    word = gl.arange(0, GROUP // 4, gl.SliceLayout(0, gl.SliceLayout(1, GROUPED)))[None, None, :]
    slot = slot.to(gl.int64)
    at = page_ptr + (slot * (L // 4) + group * (GROUP // 4))[:, :, None] + word
    words = gl.load(at, mask=exists[:, :, None], other=0)
    return words, gl.load(scale_ptr + slot * GROUPS + group, mask=exists, other=0.0)


@gluon.jit
def _copy_rotated(rotary, rotary_ptr, slot, exists, R: gl.constexpr):
    """Start to copy rotated columns beside 8-bit latents."""
    M: gl.constexpr = gl.SliceLayout(1, ROTATED)
    slot = gl.convert_layout(slot, M, assert_trivial=True)
    exists = gl.convert_layout(exists, M, assert_trivial=True)
    column = gl.arange(0, R, gl.SliceLayout(0, ROTATED))[None, :]
    copy_box(rotary, rotary_ptr + (slot.to(gl.int64) * R)[:, None] + column, exists)
    async_copy.commit_group()


@gluon.jit
def _weigh(s, m, total, n, limit, whole, qk_scale, ACC: gl.constexpr):
    """Return unnormalised weights [N, M] of a block's scores, the factor [M] of the output so far, and the new running
    values; `total` [N, M] has a sum of its own for each place of a block. limit [M]: end of the keys that each row
    sees; `whole` is its minimum."""
    if n + BOX > whole:
        keys = (n + gl.arange(0, BOX, gl.SliceLayout(1, ACC)))[:, None]
        s = gl.where(keys < limit[None, :], s, float("-inf"))
    new_m = gl.maximum(m, gl.max(s, axis=0) * qk_scale)
    p = gl.exp2(s * qk_scale - new_m[None, :])
    alpha = gl.exp2(m - new_m)
    return p, alpha, new_m, total * alpha[None, :] + p


@gluon.jit
def _put(acc, staging, out_ptr, first, count, unit, H: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr):
    """Write rows of the output through shared memory."""
    staging.permute((1, 0)).store(acc.to(staging.dtype))
    query, head, exists = rows_of_tile(count, unit, H, HEADS, ROWS, gl.SliceLayout(1, WIDE))
    offset = ((first + query).to(gl.int64) * H + head) * L
    barrier()
    columns = gl.arange(0, L, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(out_ptr + offset[:, None] + columns, staging.load(WIDE), mask=exists[:, None])


@gluon.jit
def _finish(acc, total, m, staging, output, items_ptr, index, unit, first, count, part, H: gl.constexpr,
            HEADS: gl.constexpr, L: gl.constexpr, UNITS: gl.constexpr, ACC: gl.constexpr, FACTOR: gl.constexpr,
            JOIN: gl.constexpr):  # fmt: skip
    """Write the output, or a range's partial result. With JOIN, the last range to arrive joins all ranges of its tile.
    FACTOR: that of the values in acc."""
    out_ptr, part_ptr, lse_ptr, count_ptr = output
    # A query that saw no key gives zeros.
    acc = acc * (1.0 / (FACTOR * gl.where(total > 0, total, 1.0)))[None, :]
    if part < 0:
        _put(acc, staging, out_ptr, first, count, unit, H, HEADS, L)
    else:
        query, head, exists = rows_of_tile(count, unit, H, HEADS, ROWS, gl.SliceLayout(0, ACC))
        columns = gl.arange(0, L, gl.SliceLayout(1, ACC))[:, None]
        to = (part + query).to(gl.int64) * H + head
        gl.store(part_ptr + (to * L)[None, :] + columns, acc, mask=exists[None, :])
        # NaN stays NaN: project_ranges does not read results whose logarithm is minus infinity.
        gl.store(lse_ptr + to, gl.where(total == 0, float("-inf"), m + gl.log2(total)), mask=exists)
        if JOIN:
            splits = gl.load(items_ptr + index * ITEM_FIELDS + 9)
            first_item = gl.load(items_ptr + index * ITEM_FIELDS + 10)
            count_ptr += first_item * UNITS + unit
            barrier()
            arrived = gl.atomic_add(count_ptr, 1, sem="acq_rel")
            barrier()
            if arrived == splits - 1:
                gl.store(count_ptr, 0)
                first_part = part - (index - first_item) * (ROWS // HEADS)
                m = gl.full([ROWS], LOW, gl.float32, gl.SliceLayout(0, ACC))
                total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(0, ACC))
                acc = gl.zeros([L, ROWS], gl.float32, ACC)
                for split in range(splits):
                    to = (first_part + split * (ROWS // HEADS) + query).to(gl.int64) * H + head
                    lse = gl.load(lse_ptr + to, mask=exists, other=float("-inf"), cache_modifier=".cg")
                    x = gl.load(part_ptr + (to * L)[None, :] + columns, mask=exists[None, :], other=0.0,
                                cache_modifier=".cg")  # fmt: skip
                    new_m = gl.maximum(m, lse)
                    weight = gl.exp2(lse - new_m)
                    alpha = gl.exp2(m - new_m)
                    total = total * alpha + weight
                    acc = acc * alpha[None, :] + weight[None, :] * x
                    m = new_m
                acc = acc * (1.0 / gl.where(total > 0, total, 1.0))[None, :]
                _put(acc, staging, out_ptr, first, count, unit, H, HEADS, L)


@gluon.jit(do_not_specialize=["tokens", "works", "table_stride"], do_not_specialize_on_alignment=["table_ptr"])
def attend_latents_small(
    q_ptr,
    rotary_q_ptr,
    tokens,
    page_ptr,
    scale_ptr,
    rotary_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    count_ptr,
    items_ptr,
    works,
    table_ptr,
    table_stride,
    scale,
    H: gl.constexpr,
    HEADS: gl.constexpr,
    UNITS: gl.constexpr,
    D: gl.constexpr,
    L: gl.constexpr,
    R: gl.constexpr,
    PAGE: gl.constexpr,
    JOIN: gl.constexpr,
    PDL: gl.constexpr,
):
    """Programs process the `works` pairs of an item and a unit in rounds. Arguments are those of attend_latents_hopper.
    If not JOIN, only partial results are written, one for every item."""
    if PDL:
        gdc_launch_dependents()
    given: gl.constexpr = q_ptr.dtype.element_ty
    NARROW: gl.constexpr = scale_ptr is not None
    dtype: gl.constexpr = gl.float16 if NARROW else given
    FACTOR: gl.constexpr = LATENT_FACTOR if NARROW else 1.0
    BOXES: gl.constexpr = L // BOX
    COPY: gl.constexpr = BYTES if NARROW else PAIRS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    k_boxes = gl.allocate_shared_memory(dtype, [BOXES, BOX, BOX], MATRIX)
    rotary = gl.allocate_shared_memory(given, [2 if NARROW else 1, BOX, R], MATRIX)
    q_boxes = gl.allocate_shared_memory(dtype, [1, ROWS, L], MATRIX)
    rotary_q = gl.allocate_shared_memory(given, [1, ROWS, R], MATRIX)
    p_smem = gl.allocate_shared_memory(dtype, [1, BOX, ROWS], WEIGHTS)
    k = k_boxes._reinterpret(dtype, [1, BOX, L], MATRIX)
    k_words = k_boxes._reinterpret(gl.int32, [1, BOX, L // 2], WORDS)
    # The output passes through the memory of queries.
    staging = q_boxes._reinterpret(given, [1, ROWS, L], MATRIX).index(0)
    if PDL:
        gdc_wait()
    at = gl.arange(0, BOX, gl.SliceLayout(1, COPY))
    qk_scale = scale * LOG2_E
    if NARROW:
        qk_scale = qk_scale / (QUERY_FACTOR * LATENT_FACTOR)
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        index, unit, row, first, count, first_at, lo, hi, part, blocks = latent_item(items_ptr, work, works, UNITS)
        if blocks > 0:
            table = table_ptr + row.to(gl.int64) * table_stride
            page = _pages(table, lo + at, hi, PAGE)
            if NARROW:
                slot = page * PAGE + (lo + at) % PAGE
                loaded, scales = _load_block(page_ptr, scale_ptr, slot, lo + at < hi, L)
                _copy_rotated(rotary.index(0), rotary_ptr, slot, lo + at < hi, R)
                page = _pages(table, lo + BOX + at, hi, PAGE)
            sources = (q_ptr, rotary_q_ptr)
            _load_queries(q_boxes.index(0), rotary_q.index(0), sources, first, count, unit, tokens, H, HEADS, D, L, R)
            query, head, exists = rows_of_tile(count, unit, H, HEADS, ROWS, gl.SliceLayout(0, ACC))
            limit = gl.minimum(gl.where(exists, first_at + query + 1, hi), hi)
            whole = gl.minimum(first_at + 1, hi)
            acc = gl.zeros([L, ROWS], gl.float32, ACC)
            total = gl.zeros([BOX, ROWS], gl.float32, ACC)
            m = gl.full([ROWS], LOW, gl.float32, gl.SliceLayout(0, ACC))
            for b in range(blocks):
                n = lo + b * BOX
                place = b % 2 if NARROW else 0
                if NARROW:
                    k_words.index(0).store(gl.reshape(scaled(loaded, scales[:, :, None]), [BOX, L // 2]))
                    async_copy.wait_group(0)
                    fence_async_shared()
                    barrier()
                    slot = page * PAGE + (n + BOX + at) % PAGE
                    page = _pages(table, n + 2 * BOX + at, hi, PAGE)
                    loaded, scales = _load_block(page_ptr, scale_ptr, slot, n + BOX + at < hi, L)
                    _copy_rotated(rotary.index(1 - place), rotary_ptr, slot, n + BOX + at < hi, R)
                else:
                    slot = page * PAGE + (n + at) % PAGE
                    page = _pages(table, n + BOX + at, hi, PAGE)
                    start = page_ptr + (slot.to(gl.int64) * (L + R))[:, None]
                    copy_box(k.index(0), start + gl.arange(0, L, gl.SliceLayout(0, COPY))[None, :], n + at < hi)
                    column = L + gl.arange(0, R, gl.SliceLayout(0, COPY))
                    copy_box(rotary.index(0), start + column[None, :], n + at < hi)
                    async_copy.commit_group()
                    async_copy.wait_group(0)
                    fence_async_shared()
                    barrier()
                zero = hidden_zero(n)
                s = gl.zeros([BOX, ROWS], gl.float32, ACC)
                s = warpgroup_mma(k.index(zero), q_boxes.index(zero).permute((1, 0)), s, use_acc=False, is_async=True)
                s = warpgroup_mma(
                    rotary.index(zero + place), rotary_q.index(zero).permute((1, 0)), s, is_async=True
                )  # fmt: skip
                s = warpgroup_mma_wait(0, deps=[s])
                p, alpha, m, total = _weigh(s, m, total, n, limit, whole, qk_scale, ACC)
                p_smem.index(0).store(p.to(dtype))
                fence_async_shared()
                barrier()
                zero = hidden_zero(n)
                acc = warpgroup_mma(
                    k.index(zero).permute((1, 0)), p_smem.index(zero), acc * alpha[None, :], is_async=True
                )  # fmt: skip
                acc = warpgroup_mma_wait(0, deps=[acc])
                # All warps have read the block, which the next one overwrites.
                barrier()
            # The last block has started to fill its successor's rotated columns with zeros.
            async_copy.wait_group(0)
            _finish(
                acc, gl.sum(total, axis=0), m, staging, (out_ptr, part_ptr, lse_ptr, count_ptr), items_ptr, index, unit,
                first, count, part, H, HEADS, L, UNITS, ACC, FACTOR, JOIN,
            )  # fmt: skip
            # The next item's queries overwrite what the output passed through.
            barrier()
