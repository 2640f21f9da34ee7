"""x @ weight^T for 65 to some hundred rows on Hopper: a producer warp fetches blocks, warp groups multiply them.

With so many rows, a matmul is bound by reading the weight and by the tensor cores at about the same time, so neither
may wait for the other. A producer warp keeps a ring of blocks in shared memory filled, across tiles. Each consumer warp
group has 64 rows of x and multiplies them with the whole weight block, so every block is fetched once for all rows of a
tile. The weight's first blocks are fetched before the preceding kernel has ended.

Each program computes whole tiles, or several programs sum one tile (split-K). The sums of a split tile are added in the
order of programs, so results do not depend on timing.

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
from dovetail.core.ops.kernels.gluon import (
    LINE,
    PRODUCER_REGISTERS,
    advance,
    barrier,
    block_scales,
    consumer_registers,
    scaled_sum,
    tensor_map,
)
from dovetail.core.ops.kernels.launch import dependent
from dovetail.core.ops.padding import readable_rows
from dovetail.core.ops.tiles import MatmulTile

ROWS = gl.constexpr(64)
"""Rows of a warp group, as many as one matrix instruction takes."""
OTHER_REGISTERS = gl.constexpr(32)
"""Registers of a thread that hold no sums."""
PART = gl.constexpr(128)
"""Outputs of an instruction where one of 256 is none (int8), or threads lack registers for its sums beside the total
(EXACT)."""


@gluon.jit
def _before(place, PLACES: gl.constexpr):
    return gl.where(place == 0, PLACES - 1, place - 1)


@gluon.jit
def _fetch_weight(source, ring, full, place, o_tile, block, BOXES: gl.constexpr, wanted):
    """Start the copy of a weight block to a place of the ring."""
    WIDE: gl.constexpr = source.block_type.shape[1]
    for box in gl.static_range(BOXES):
        at = [o_tile * source.block_type.shape[0], (block * BOXES + box) * WIDE]
        tma.async_copy_global_to_shared(source, at, full.index(place), ring.index(place * BOXES + box), pred=wanted)


@gluon.jit
def _fetch_x(source, ring, full, place, t_tile, block, BOXES: gl.constexpr, GROUPS: gl.constexpr, wanted):
    """Start the copy of an input block, one box of 64 rows for each warp group."""
    WIDE: gl.constexpr = source.block_type.shape[1]
    for box in gl.static_range(BOXES):
        for group in gl.static_range(GROUPS):
            at = [(t_tile * GROUPS + group) * ROWS, (block * BOXES + box) * WIDE]
            to = ring.index((place * BOXES + box) * GROUPS + group)
            tma.async_copy_global_to_shared(source, at, full.index(place), to, pred=wanted)


@gluon.jit
def _fill(x_source, weight_source, rings, work, BOXES: gl.constexpr, GROUPS: gl.constexpr, PLACES: gl.constexpr,
          PDL: gl.constexpr):  # fmt: skip
    """Start the copies of the ring's first round: those of the weight before the preceding kernel has ended."""
    x, weight, full, empty = rings
    tile, tiles, step, lo, hi, t_tiles = work
    BYTES: gl.constexpr = BOXES * (weight_source.block_type.nbytes + GROUPS * x_source.block_type.nbytes)
    for i in gl.static_range(PLACES):
        mbarrier.expect(full.index(i), BYTES, pred=lo + i < hi)
        _fetch_weight(weight_source, weight, full, i, tile // t_tiles, lo + i, BOXES, lo + i < hi)
    if PDL:
        gdc_wait()
    for i in gl.static_range(PLACES):
        _fetch_x(x_source, x, full, i, tile % t_tiles, lo + i, BOXES, GROUPS, lo + i < hi)


@gluon.jit
def _produce(x_source, weight_source, rings, work, BOXES: gl.constexpr, GROUPS: gl.constexpr, PLACES: gl.constexpr,
             PDL: gl.constexpr):  # fmt: skip
    """Fetch the blocks that follow the first round as consumers release places."""
    x, weight, full, empty = rings
    first_tile, tiles, step, lo, hi, t_tiles = work
    BYTES: gl.constexpr = BOXES * (weight_source.block_type.nbytes + GROUPS * x_source.block_type.nbytes)
    # A tile of fewer blocks than places leaves some of them for the next tile.
    place, phase = gl.minimum(PLACES, hi - lo) % PLACES, gl.where(hi - lo < PLACES, 1, 0)
    begin = gl.minimum(lo + PLACES, hi)
    for tile in range(first_tile, tiles, step):
        for block in range(begin, hi):
            mbarrier.wait(empty.index(place), phase)
            mbarrier.expect(full.index(place), BYTES)
            _fetch_weight(weight_source, weight, full, place, tile // t_tiles, block, BOXES, True)
            _fetch_x(x_source, x, full, place, tile % t_tiles, block, BOXES, GROUPS, True)
            place, phase = advance(place, phase, PLACES)
        begin = lo
    # The weight has been requested, so the next kernel may launch while the sums are reduced and written.
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _write(acc, row_t, row_o, epilogue, tokens, outputs, BLOCK_O: gl.constexpr):
    """Scale acc_TO, add the bias, round once and store."""
    x_scale_ptr, x_scale_st, weight_scale_ptr, weight_scale_so, bias_ptr, out_ptr = epilogue
    acc = acc.to(gl.float32)
    t = row_t + gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    o = row_o + gl.arange(0, BLOCK_O, gl.SliceLayout(0, acc.type.layout))
    if x_scale_ptr is not None:
        acc = acc * gl.load(x_scale_ptr + t * x_scale_st, mask=t < tokens, other=0.0)[:, None]
    if weight_scale_ptr is not None:
        acc = acc * gl.load(weight_scale_ptr + o * weight_scale_so, mask=o < outputs, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + o, mask=o < outputs, other=0.0).to(gl.float32)[None, :]
    # Each warp stores the 16 rows of its matrix instructions, 16 bytes per thread.
    WIDE: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    values = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), WIDE)
    to_t = row_t + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    to_o = row_o + gl.arange(0, BLOCK_O, gl.SliceLayout(0, WIDE))
    at = out_ptr + to_t.to(gl.int64)[:, None] * outputs + to_o[None, :]
    gl.store(at, values, mask=(to_t < tokens)[:, None] & (to_o < outputs)[None, :])


