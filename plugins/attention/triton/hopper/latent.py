"""Attention over compressed latents for Hopper, absorbed: a producer warp group converts latents for two consumers.

A tile is 64 rows, heads x query tokens of a row. Each consumer warp group holds half of the output's columns in its
registers. Blocks of 64 keys alternate between the two: one computes the scores and weights of a block and passes the
weights to the other, and both add the block's values to their columns (like the schedule of FlashMLA, DeepSeek 2025).
So the tensor cores multiply for one warp group while the other computes exponentials. The producer (latent_fetch.py)
fills the ring of two blocks, one of each warp group; 8-bit latents are converted once for both, to float16, which is
then the format of queries and weights, too. Rotated columns stay as they are.

A program processes several work items. While the warp groups write an item's output, the producer fetches the first
blocks of the next.

Shapes: M rows of a tile (64), N keys of a block (64), L kv rank, R rotary dim, H heads.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.core.ops.kernels.gluon import barrier
from dovetail.plugins.attention.triton.hopper.fetch import BOX, ITEM_FIELDS, ROWS
from dovetail.plugins.attention.triton.hopper.latent_fetch import (
    FETCH_WARPS,
    GROUP,
    LATENT_FACTOR,
    PLACES,
    latent_item,
    produce_latents,
)
from dovetail.plugins.attention.triton.hopper.latent_rows import QUERY_FACTOR, hidden_zero, narrowed, rows_of_tile
from dovetail.plugins.attention.triton.scores import LOG2_E, LOW

PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""Layout of a box of queries."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(208), gl.constexpr(88)
"""Registers per thread. The default partition gets the remaining registers, which is 208 again."""


@gluon.jit
def _load_queries(q_smem, rotary_smem, sources, first, count, unit, tokens, H: gl.constexpr, HEADS: gl.constexpr,
                  D: gl.constexpr, L: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Copy this warp group's half of the latent columns, and the rotated ones in the first warp group. For 8-bit
    latents they are multiplied, so that both parts of a score have the factor QUERY_FACTOR * LATENT_FACTOR."""
    q_ptr, rotary_q_ptr = sources
    NARROW: gl.constexpr = q_smem.dtype != rotary_smem.dtype
    HALF: gl.constexpr = L // 2 // BOX
    query, head, exists = rows_of_tile(count, unit, H, HEADS, ROWS, gl.SliceLayout(1, PAIRS))
    token = gl.where(exists, first + query, first).to(gl.int64)
    column = gl.arange(0, BOX, gl.SliceLayout(0, PAIRS))[None, :]
    start = q_ptr + ((head.to(gl.int64) * tokens + token) * L)[:, None] + column
    for box in gl.static_range(HALF):
        to, at = q_smem.index(WHICH * HALF + box), start + (WHICH * HALF + box) * BOX
        if NARROW:
            to.store(narrowed(gl.load(at, mask=exists[:, None], other=0.0)))
        else:
            async_copy.async_copy_global_to_shared(to, at, mask=exists[:, None])
    if WHICH == 0:
        at = rotary_q_ptr + ((token * H + head) * D)[:, None] + column
        if NARROW:
            x = gl.load(at, mask=exists[:, None], other=0.0).to(gl.float32) * (QUERY_FACTOR * LATENT_FACTOR)
            rotary_smem.index(0).store(x.to(rotary_smem.dtype))
        else:
            async_copy.async_copy_global_to_shared(rotary_smem.index(0), at, mask=exists[:, None])
    async_copy.commit_group()


