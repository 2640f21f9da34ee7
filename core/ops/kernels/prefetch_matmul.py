"""x @ weight^T for few rows on Hopper, with the weight prefetched before the preceding kernel has ended.

With tensor parallelism a matmul follows an all-reduce, which leaves device memory idle while it waits. So each program
first fetches as much of its weight as its SM's shared memory holds (26 MB over all SMs) and prefetches some more into
the L2 cache. Only then does it wait for the preceding kernel and fetch its input. Weight and input each have a ring of
blocks, filled through tensor maps; one thread issues the copies and all warps multiply.

Tiles, sums of split tiles and the order of additions are as in matmul.py.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.kernels.gluon import LINE, advance, barrier, block_scales, scaled_sum, tensor_map
from dovetail.core.ops.kernels.launch import dependent
from dovetail.core.ops.padding import readable_rows
from dovetail.core.ops.tiles import MatmulTile


@gluon.jit
def _expect(full, place, source, BOXES: gl.constexpr, wanted):
    mbarrier.expect(full.index(place), BOXES * source.block_type.nbytes, pred=wanted)


@gluon.jit
def _fetch(source, ring, full, place, row, block, BOXES: gl.constexpr, wanted):
    """Start the copy of a block to a place of a ring whose barrier expects it."""
    WIDE: gl.constexpr = source.block_type.shape[1]
    for box in gl.static_range(BOXES):
        at = [row, (block * BOXES + box) * WIDE]
        tma.async_copy_global_to_shared(source, at, full.index(place), ring.index(place * BOXES + box), pred=wanted)


@gluon.jit
def _cycles():
    return gl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _prefetch_l2(weight_ptr, row_o, block, outputs, inputs, BLOCK_O: gl.constexpr, BLOCK_I: gl.constexpr):
    """Prefetch a weight block into the L2 cache."""
    THREADS: gl.constexpr = 32 * gl.num_warps()
    thread = gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    # Each thread prefetches a part of one row.
    SIZE: gl.constexpr = BLOCK_I * BLOCK_O // THREADS
    BYTES: gl.constexpr = SIZE * weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    row = row_o + thread % BLOCK_O
    column = block * BLOCK_I + thread // BLOCK_O * SIZE
    inside = (row < outputs) & (column + SIZE <= inputs)
    gl.inline_asm_elementwise(
        "{.reg .pred ok; setp.ne.b32 ok, $2, 0; @ok cp.async.bulk.prefetch.L2.global [$1], $3; mov.u32 $0, 0;}",
        "=r,l,r,r",
        [
            weight_ptr + row.to(gl.int64) * inputs + column,
            inside.to(gl.int32),
            gl.full([THREADS], BYTES, gl.int32, thread.type.layout),
        ],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _multiply(weight, x, place, x_place, acc, scales, BOXES: gl.constexpr):
    """Return acc + weight @ x^T of a block, after the tensor core has finished it. `scales`: of each box; () = none."""
    if weight.dtype.primitive_bitwidth > 8:
        for box in gl.static_range(BOXES):
            x_box = x.index(x_place * BOXES + box).permute((1, 0))
            acc = warpgroup_mma(weight.index(place * BOXES + box), x_box, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
    else:
        # Issue the products of all boxes before adding the first one's sums.
        sums = ()
        for box in gl.static_range(BOXES):
            x_box = x.index(x_place * BOXES + box).permute((1, 0))
            nothing = gl.zeros_like(acc)
            sums = sums + (  # type: ignore[assignment]
                warpgroup_mma(weight.index(place * BOXES + box), x_box, nothing, use_acc=False, is_async=True),
            )
        for box in gl.static_range(BOXES):
            acc = scaled_sum(acc, warpgroup_mma_wait(BOXES - 1 - box, deps=[sums[box]]), scales, box)
    return acc


@gluon.jit
def _write(acc, row_o, row_t, epilogue, tokens, outputs, BLOCK_T: gl.constexpr, BLOCK_O: gl.constexpr):
    """Scale acc_OT, add the bias, round once and store."""
    x_scale_ptr, x_scale_st, weight_scale_ptr, weight_scale_so, bias_ptr, out_ptr = epilogue
    o = row_o + gl.arange(0, BLOCK_O, gl.SliceLayout(1, acc.type.layout))
    t = row_t + gl.arange(0, BLOCK_T, gl.SliceLayout(0, acc.type.layout))
    if x_scale_ptr is not None:
        acc = acc * gl.load(x_scale_ptr + t * x_scale_st, mask=t < tokens, other=0.0)[None, :]
    if weight_scale_ptr is not None:
        acc = acc * gl.load(weight_scale_ptr + o * weight_scale_so, mask=o < outputs, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + o, mask=o < outputs, other=0.0).to(gl.float32)[:, None]
    # Each thread stores 16 bytes along the outputs.
    THREADS: gl.constexpr = BLOCK_O // 8
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [THREADS, 32 // THREADS], [1, gl.num_warps()], [0, 1])
    values = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), WIDE)
    to_o = row_o + gl.arange(0, BLOCK_O, gl.SliceLayout(1, WIDE))
    to_t = row_t + gl.arange(0, BLOCK_T, gl.SliceLayout(0, WIDE))
    at = out_ptr + to_t.to(gl.int64)[None, :] * outputs + to_o[:, None]
    gl.store(at, values, mask=(to_t < tokens)[None, :] & (to_o < outputs)[:, None])


@gluon.jit(
    do_not_specialize=[
        "tokens",
        "inputs",
        "x_scale_st",
        "weight_scale_so",
        "scale_columns",
        "t_tiles",
        "blocks",
        "split",
        "prefetch_l2",
        "prefetch_cycles",
    ]
)
def matmul_prefetching(
    x_source,
    weight_source,
    weight_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    block_scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    tokens,
    outputs,
    inputs,
    x_scale_st,
    weight_scale_so,
    scale_columns,
    t_tiles,
    blocks,
    split,
    prefetch_l2,
    prefetch_cycles,
    BLOCK_T: gl.constexpr,
    BLOCK_O: gl.constexpr,
    BOXES: gl.constexpr,
    X_PLACES: gl.constexpr,
    PLACES: gl.constexpr,
    SCALE_O: gl.constexpr,
    PDL: gl.constexpr,
):
    """`split` programs sum each tile. A block has BOXES adjacent boxes. PLACES, X_PLACES: blocks in the ring of the
    weight and of the input. SCALE_O, scale_columns: as in specialized_matmul."""
    dtype: gl.constexpr = weight_source.dtype
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, BLOCK_T, 256 // dtype.primitive_bitwidth]
    )
    WIDE: gl.constexpr = weight_source.block_type.shape[1]
    weight = gl.allocate_shared_memory(dtype, [PLACES * BOXES, BLOCK_O, WIDE], weight_source.layout)
    x = gl.allocate_shared_memory(dtype, [X_PLACES * BOXES, BLOCK_T, WIDE], x_source.layout)
    weight_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [X_PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(weight_full.index(i), count=1)
    for i in gl.static_range(X_PLACES):
        mbarrier.init(x_full.index(i), count=1)
    fence_async_shared()
    barrier()
    tile = gl.program_id(0) // split
    part = gl.program_id(0) % split
    row_o = tile // t_tiles * BLOCK_O
    row_t = tile % t_tiles * BLOCK_T
    lo = part * blocks // split
    hi = (part + 1) * blocks // split
    for i in gl.static_range(PLACES):
        _expect(weight_full, i, weight_source, BOXES, lo + i < hi)
    for i in gl.static_range(X_PLACES):
        _expect(x_full, i, x_source, BOXES, lo + i < hi)
    began = _cycles()
    for i in gl.static_range(PLACES):
        while (lo + i < hi) & (_cycles() - began < i * prefetch_cycles):
            pass
        _fetch(weight_source, weight, weight_full, i, row_o, lo + i, BOXES, lo + i < hi)
    if PDL:
        for block in range(lo + PLACES, gl.minimum(lo + PLACES + prefetch_l2, hi)):
            _prefetch_l2(weight_ptr, row_o, block, outputs, inputs, BLOCK_O, BOXES * WIDE)
        gdc_wait()
    for i in gl.static_range(X_PLACES):
        _fetch(x_source, x, x_full, i, row_t, lo + i, BOXES, lo + i < hi)
    acc = gl.zeros([BLOCK_O, BLOCK_T], gl.float32, ACC)
    place, phase, x_place, x_phase = 0, 0, 0, 0
    scales = ()
    if SCALE_O > 0:
        scale_row = block_scale_ptr + row_o // SCALE_O * scale_columns
        scales = block_scales(scale_row, scale_columns, lo, hi, BOXES)
    for block in range(lo, hi):
        next_scales = ()
        if SCALE_O > 0:
            # Those of the next block, whose latency overlaps with this one.
            next_scales = block_scales(scale_row, scale_columns, block + 1, hi, BOXES)
        mbarrier.wait(weight_full.index(place), phase)
        mbarrier.wait(x_full.index(x_place), x_phase)
        acc = _multiply(weight, x, place, x_place, acc, scales, BOXES)
        scales = next_scales
        # Wait until all warps have read both blocks.
        barrier()
        _expect(weight_full, place, weight_source, BOXES, block + PLACES < hi)
        _expect(x_full, x_place, x_source, BOXES, block + X_PLACES < hi)
        _fetch(weight_source, weight, weight_full, place, row_o, block + PLACES, BOXES, block + PLACES < hi)
        _fetch(x_source, x, x_full, x_place, row_t, block + X_PLACES, BOXES, block + X_PLACES < hi)
        place, phase = advance(place, phase, PLACES)
        x_place, x_phase = advance(x_place, x_phase, X_PLACES)
    # The weight has been read, so the next kernel may launch while the sums are reduced and written.
    if PDL:
        gdc_launch_dependents()
    epilogue = (x_scale_ptr, x_scale_st, weight_scale_ptr, weight_scale_so, bias_ptr, out_ptr)
    if part_ptr is None:
        _write(acc, row_o, row_t, epilogue, tokens, outputs, BLOCK_T, BLOCK_O)
    else:
        o = gl.arange(0, BLOCK_O, gl.SliceLayout(1, ACC))
        t = gl.arange(0, BLOCK_T, gl.SliceLayout(0, ACC))
        at = part_ptr + o[:, None] * BLOCK_T + t[None, :]
        gl.store(at + gl.program_id(0) * (BLOCK_O * BLOCK_T), acc)
        barrier()
        arrived = gl.atomic_add(count_ptr + tile, 1, sem="acq_rel")
        barrier()
        if arrived == split - 1:
            gl.store(count_ptr + tile, 0)
            total = gl.zeros([BLOCK_O, BLOCK_T], gl.float32, ACC)
            # Load several sums at once: one at a time, each would cost a round trip to memory.
            AT_ONCE: gl.constexpr = max(1, min(6, 64 * 32 * gl.num_warps() // (BLOCK_O * BLOCK_T)))
            for first in range(0, split, AT_ONCE):
                for k in gl.static_range(AT_ONCE):
                    there = first + k < split
                    from_ptr = at + (tile * split + first + k) * (BLOCK_O * BLOCK_T)
                    total += gl.load(from_ptr, mask=there, other=0.0, cache_modifier=".cg")
            _write(total, row_o, row_t, epilogue, tokens, outputs, BLOCK_T, BLOCK_O)


def launch_matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    out_TO: torch.Tensor,
    tile: MatmulTile,
    parts: torch.Tensor | None,
    counts: torch.Tensor | None,
    scales: tuple[torch.Tensor | None, int, torch.Tensor | None, int, torch.Tensor | None],
    bias_O: torch.Tensor | None,
    scale_outputs: int,
) -> None:
    """Launch the kernel. Arguments as in specialized_matmul."""
    tokens, inputs = x_TI.shape
    outputs = len(weight_OI)
    t_tiles, tiles, blocks, programs = tile.launch(tokens, outputs, inputs)
    x_scale, x_scale_st, weight_scale, weight_scale_so, block_scale = scales
    matmul_prefetching[(programs,)](
        tensor_map(x_TI, tile.tokens, readable_rows(x_TI, tile.tokens)),
        tensor_map(weight_OI, tile.outputs, outputs),
        weight_OI,
        x_scale,
        weight_scale,
        block_scale,
        bias_O,
        out_TO,
        parts,
        counts,
        tokens,
        outputs,
        inputs,
        x_scale_st,
        weight_scale_so,
        ceil_div(inputs, LINE.value),
        t_tiles,
        blocks,
        programs // tiles,
        tile.prefetch_l2,
        tile.prefetch_cycles,
        BLOCK_T=tile.tokens,
        BLOCK_O=tile.outputs,
        BOXES=tile.inputs * x_TI.element_size() // LINE.value,
        X_PLACES=tile.stages,
        PLACES=tile.prefetch,
        SCALE_O=scale_outputs,
        num_warps=tile.warps,
        **dependent(x_TI),
    )