@gluon.jit
def _reduce_split(acc, tile, split, part_ptr, count_ptr, BLOCK_O: gl.constexpr, GROUPS: gl.constexpr,
                  WHICH: gl.constexpr):  # fmt: skip
    """Store this program's sum of a split tile. Return the sum of all programs, and whether this one arrived last."""
    ACC: gl.constexpr = acc.type.layout
    t = gl.arange(0, ROWS, gl.SliceLayout(1, ACC))
    o = gl.arange(0, BLOCK_O, gl.SliceLayout(0, ACC))
    SIZE: gl.constexpr = ROWS * BLOCK_O
    at = part_ptr + WHICH * SIZE + t[:, None] * BLOCK_O + o[None, :]
    gl.store(at + gl.program_id(0) * (GROUPS * SIZE), acc)
    counter = count_ptr + tile * GROUPS + WHICH
    barrier()
    arrived = gl.atomic_add(counter, 1, sem="acq_rel")
    barrier()
    is_last = arrived == split - 1
    total = gl.zeros([ROWS, BLOCK_O], acc.dtype, ACC)
    if is_last:
        gl.store(counter, 0)
        for part in range(split):
            total += gl.load(at + (tile * split + part) * (GROUPS * SIZE), cache_modifier=".cg")
    return total, is_last