@gluon.jit
def _scores(q, rotary_q, k, rotary, n, S: gl.constexpr, WHICH: gl.constexpr):
    """Start the score matmuls of this warp group's block, three groups of instructions."""
    zero = hidden_zero(n)
    k_at = zero + 2 * WHICH
    s = gl.zeros([ROWS, BOX], gl.float32, S)
    s = warpgroup_mma(q.index(zero), k.index(k_at).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma(q.index(zero + 1), k.index(k_at + 1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(rotary_q.index(zero), rotary.index(zero + WHICH).permute((1, 0)), s, is_async=True)


@gluon.jit
def _weigh(s, m, total, n, limit, whole, qk_scale, S: gl.constexpr):
    """Return unnormalised weights of a block's scores, the factor of the output so far, and the new running values.
    limit [M]: end of the keys that each row sees; `whole` is its minimum."""
    if n + BOX > whole:
        keys = (n + gl.arange(0, BOX, gl.SliceLayout(0, S)))[None, :]
        s = gl.where(keys < limit[:, None], s, float("-inf"))
    new_m = gl.maximum(m, gl.max(s, axis=1) * qk_scale)
    p = gl.exp2(s * qk_scale - new_m[:, None])
    alpha = gl.exp2(m - new_m)
    return p, alpha, new_m, total * alpha + gl.sum(p, axis=1)


@gluon.jit
def _rescale(acc, alpha, OUT: gl.constexpr):
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]


@gluon.jit
def _other(acc, m, total, ring, weights, phase, OUT: gl.constexpr, S: gl.constexpr, WHICH: gl.constexpr):
    """Add the other warp group's block to the output, as soon as its weights have arrived. The block is released before
    this warp group's next scores, whose instructions would delay it: the producer waits for the place."""
    k, rotary, full, empty = ring
    p_smem, m_smem, p_full = weights
    OTHER: gl.constexpr = 1 - WHICH
    mbarrier.wait(p_full.index(OTHER), phase & 1)
    new_m = m_smem.load(gl.SliceLayout(1, S))
    alpha = gl.exp2(m - new_m)
    acc = warpgroup_mma(p_smem, k.index(2 * OTHER + WHICH), _rescale(acc, alpha, OUT), is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(OTHER))
    return acc, new_m, total * alpha


@gluon.jit
def _own(acc, m, total, queries, ring, weights, phase, n, limit, whole, qk_scale, OUT: gl.constexpr, S: gl.constexpr,
         WHICH: gl.constexpr):  # fmt: skip
    """Compute the weights of this warp group's block, which starts at key n, pass them to the other warp group, and add
    the block to the output."""
    q, rotary_q = queries
    k, rotary, full, empty = ring
    p_smem, m_smem, p_full = weights
    mbarrier.wait(full.index(WHICH), phase & 1)
    s = warpgroup_mma_wait(0, deps=[_scores(q, rotary_q, k, rotary, n, S, WHICH)])
    p, alpha, m, total = _weigh(s, m, total, n, limit, whole, qk_scale, S)
    p = p.to(p_smem.dtype)
    # The other warp group's last weights, which this one has multiplied, are overwritten.
    p_smem.store(p)
    m_smem.store(m)
    fence_async_shared()
    barrier()
    mbarrier.arrive(p_full.index(WHICH))
    p = gl.convert_layout(p, gl.DotOperandLayout(0, OUT, 2), assert_trivial=True)
    acc = warpgroup_mma(p, k.index(2 * WHICH + WHICH), _rescale(acc, alpha, OUT), is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(WHICH))
    return acc, m, total


@gluon.jit
def _finish(acc, total, m, staging, output, items_ptr, index, unit, first, count, part, H: gl.constexpr,
            HEADS: gl.constexpr, L: gl.constexpr, UNITS: gl.constexpr, OUT: gl.constexpr, FACTOR: gl.constexpr,
            WHICH: gl.constexpr):  # fmt: skip
    """Write this warp group's columns of the output, or of a range's partial result. The last range to arrive joins all
    ranges of its tile. FACTOR: that of the values in acc."""
    out_ptr, part_ptr, lse_ptr, count_ptr = output
    M: gl.constexpr = gl.SliceLayout(1, OUT)
    QUERIES: gl.constexpr = ROWS // HEADS
    m = gl.convert_layout(m, M, assert_trivial=True)
    total = gl.convert_layout(total, M, assert_trivial=True)
    # A query that saw no key gives zeros.
    acc = acc * (1.0 / (FACTOR * gl.where(total > 0, total, 1.0)))[:, None]
    if part < 0:
        _put(acc, out_ptr, staging, first, count, unit, H, HEADS, L, WHICH)
    else:
        query, head, exists = rows_of_tile(count, unit, H, HEADS, ROWS, M)
        columns = WHICH * (L // 2) + gl.arange(0, L // 2, gl.SliceLayout(0, OUT))[None, :]
        to = (part + query).to(gl.int64) * H + head
        gl.store(part_ptr + (to * L)[:, None] + columns, acc, mask=exists[:, None])
        # Both warp groups write the same logarithms, since each of them reads them.
        gl.store(lse_ptr + to, gl.where(total > 0, m + gl.log2(total), float("-inf")), mask=exists)
        splits = gl.load(items_ptr + index * ITEM_FIELDS + 9)
        first_item = gl.load(items_ptr + index * ITEM_FIELDS + 10)
        # Each warp group uses a separate counter, that of the tile's first or second item.
        count_ptr += (first_item + WHICH) * UNITS + unit
        barrier()
        arrived = gl.atomic_add(count_ptr, 1, sem="acq_rel")
        barrier()
        if arrived == splits - 1:
            gl.store(count_ptr, 0)
            first_part = part - (index - first_item) * QUERIES
            m = gl.full([ROWS], LOW, gl.float32, M)
            total = gl.zeros([ROWS], gl.float32, M)
            acc = gl.zeros([ROWS, L // 2], gl.float32, OUT)
            for split in range(splits):
                to = (first_part + split * QUERIES + query).to(gl.int64) * H + head
                lse = gl.load(lse_ptr + to, mask=exists, other=float("-inf"), cache_modifier=".cg")
                x = gl.load(part_ptr + (to * L)[:, None] + columns, mask=exists[:, None], other=0.0,
                            cache_modifier=".cg")  # fmt: skip
                new_m = gl.maximum(m, lse)
                weight = gl.exp2(lse - new_m)
                alpha = gl.exp2(m - new_m)
                total = total * alpha + weight
                acc = acc * alpha[:, None] + weight[:, None] * x
                m = new_m
            acc = acc * (1.0 / gl.where(total > 0, total, 1.0))[:, None]
            _put(acc, out_ptr, staging, first, count, unit, H, HEADS, L, WHICH)


@gluon.jit
def _put(acc, out_ptr, staging, first, count, unit, H: gl.constexpr, HEADS: gl.constexpr, L: gl.constexpr,
         WHICH: gl.constexpr):  # fmt: skip
    """Write rows of the output through shared memory, each of them by one warp."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    staging.store(acc.to(staging.dtype))
    query, head, exists = rows_of_tile(count, unit, H, HEADS, ROWS, gl.SliceLayout(1, WIDE))
    columns = WHICH * (L // 2) + gl.arange(0, L // 2, gl.SliceLayout(0, WIDE))[None, :]
    offset = ((first + query).to(gl.int64) * H + head) * L
    barrier()
    gl.store(out_ptr + offset[:, None] + columns, staging.load(WIDE), mask=exists[:, None])


@gluon.jit
def _consume(q_parts, ring, weights, sums, sources, output, items_ptr, works, tokens, scale, H: gl.constexpr,
             HEADS: gl.constexpr, D: gl.constexpr, L: gl.constexpr, UNITS: gl.constexpr,
             WHICH: gl.constexpr):  # fmt: skip
    """Consumer warp group for half of the output's columns, and for the scores of every second block."""
    q_boxes, q, rotary_q, staging, q_full = q_parts
    queries = (q, rotary_q)
    NARROW: gl.constexpr = q.dtype != rotary_q.dtype
    FACTOR: gl.constexpr = LATENT_FACTOR if NARROW else 1.0
    sums_smem, sums_full = sums
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BOX, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L // 2, 16])
    OTHER: gl.constexpr = 1 - WHICH
    qk_scale = scale * LOG2_E
    if NARROW:
        qk_scale = qk_scale / (QUERY_FACTOR * LATENT_FACTOR)
    # Uses of this warp group's place and of the other one so far, and processed items.
    mine, others, done = 0, 0, 0
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        index, unit, row, first, count, first_at, lo, hi, part, blocks = latent_item(items_ptr, work, works, UNITS)
        if blocks > 0:
            # The scores of the last item are done in both warp groups, so its queries may be overwritten.
            _load_queries(q_boxes, rotary_q, sources, first, count, unit, tokens, H, HEADS, D, L, WHICH)
            query, head, exists = rows_of_tile(count, unit, H, HEADS, ROWS, gl.SliceLayout(1, S))
            limit = gl.minimum(gl.where(exists, first_at + query + 1, hi), hi)
            whole = gl.minimum(first_at + 1, hi)
            acc = gl.zeros([ROWS, L // 2], gl.float32, OUT)
            total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
            m = gl.full([ROWS], LOW, gl.float32, gl.SliceLayout(1, S))
            async_copy.wait_group(0)
            fence_async_shared()
            barrier()
            mbarrier.arrive(q_full)
            mbarrier.wait(q_full, done & 1)
            if WHICH == 0:
                acc, m, total = _own(
                    acc, m, total, queries, ring, weights, mine, lo, limit, whole, qk_scale, OUT, S, WHICH
                )  # fmt: skip
            for b in range(2 - WHICH, blocks, PLACES):
                acc, m, total = _other(acc, m, total, ring, weights, others + (b - 1) // PLACES, OUT, S, WHICH)
                acc, m, total = _own(
                    acc, m, total, queries, ring, weights, mine + b // PLACES, lo + b * BOX, limit, whole, qk_scale,
                    OUT, S, WHICH,
                )  # fmt: skip
            if blocks % PLACES == WHICH:
                acc, m, total = _other(acc, m, total, ring, weights, others + (blocks - 1) // PLACES, OUT, S, WHICH)
            # Each warp group has summed the weights of its own blocks.
            sums_smem.index(WHICH).store(total)
            barrier()
            mbarrier.arrive(sums_full.index(WHICH))
            mbarrier.wait(sums_full.index(OTHER), done & 1)
            total = sums_smem.index(0).load(gl.SliceLayout(1, S)) + sums_smem.index(1).load(gl.SliceLayout(1, S))
            _finish(
                acc, total, m, staging.index(WHICH), output, items_ptr, index, unit, first, count, part, H, HEADS, L,
                UNITS, OUT, FACTOR, WHICH,
            )  # fmt: skip
            mine += (blocks + 1 - WHICH) // PLACES
            others += (blocks + WHICH) // PLACES
            done += 1


@gluon.jit(do_not_specialize=["tokens", "works", "table_stride"], do_not_specialize_on_alignment=["table_ptr"])
def attend_latents_hopper(
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
    PDL: gl.constexpr,
):
    """Programs process the `works` pairs of an item and a unit in rounds. q_ptr: queries [H, tokens, L]; rotary_q_ptr:
    the first rotated column of the first query, in [tokens, H, D]. page_ptr: words of four 8-bit latents, with
    scale_ptr and rotary_ptr, or 16-bit latents of L + R columns, without them. The output is [tokens, H, L]."""
    if PDL:
        gdc_launch_dependents()
    given: gl.constexpr = q_ptr.dtype.element_ty
    dtype: gl.constexpr = given if scale_ptr is None else gl.float16
    BOXES: gl.constexpr = L // BOX
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_boxes = gl.allocate_shared_memory(dtype, [BOXES, ROWS, BOX], MATRIX)
    rotary_q = gl.allocate_shared_memory(given, [1, ROWS, R], MATRIX)
    k_boxes = gl.allocate_shared_memory(dtype, [PLACES * BOXES, BOX, BOX], MATRIX)
    rotary = gl.allocate_shared_memory(given, [PLACES, BOX, R], MATRIX)
    p_smem = gl.allocate_shared_memory(dtype, [ROWS, BOX], MATRIX)
    q = q_boxes._reinterpret(dtype, [2, ROWS, L // 2], MATRIX)
    # The output passes through the memory of queries.
    staging = q_boxes._reinterpret(given, [2, ROWS, L // 2], MATRIX)
    k = k_boxes._reinterpret(dtype, [2 * PLACES, BOX, L // 2], MATRIX)
    k_words = k_boxes._reinterpret(gl.int32, [PLACES * (L // GROUP), BOX, GROUP // 2], WORDS)
    m_smem = gl.allocate_shared_memory(gl.float32, [ROWS], VECTOR)
    sums_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], VECTOR)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    sums_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(p_full.index(i), count=1)
        mbarrier.init(sums_full.index(i), count=1)
    mbarrier.init(q_full, count=2)
    fence_async_shared()
    barrier()
    # The partitions start after this wait, so all of them see what earlier kernels wrote.
    if PDL:
        gdc_wait()
    queries = (q_boxes, q, rotary_q, staging, q_full)
    ring = (k, rotary, full, empty)
    weights = (p_smem, m_smem, p_full)
    sums = (sums_smem, sums_full)
    sources = (q_ptr, rotary_q_ptr)
    output = (out_ptr, part_ptr, lse_ptr, count_ptr)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    queries, ring, weights, sums, sources, output, items_ptr, works, tokens, scale, H, HEADS, D, L,
                    UNITS, 0,
                ),
            ),
            (
                _consume,
                (
                    queries, ring, weights, sums, sources, output, items_ptr, works, tokens, scale, H, HEADS, D, L,
                    UNITS, 1,
                ),
            ),
            (
                produce_latents,
                (
                    (k_boxes, k_words, rotary), full, empty, (page_ptr, scale_ptr, rotary_ptr), items_ptr, works,
                    table_ptr, table_stride, UNITS, L, R, PAGE,
                ),
            ),
        ],
        [4, FETCH_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
