"""Attention of prompts for Hopper: one producer warp fetches keys and values for two consumer warp groups.

The algorithm is FlashAttention 3 (Shah et al. 2024), over the items of `plan_items`, paged K and V and packed query
heads. A tile is 128 rows: query tokens x PACK query heads of a kv head. Each of two warp groups has 64 of them, with
scores and output in its registers. A warp group issues the score matmul of a block before the value matmul of the
preceding block, and computes the maximum, exponentials and sums of the new scores while the value matmul runs.

If a kv head has more than PACK query heads, several tiles (head tiles) have PACK of them each. Rows of the last one may
have no head; their output is dropped.

Blocks are processed from last to first: those with a mask (the diagonal, the row's end), then those that all queries of
the warp group see whole, then, with a window, those at its edge.

Keys that do not exist (past the row's length, or before the window) may be NaN. Their scores are replaced before use.
Their values have weight 0, which does not remove NaN, so both warp groups overwrite them with zeros in shared memory
before the matmul (_clear). Values between `hi` and the row's length belong to keys of the same row, which are written
before attention runs, so they are finite and have weight 0.

Head dims that are not powers of two are padded to BLOCK_D columns, which tensor maps fill with zeros.

Keys expanded from compressed latents (DeepSeek-V2, 2024) have rotary columns, which all heads share: they have a tensor
map of their own, and their part of a score is a second matmul. Values may have fewer columns than keys.

Shapes: M rows of a warp group (64), N keys of a block, D head dim, V value dim. T tokens, H query heads, K kv heads. A
unit is a head tile of a kv head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.core.ops.kernels.gluon import barrier
from dovetail.plugins.attention.triton.hopper.fetch import (
    BOX,
    GROUPS,
    ROWS,
    next_item,
    next_place,
    produce,
)
from dovetail.plugins.attention.triton.hopper.finish import finish
from dovetail.plugins.attention.triton.scores import LOG2_E, LOW, cap_scores

CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
"""Registers per thread. The default partition gets the remaining registers, which is 240 again."""


@gluon.jit
def _boundary(n):
    """End a region in which the assembler may reorder instructions. It emits a loop that is never entered, since n is
    not negative, which the assembler cannot prove."""
    gl.inline_asm_elementwise(
        "{.reg .pred p; .reg .b32 c; mov.u32 c, $1; more: setp.ge.s32 p, c, 0; @p bra done; mov.u32 c, %clock; "
        "bra more; done: mov.u32 $0, 0;}",
        "=r,r",
        [n],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _eighths(x):
    """View [M, N] as [M, N / 8, 8]: a thread holds the whole middle dimension of a row, and two of the eight."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8])


@gluon.jit
def _weigh(s, m, total, n, at, qk_scale, WINDOW: gl.constexpr, MASKED: gl.constexpr, SOFT_CAP: gl.constexpr,
           LAYOUT: gl.constexpr):  # fmt: skip
    """Return unnormalised weights of a block's scores [M, N], and the updated running values.

    `total` [M, 8] keeps a separate sum for each thread of a row until the end. Reducing along the middle dimension
    first also gives a thread four chains of dependent instructions instead of two.
    """
    if SOFT_CAP is not None:
        s = cap_scores(s * qk_scale, SOFT_CAP)
        qk_scale = 1.0
    if MASKED:
        keys = (n + gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT)))[None, :]
        seen = keys <= at[:, None]
        if WINDOW:
            seen = seen & (keys > (at - WINDOW)[:, None])
        s = gl.where(seen, s, float("-inf"))
    most = gl.max(gl.max(_eighths(s), axis=1), axis=1)
    new_m = gl.maximum(m, gl.convert_layout(most, gl.SliceLayout(1, LAYOUT), assert_trivial=True) * qk_scale)
    p = gl.exp2(s * qk_scale - new_m[:, None])
    alpha = gl.exp2(m - new_m)
    sums = gl.sum(_eighths(p), axis=1)
    scale = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    total = gl.convert_layout(total, sums.type.layout, assert_trivial=True) * scale[:, None] + sums
    return p, alpha, new_m, gl.convert_layout(total, _eighth_layout(LAYOUT), assert_trivial=True)


@gluon.jit
def _pack(x, dtype: gl.constexpr):
    """Convert float32 [M, N] to words [M, N / 2] of two 16-bit values. As loop-carried values, 16-bit elements would be
    unpacked and packed again in each iteration."""
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    ASM: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(x, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    even = x.to(gl.int16).to(dtype, bitcast=True)
    odd = (x >> 16).to(gl.int16).to(dtype, bitcast=True)
    both = gl.reshape(gl.join(even, odd), [x.shape[0], x.shape[1] * 2])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True)