@gluon.jit
def _add_boxes(acc, x, weight, place, part: gl.constexpr, scales, BLOCK_O: gl.constexpr, BOXES: gl.constexpr,
               GROUPS: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Return acc and the products of a block's boxes, summed in float32 box by box, for part number `part` of the
    outputs. `scales`: of each box; () = none. A box is multiplied while the sums of the one before are added, if both
    fit into registers."""
    WIDE: gl.constexpr = acc.type.shape[1]
    ROOM: gl.constexpr = (BOXES * WIDE + BLOCK_O) // 2 <= consumer_registers(GROUPS, 1) - OTHER_REGISTERS
    sums = ()
    for box in gl.static_range(BOXES):
        rows = x.index((place * BOXES + box) * GROUPS + WHICH)
        columns = weight.index(place * BOXES + box).slice(part * WIDE, WIDE, 0).permute((1, 0))
        sums += (warpgroup_mma(rows, columns, gl.zeros_like(acc), use_acc=False, is_async=True),)  # type: ignore[assignment]
        if not ROOM:
            acc = scaled_sum(acc, warpgroup_mma_wait(0, deps=[sums[box]]), scales, box)
    if ROOM:
        for box in gl.static_range(BOXES):
            acc = scaled_sum(acc, warpgroup_mma_wait(BOXES - 1 - box, deps=[sums[box]]), scales, box)
    return acc


@gluon.jit
def _consume(rings, work, split, part_ptr, count_ptr, epilogue, block_scale, tokens, outputs, BLOCK_O: gl.constexpr,
             BOXES: gl.constexpr, GROUPS: gl.constexpr, PLACES: gl.constexpr, EXACT: gl.constexpr,
             SCALE_O: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Consumer warp group for rows [64 * WHICH, 64 * WHICH + 64) of each tile."""
    x, weight, full, empty = rings
    first_tile, tiles, step, lo, hi, t_tiles = work
    WIDE: gl.constexpr = PART if BLOCK_O > PART and part_ptr is None and (EXACT or x.dtype == gl.int8) else BLOCK_O
    PARTS: gl.constexpr = BLOCK_O // WIDE
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 256 // x.dtype.primitive_bitwidth])
    SUM: gl.constexpr = gl.int32 if x.dtype == gl.int8 else gl.float32
    place, phase = 0, 0
    for tile in range(first_tile, tiles, step):
        acc = ()
        for _ in gl.static_range(PARTS):
            acc += (gl.zeros([ROWS, WIDE], SUM, ACC),)  # type: ignore[assignment]
        row_o = tile // t_tiles * BLOCK_O
        scales = ()
        if SCALE_O > 0:
            scales = _scales_of_parts(block_scale, row_o, outputs, lo, hi, WIDE, PARTS, SCALE_O, BOXES)
        for block in range(lo, hi):
            mbarrier.wait(full.index(place), phase)
            total = ()
            if EXACT:
                next_scales = ()
                if SCALE_O > 0:
                    # Those of the next block, whose latency overlaps with this one.
                    next_scales = _scales_of_parts(
                        block_scale, row_o, outputs, block + 1, hi, WIDE, PARTS, SCALE_O, BOXES
                    )
                for part in gl.static_range(PARTS):
                    of_part = scales[part] if SCALE_O > 0 else ()
                    total += (_add_boxes(acc[part], x, weight, place, part, of_part, BLOCK_O, BOXES, GROUPS, WHICH),)  # type: ignore[assignment]
                mbarrier.arrive(empty.index(place))
                scales = next_scales
            else:
                for part in gl.static_range(PARTS):
                    sums = acc[part]  # type: ignore[var-annotated]
                    for box in gl.static_range(BOXES):
                        rows = x.index((place * BOXES + box) * GROUPS + WHICH)
                        columns = weight.index(place * BOXES + box).slice(part * WIDE, WIDE, 0).permute((1, 0))
                        sums = warpgroup_mma(rows, columns, sums, is_async=True)
                    total += (sums,)  # type: ignore[assignment]
                # The preceding block has been multiplied; this one's instructions stay in flight.
                total = _waited(total, BOXES * PARTS)
                mbarrier.arrive(empty.index(_before(place, PLACES)), pred=block > lo)
            acc = total
            place, phase = advance(place, phase, PLACES)
        if not EXACT:
            acc = _waited(acc, 0)
            mbarrier.arrive(empty.index(_before(place, PLACES)))
        row_t = (tile % t_tiles * GROUPS + WHICH) * ROWS
        if part_ptr is None:
            for part in gl.static_range(PARTS):
                _write(acc[part], row_t, row_o + part * WIDE, epilogue, tokens, outputs, WIDE)
        else:
            total, is_last = _reduce_split(acc[0], tile, split, part_ptr, count_ptr, BLOCK_O, GROUPS, WHICH)  # type: ignore[misc]
            if is_last:
                _write(total, row_t, row_o, epilogue, tokens, outputs, BLOCK_O)


@gluon.jit
def _scales_of_parts(block_scale, row_o, outputs, block, hi, WIDE: gl.constexpr, PARTS: gl.constexpr,
                     SCALE_O: gl.constexpr, BOXES: gl.constexpr):  # fmt: skip
    """Return the scales of a block's boxes for each part of a tile's outputs. Those of blocks from `hi` on are 0."""
    scale_ptr, columns = block_scale
    scales = ()
    for part in gl.static_range(PARTS):
        # The last tile may have fewer outputs than parts.
        row = gl.minimum(row_o + part * WIDE, outputs - 1) // SCALE_O * columns
        scales += (block_scales(scale_ptr + row, columns, block, hi, BOXES),)  # type: ignore[assignment]
    return scales


@gluon.jit
def _waited(sums, LEFT_OVER: gl.constexpr):
    """Wait for matrix instructions, but not for the last LEFT_OVER, and return the sums of all parts."""
    if len(sums) == 1:
        return (warpgroup_mma_wait(LEFT_OVER, deps=[sums[0]]),)
    else:
        return warpgroup_mma_wait(LEFT_OVER, deps=[sums[0], sums[1]])


@gluon.jit(
    do_not_specialize=[
        "tokens",
        "x_scale_st",
        "weight_scale_so",
        "scale_columns",
        "t_tiles",
        "tiles",
        "blocks",
        "split",
    ]
)
def matmul_specialized(
    x_source,
    weight_source,
    x_scale_ptr,
    weight_scale_ptr,
    block_scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    tokens,
    outputs,
    x_scale_st,
    weight_scale_so,
    scale_columns,
    t_tiles,
    tiles,
    blocks,
    split,
    BLOCK_O: gl.constexpr,
    BOXES: gl.constexpr,
    GROUPS: gl.constexpr,
    PLACES: gl.constexpr,
    EXACT: gl.constexpr,
    SCALE_O: gl.constexpr,
    PDL: gl.constexpr,
):
    """`split` programs sum each tile, or a program computes several tiles, as many tiles apart as there are programs.
    A block has BOXES adjacent boxes. GROUPS: consumer warp groups. PLACES: blocks in the ring. EXACT: FP8 products are
    added to float32 sums after each box, before the tensor core's accumulator loses bits. SCALE_O: outputs that share a
    scale with the inputs of a box, a multiple of BLOCK_O, or 0; needs EXACT. scale_columns: scales of a row."""
    dtype: gl.constexpr = weight_source.dtype
    WIDE: gl.constexpr = weight_source.block_type.shape[1]
    weight = gl.allocate_shared_memory(dtype, [PLACES * BOXES, BLOCK_O, WIDE], weight_source.layout)
    x = gl.allocate_shared_memory(dtype, [PLACES * BOXES * GROUPS, ROWS, WIDE], x_source.layout)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    barrier()
    part = gl.program_id(0) % split
    step = gl.num_programs(0) // split
    work = (gl.program_id(0) // split, tiles, step, part * blocks // split, (part + 1) * blocks // split, t_tiles)
    rings = (x, weight, full, empty)
    epilogue = (x_scale_ptr, x_scale_st, weight_scale_ptr, weight_scale_so, bias_ptr, out_ptr)
    block_scale = (block_scale_ptr, scale_columns)
    _fill(x_source, weight_source, rings, work, BOXES, GROUPS, PLACES, PDL)
    # The partitions start after the wait, so all of them see what earlier kernels wrote.
    REGISTERS: gl.constexpr = consumer_registers(GROUPS, 1)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (rings, work, split, part_ptr, count_ptr, epilogue, block_scale, tokens, outputs, BLOCK_O,
                            BOXES, GROUPS, PLACES, EXACT, SCALE_O, 0)),
                (_produce, (x_source, weight_source, rings, work, BOXES, GROUPS, PLACES, PDL)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_consume, (rings, work, split, part_ptr, count_ptr, epilogue, block_scale, tokens, outputs, BLOCK_O,
                            BOXES, GROUPS, PLACES, EXACT, SCALE_O, 0)),
                (_consume, (rings, work, split, part_ptr, count_ptr, epilogue, block_scale, tokens, outputs, BLOCK_O,
                            BOXES, GROUPS, PLACES, EXACT, SCALE_O, 1)),
                (_produce, (x_source, weight_source, rings, work, BOXES, GROUPS, PLACES, PDL)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (rings, work, split, part_ptr, count_ptr, epilogue, block_scale, tokens, outputs, BLOCK_O,
                            BOXES, GROUPS, PLACES, EXACT, SCALE_O, 0)),
                (_consume, (rings, work, split, part_ptr, count_ptr, epilogue, block_scale, tokens, outputs, BLOCK_O,
                            BOXES, GROUPS, PLACES, EXACT, SCALE_O, 1)),
                (_consume, (rings, work, split, part_ptr, count_ptr, epilogue, block_scale, tokens, outputs, BLOCK_O,
                            BOXES, GROUPS, PLACES, EXACT, SCALE_O, 2)),
                (_produce, (x_source, weight_source, rings, work, BOXES, GROUPS, PLACES, PDL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


def launch_matmul(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    out_TO: torch.Tensor,
    tile: MatmulTile,
    parts: torch.Tensor | None,
    counts: torch.Tensor | None,
    scales: tuple[torch.Tensor | None, int, torch.Tensor | None, int, torch.Tensor | None],
    bias_O: torch.Tensor | None,
    exact: bool,
    scale_outputs: int,
) -> None:
    """Launch the kernel. `scales`: those of x and of the weight, each followed by its stride between rows, and those of
    the weight's blocks, of `scale_outputs` outputs and LINE inputs."""
    tokens, inputs = x_TI.shape
    outputs = len(weight_OI)
    t_tiles, tiles, blocks, programs = tile.launch(tokens, outputs, inputs)
    x_scale, x_scale_st, weight_scale, weight_scale_so, block_scale = scales
    matmul_specialized[(programs,)](
        tensor_map(x_TI, ROWS.value, readable_rows(x_TI, tile.tokens)),
        tensor_map(weight_OI, tile.outputs, outputs),
        x_scale,
        weight_scale,
        block_scale,
        bias_O,
        out_TO,
        parts,
        counts,
        tokens,
        outputs,
        x_scale_st,
        weight_scale_so,
        ceil_div(inputs, LINE.value),
        t_tiles,
        tiles,
        blocks,
        min(tile.split, blocks),
        BLOCK_O=tile.outputs,
        BOXES=tile.inputs * x_TI.element_size() // LINE.value,
        GROUPS=tile.tokens // ROWS.value,
        PLACES=tile.stages,
        EXACT=exact,
        SCALE_O=scale_outputs,
        num_warps=4,
        **dependent(x_TI),
    )