@gluon.constexpr_function
def _eighth_layout(s_layout):
    """Layout of [M, 8], as in the columns of a matrix instruction's accumulator."""
    return gl.NVMMADistributedLayout(s_layout.version, s_layout.warps_per_cta, [16, 8, 16])


@gluon.jit
def _clear(v_boxes, v_full, stage, phase, n, seen_from, length, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr):
    """Overwrite the values of keys that do not exist with zeros, once the block has arrived.

    Both warp groups do this without synchronisation, since they write the same bits. The fence makes the writes visible
    to the tensor cores, and the barrier orders every warp's matrix instructions after all warps' fences.
    """
    if (n < seen_from) | (n + BLOCK_N > length):
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        mbarrier.wait(v_full.index(stage), phase)
        for i in gl.static_range(BLOCK_N // BOX):
            keys = n + i * BOX + gl.arange(0, BOX, gl.SliceLayout(1, LAYOUT))
            exists = (keys >= seen_from) & (keys < length)
            for c in gl.static_range(BLOCK_D // BOX):
                box = v_boxes.index((stage * (BLOCK_D // BOX) + c) * (BLOCK_N // BOX) + i)
                x = box.load(LAYOUT)
                box.store(gl.where(exists[:, None], x, gl.zeros_like(x)))
        fence_async_shared()
        barrier()


@gluon.jit
def _scores(q_smem, which, k_smem, stage, S: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr):
    """Start the score matmul of a block, over no more columns than D needs. q_smem, k_smem: places of columns
    [N, BLOCK_D] and of further ones that the keys of all heads share, or None."""
    q_places, q_shared = q_smem
    k_places, k_shared = k_smem
    q, k = q_places.index(which), k_places.index(stage)
    FIRST: gl.constexpr = _first_columns(D)
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    if k_shared is not None:
        s = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        return warpgroup_mma(q_shared.index(which), k_shared.index(stage).permute((1, 0)), s, is_async=True)
    elif FIRST >= D:
        return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
    else:
        REST: gl.constexpr = _first_columns(2 * (D - FIRST) - 1)
        front, back = k.slice(0, FIRST, 1), k.slice(FIRST, REST, 1)
        s = warpgroup_mma(q.slice(0, FIRST, 1), front.permute((1, 0)), nothing, use_acc=False, is_async=True)
        return warpgroup_mma(q.slice(FIRST, REST, 1), back.permute((1, 0)), s, is_async=True)


@gluon.constexpr_function
def _first_columns(dim):
    """Greatest power of two up to `dim`, and at least the 16 columns of a matrix instruction."""
    return max(16, 1 << (dim.bit_length() - 1))


@gluon.jit
def _step(q_smem, p, alpha, acc, m, total, n, lo, stage, phase, k_ring, v_ring, at, seen_from, length, qk_scale,
          D: gl.constexpr, BLOCK_V: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
          MASKED: gl.constexpr, SOFT_CAP: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Compute scores and weights of the block at n, whose K has arrived, and add the preceding block to the output.
    p: weights of the preceding block, at `stage`. alpha: factor by which that block rescales the output so far."""
    k_smem, k_full, k_empty = k_ring
    v_smem, v_boxes, v_full, v_empty = v_ring
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    v_stage, v_phase = stage, phase
    stage, phase = next_place(stage, phase, STAGES)
    scores = _scores(q_smem, WHICH, k_smem, stage, S, D, BLOCK_N)
    # The wait also ends a reordering region, so the following instructions overlap with the score matmul.
    mbarrier.wait(v_full.index(v_stage), v_phase)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
    values = _unpack(p, v_smem.dtype, gl.DotOperandLayout(0, OUT, 2))
    acc = warpgroup_mma(values, v_smem.index(v_stage), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(stage))
    # Otherwise the release would be scheduled after the exponentials, which would delay the next K.
    _boundary(n)
    weights, alpha, m, total = _weigh(s, m, total, n, at, qk_scale, WINDOW, MASKED, SOFT_CAP, S)
    # Wait for the next block's K here to end a reordering region. Within one region, the assembler would move the
    # exponentials after the wait below, and nothing would overlap with the matmul.
    next_stage, next_phase = next_place(stage, phase, STAGES)
    mbarrier.wait(k_full.index(next_stage), next_phase, pred=n > lo)
    acc = warpgroup_mma_wait(0, deps=[acc])
    p = _pack(weights, v_smem.dtype)
    mbarrier.arrive(v_empty.index(v_stage))
    if MASKED:
        _clear(v_boxes, v_full, stage, phase, n, seen_from, length, BLOCK_V, BLOCK_N)
    return p, alpha, acc, m, total, stage, phase


@gluon.jit
def _consume(q_ring, k_ring, v_ring, work, H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, V: gl.constexpr,
             BLOCK_V: gl.constexpr, OUT_HEADS: gl.constexpr, PACK: gl.constexpr, WINDOW: gl.constexpr,
             BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_SCALES: gl.constexpr, SOFT_CAP: gl.constexpr,
             WHICH: gl.constexpr):  # fmt: skip
    """Consumer warp group for rows [64 * WHICH, 64 * WHICH + 64) of each tile."""
    out_ptr, part_ptr, lse_ptr, count_ptr, items_ptr, works, scale, k_scale, v_scale, sinks_ptr = work
    q_smem, q_full, q_empty = q_ring
    k_smem, k_full, k_empty = k_ring
    v_smem, v_boxes, v_full, v_empty = v_ring
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_V, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    TILES: gl.constexpr = (H // K + PACK - 1) // PACK
    dtype: gl.constexpr = v_smem.dtype
    # The first query of this warp group.
    mine: gl.constexpr = WHICH * ROWS // PACK
    query = mine + gl.arange(0, ROWS, gl.SliceLayout(1, S)) // PACK

    # `stage` is the place of the last block whose score matmul was issued. The ring starts at 0.
    stage, phase, q_phase, odd = STAGES - 1, 1, 0, 0
    item = next_item(items_ptr, 0, odd, works, K * TILES)
    for base in range(0, works, gl.num_programs(0)):
        odd = odd ^ 1
        following = next_item(items_ptr, base + gl.num_programs(0), odd, works, K * TILES)
        index, unit, row, first, count, first_at, seen_from, lo, hi, part, length = item
        at = first_at + query
        k_factor = k_scale
        v_factor = v_scale
        if HEAD_SCALES:
            k_factor = gl.load(k_scale + unit // TILES)
            v_factor = gl.load(v_scale + unit // TILES)
        qk_scale = scale * LOG2_E * k_factor

        acc = gl.zeros([ROWS, BLOCK_V], gl.float32, OUT)
        total = gl.zeros([ROWS, 8], gl.float32, _eighth_layout(S))
        m = gl.full([ROWS], LOW, gl.float32, gl.SliceLayout(1, S))
        if hi > lo:
            # Every query of this warp group sees all keys of the blocks from whole_lo to whole_hi.
            last = lo + (hi - lo - 1) // BLOCK_N * BLOCK_N
            whole_hi = (first_at + mine + 1) // BLOCK_N * BLOCK_N
            whole_hi = gl.maximum(gl.minimum(whole_hi, last), lo)
            whole_lo = lo
            if WINDOW:
                end = first_at + gl.minimum(count, mine + ROWS // PACK)
                whole_lo = gl.maximum(end - WINDOW + BLOCK_N - 1, 0) // BLOCK_N * BLOCK_N
                whole_lo = gl.maximum(gl.minimum(whole_lo, whole_hi), lo)

            mbarrier.wait(q_full.index(WHICH), q_phase)
            q_phase = q_phase ^ 1
            stage, phase = next_place(stage, phase, STAGES)
            mbarrier.wait(k_full.index(stage), phase)
            scores = _scores(q_smem, WHICH, k_smem, stage, S, D, BLOCK_N)
            s = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage))
            weights, alpha, m, total = _weigh(s, m, total, last, at, qk_scale, WINDOW, True, SOFT_CAP, S)
            p = _pack(weights, dtype)
            next_stage, next_phase = next_place(stage, phase, STAGES)
            mbarrier.wait(k_full.index(next_stage), next_phase, pred=last > lo)
            _clear(v_boxes, v_full, stage, phase, last, seen_from, length, BLOCK_V, BLOCK_N)

            for n in range(last - BLOCK_N, whole_hi - 1, -BLOCK_N):
                p, alpha, acc, m, total, stage, phase = _step(
                    q_smem, p, alpha, acc, m, total, n, lo, stage, phase, k_ring, v_ring, at, seen_from, length,
                    qk_scale, D, BLOCK_V, WINDOW, BLOCK_N, STAGES, True, SOFT_CAP, WHICH,
                )  # fmt: skip
            for n in range(whole_hi - BLOCK_N, whole_lo - 1, -BLOCK_N):
                p, alpha, acc, m, total, stage, phase = _step(
                    q_smem, p, alpha, acc, m, total, n, lo, stage, phase, k_ring, v_ring, at, seen_from, length,
                    qk_scale, D, BLOCK_V, WINDOW, BLOCK_N, STAGES, False, SOFT_CAP, WHICH,
                )  # fmt: skip
            if WINDOW:
                for n in range(whole_lo - BLOCK_N, lo - 1, -BLOCK_N):
                    p, alpha, acc, m, total, stage, phase = _step(
                        q_smem, p, alpha, acc, m, total, n, lo, stage, phase, k_ring, v_ring, at, seen_from, length,
                        qk_scale, D, BLOCK_V, WINDOW, BLOCK_N, STAGES, True, SOFT_CAP, WHICH,
                    )  # fmt: skip
            # All score matmuls of this item are done, so the next item's queries may be fetched.
            mbarrier.arrive(q_empty.index(WHICH))
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma(_unpack(p, dtype, P), v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(stage))

        if count > mine:
            finish(
                acc, m, total, index, unit, first, count, part, v_factor, sinks_ptr, out_ptr, part_ptr, lse_ptr,
                count_ptr, items_ptr, H, K, V, BLOCK_V, OUT_HEADS, PACK, OUT, WHICH,
            )  # fmt: skip
        item = following


@gluon.jit(do_not_specialize=["works", "table_stride"])
def attend_prompts(
    q_source,
    k_source,
    v_source,
    shared_source,
    out_ptr,
    part_ptr,
    lse_ptr,
    count_ptr,
    items_ptr,
    works,
    table_ptr,
    table_stride,
    scale,
    k_scale,
    v_scale,
    sinks_ptr,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    OUT_HEADS: gl.constexpr,
    PACK: gl.constexpr,
    WINDOW: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    HEAD_SCALES: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    PDL: gl.constexpr,
):
    """Programs process the `works` pairs of an item and a unit in rounds (next_item), or one each if there are as many
    programs as pairs. Tensor maps: q_source [T, H, D], k_source [slots, K, D], v_source [slots, K, V].
    shared_source [slots, 1, columns]: the columns of keys from BLOCK_D on, or None. The output is [T, OUT_HEADS, V],
    from the first head on."""
    if PDL:
        gdc_launch_dependents()
    dtype: gl.constexpr = k_source.dtype
    K_BOXES: gl.constexpr = STAGES * (BLOCK_N // BOX) * (BLOCK_D // BOX)
    V_BOXES: gl.constexpr = STAGES * (BLOCK_N // BOX) * (BLOCK_V // BOX)
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_boxes = gl.allocate_shared_memory(dtype, [GROUPS * (BLOCK_D // BOX), ROWS // PACK, PACK, BOX], q_source.layout)
    k_boxes = gl.allocate_shared_memory(dtype, [K_BOXES, BOX, 1, BOX], k_source.layout)
    v_boxes = gl.allocate_shared_memory(dtype, [V_BOXES, BOX, 1, BOX], v_source.layout)
    q_smem = q_boxes._reinterpret(dtype, [GROUPS, ROWS, BLOCK_D], MATRIX)
    k_smem = k_boxes._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_D], MATRIX)
    v_smem = v_boxes._reinterpret(dtype, [STAGES, BLOCK_N, BLOCK_V], MATRIX)
    v_flat = v_boxes._reinterpret(dtype, [V_BOXES, BOX, BOX], MATRIX)
    q_shared_boxes, q_shared, k_shared_boxes, k_shared = None, None, None, None
    if shared_source is not None:
        q_shared_boxes = gl.allocate_shared_memory(dtype, [GROUPS, ROWS // PACK, PACK, BOX], q_source.layout)
        q_shared = q_shared_boxes._reinterpret(dtype, [GROUPS, ROWS, BOX], MATRIX)
        k_shared_boxes = gl.allocate_shared_memory(dtype, [STAGES * BLOCK_N // BOX, BOX, 1, BOX], k_source.layout)
        k_shared = k_shared_boxes._reinterpret(dtype, [STAGES, BLOCK_N, BOX], MATRIX)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    barrier()
    # The partitions start after this wait, so all of them see what earlier kernels wrote.
    if PDL:
        gdc_wait()
    q_ring = ((q_smem, q_shared), q_full, q_empty)
    k_ring = ((k_smem, k_shared), k_full, k_empty)
    v_ring = (v_smem, v_flat, v_full, v_empty)
    work = (out_ptr, part_ptr, lse_ptr, count_ptr, items_ptr, works, scale, k_scale, v_scale, sinks_ptr)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    q_ring, k_ring, v_ring, work, H, K, D, V, BLOCK_V, OUT_HEADS, PACK, WINDOW, BLOCK_N, STAGES,
                    HEAD_SCALES, SOFT_CAP, 0,
                ),
            ),
            (
                _consume,
                (
                    q_ring, k_ring, v_ring, work, H, K, D, V, BLOCK_V, OUT_HEADS, PACK, WINDOW, BLOCK_N, STAGES,
                    HEAD_SCALES, SOFT_CAP, 1,
                ),
            ),
            (
                produce,
                (
                    (q_source, k_source, v_source, shared_source), (q_boxes, q_full, q_empty),
                    (k_boxes, k_full, k_empty), (v_boxes, v_full, v_empty), (q_shared_boxes, k_shared_boxes), items_ptr,
                    works, table_ptr, table_stride, H, K, BLOCK_D, BLOCK_V, PACK, PAGE, BLOCK_N, STAGES,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
