"""Products of routed experts on Hopper: a producer fetches blocks, warp groups multiply them.

The structure is that of specialized_packed.py, for units of several experts (expert_units.py): persistent programs take
units in turn, and the ring of blocks in shared memory stays filled across them. Weights in 16 and 8 bits are multiplied
as they are by rows that the producer gathers (expert_rows.py); packed weights are decoded, and rows of x come from a
copy in sorted order (packed_expert_units.py).

Shapes: P pairs of token and expert, E experts, O outputs, I inputs, W words of a row, S spans of a row.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.activation import Activation
from dovetail.core.interfaces.expert import GatedActivation
from dovetail.core.ops.expert_tiles import GROUPED, ExpertTile
from dovetail.core.ops.kernels.expert_pairs import Sorted
from dovetail.core.ops.kernels.expert_rows import ARRIVALS, ROW_REGISTERS, ROW_WARPS, consume_rows, produce_rows
from dovetail.core.ops.kernels.expert_units import BOX, fill, produce
from dovetail.core.ops.kernels.gluon import (
    LINE,
    PRODUCER_REGISTERS,
    barrier,
    consumer_registers,
    launch_registers,
    tensor_map,
)
from dovetail.core.ops.kernels.launch import dependent
from dovetail.core.ops.kernels.packed_expert_units import X_BOXES, consume_packed
from dovetail.core.ops.matmul import device_facts
from dovetail.core.ops.packed_experts import EACH, SPANS


@gluon.jit
def _consume(rings, work, notes, scale, epilogue, size, BLOCK_T: gl.constexpr, ACTIVE: gl.constexpr,
             GATED: gl.constexpr, LIMITED: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
             PLACES: gl.constexpr, TAIL: gl.constexpr, SCALE_O: gl.constexpr, SCALE_I: gl.constexpr,
             PRECISE: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Consumer warp group for outputs [WIDE * WHICH, WIDE * (WHICH + 1)) of each tile."""
    x, weight, full, empty = rings
    if weight.dtype == gl.int32:
        consume_packed(rings, work, notes, scale, epilogue, size, BLOCK_T, ACTIVE, GATED, LIMITED, GROUP, GROUPS,
                       PLACES, TAIL, WHICH)  # fmt: skip
    else:
        consume_rows(rings, work, notes, scale, epilogue, size, BLOCK_T, ACTIVE, GATED, LIMITED, GROUP, GROUPS, PLACES,
                     SCALE_O, SCALE_I, PRECISE, WHICH)  # fmt: skip


@gluon.jit
def _produce(sources, rings, work, size, inputs, begin, BLOCK_T: gl.constexpr, ACTIVE: gl.constexpr,
             GATED: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, PLACES: gl.constexpr,
             X_BOXES: gl.constexpr, LAST: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    x_source, x_ptr, source, order_ptr = sources
    if x_source is None:
        produce_rows(source, x_ptr, order_ptr, rings, work, size, inputs, begin, BLOCK_T, ACTIVE, GATED, GROUP, GROUPS,
                     PLACES, PDL)  # fmt: skip
    else:
        produce(x_source, source, rings, work, size, begin, GATED, GROUP, GROUPS, PLACES, X_BOXES, LAST,
                PDL)  # fmt: skip


@gluon.jit(do_not_specialize=["tiles", "x_scale_st", "o_tiles", "blocks"])
def experts_specialized(
    x_source,
    x_ptr,
    source,
    scale_ptr,
    groups,
    x_scale_ptr,
    x_scale_st,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    routing_ptr,
    out_ptr,
    tiles,
    o_tiles,
    outputs,
    inputs,
    rows,
    blocks,
    alpha,
    limit,
    offset,
    BLOCK_T: gl.constexpr,
    ACTIVE: gl.constexpr,
    GATED: gl.constexpr,
    LIMITED: gl.constexpr,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    PLACES: gl.constexpr,
    X_BOXES: gl.constexpr,
    TAIL: gl.constexpr,
    SCALE_O: gl.constexpr,
    SCALE_I: gl.constexpr,
    PRECISE: gl.constexpr,
    RESIDENTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """`x_source`: rows of x in sorted order; None = `x_ptr` has them by token, or in sorted order for the second
    product. `scale_ptr`: exponents, scales of blocks of SCALE_O outputs and SCALE_I inputs, `groups` in a row, or with
    SCALE_I 0 scales of outputs; None = the weight has 16 bits.
    `outputs`: channels, of gate and up each if GATED. `rows`: rows of an expert's matrix. `blocks`: those of a unit,
    with X_BOXES boxes of x each. TAIL: inputs of the last block if it has fewer. GROUPS: consumer warp groups, 1 or 2.
    PLACES: blocks in the ring. PRECISE: whether E4M3 products are added to float32 sums after each block, before the
    tensor core's accumulator loses bits."""
    GATHERS: gl.constexpr = x_source is None
    WIDE: gl.constexpr = source.block_type.shape[1]
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weight = gl.allocate_shared_memory(source.dtype, [PLACES * 2 * GROUPS, BOX, WIDE], source.layout)
    if GATHERS:
        x = gl.allocate_shared_memory(source.dtype, [PLACES, BLOCK_T, WIDE], source.layout)
    else:
        X_SHAPE: gl.constexpr = [PLACES * X_BOXES, BLOCK_T, x_source.block_type.shape[1]]
        x = gl.allocate_shared_memory(x_source.dtype, X_SHAPE, x_source.layout)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    pairs = gl.allocate_shared_memory(gl.int32, [GROUPS, BLOCK_T], VECTOR)
    scales = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_T], VECTOR)
    shares = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_T], VECTOR)
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=ARRIVALS if GATHERS else 1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    barrier()
    rings, notes = (x, weight, full, empty), (pairs, scales, shares)
    size = (outputs, rows, outputs if GATED else BOX, blocks)
    LAST: gl.constexpr = X_BOXES if TAIL == 0 else TAIL // x.shape[2]
    # The partitions start after the wait, so all of them see what earlier kernels wrote.
    if GATED and PDL:
        gdc_wait()
    live = gl.load(tiles_ptr + 3 * tiles)
    work = (tiles_ptr, live, o_tiles)
    if GATED:
        begin = o_tiles * 0
    else:
        begin = fill(x_source, source, rings, work, size, GATED, GROUP, GROUPS, PLACES, X_BOXES, LAST, PDL)
    own = (tiles_ptr, live, o_tiles, order_ptr)
    scale = (scale_ptr, groups)
    of_rows = (x_scale_ptr, x_scale_st, routing_ptr)
    epilogue = (of_rows, bias_ptr, out_ptr, (alpha, limit, offset))
    sources = (x_source, x_ptr, source, order_ptr)
    PRODUCER: gl.constexpr = ROW_REGISTERS if GATHERS else PRODUCER_REGISTERS
    WARPS: gl.constexpr = ROW_WARPS if GATHERS else 1
    REGISTERS: gl.constexpr = consumer_registers(GROUPS, RESIDENTS, PRODUCER)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (rings, own, notes, scale, epilogue, size, BLOCK_T, ACTIVE, GATED, LIMITED, GROUP, GROUPS,
                            PLACES, TAIL, SCALE_O, SCALE_I, PRECISE, 0)),
                (_produce, (sources, rings, work, size, inputs, begin, BLOCK_T, ACTIVE, GATED, GROUP, GROUPS, PLACES,
                            X_BOXES, LAST, PDL)),
            ],
            [WARPS],
            [PRODUCER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (rings, own, notes, scale, epilogue, size, BLOCK_T, ACTIVE, GATED, LIMITED, GROUP, GROUPS,
                            PLACES, TAIL, SCALE_O, SCALE_I, PRECISE, 0)),
                (_consume, (rings, own, notes, scale, epilogue, size, BLOCK_T, ACTIVE, GATED, LIMITED, GROUP, GROUPS,
                            PLACES, TAIL, SCALE_O, SCALE_I, PRECISE, 1)),
                (_produce, (sources, rings, work, size, inputs, begin, BLOCK_T, ACTIVE, GATED, GROUP, GROUPS, PLACES,
                            X_BOXES, LAST, PDL)),
            ],
            [4, WARPS],
            [REGISTERS, PRODUCER],
        )  # fmt: skip


def multiply_specialized(
    x: Activation,
    weight_EOI: torch.Tensor,
    scale: torch.Tensor | None,
    block: tuple[int, int],
    bias_EO: torch.Tensor | None,
    pairs: Sorted,
    tile: ExpertTile,
    out: torch.Tensor,
    activation: GatedActivation | None,
    precise: bool = True,
) -> None:
    """Launch the first product, which ends in `activation`, or the second one (None). `weight_EOI`: 16 bits without a
    scale, 8 bits with a `scale` for each output, E4M3 with one for each `block` of outputs and inputs, or words of
    packed codes, with their exponents in `scale`. `precise`: as PRECISE. `x`: rows by token, and in sorted order for
    the second product; for packed codes in sorted order, and at least a tile of rows behind them."""
    experts, rows, columns = weight_EOI.shape
    packed = weight_EOI.dtype is torch.int32
    inputs, outputs = columns * (EACH if packed else 1), out.shape[1]
    wide, boxes = (EACH * SPANS[0], X_BOXES.value) if packed else (LINE.value // weight_EOI.element_size(), 1)
    warp_groups = tile.warps // 4
    o_tiles = ceil_div(outputs, tile.outputs * (1 if activation is not None else 2))
    limit = activation.limit if activation is not None else None
    flat = weight_EOI.view(experts * rows, columns)
    processors = device_facts(out.device)[1]
    experts_specialized[(min(tile.residents * processors, pairs.tiles * o_tiles),)](
        tensor_map(x.values, tile.rows, len(x.values)) if packed else None,
        None if packed else x.values.contiguous(),
        tensor_map(flat, BOX.value, len(flat)),
        scale,
        ceil_div(inputs, block[1]) if block[1] else 0,
        x.scale,
        0 if x.scale is None or x.scale.numel() == 1 else x.scale.stride(0),
        bias_EO,
        pairs.order_P,
        pairs.tiles_M3,
        pairs.routing.weights_TK,
        out,
        pairs.tiles,
        o_tiles,
        outputs,
        inputs,
        rows,
        ceil_div(inputs, wide),
        1.0 if activation is None else activation.alpha,
        0.0 if limit is None else limit,
        0.0 if activation is None else activation.offset,
        BLOCK_T=tile.rows,
        ACTIVE=pairs.routing.experts_TK.shape[1],
        GATED=activation is not None,
        LIMITED=limit is not None,
        GROUP=GROUPED,
        GROUPS=warp_groups,
        PLACES=tile.stages,
        X_BOXES=boxes,
        TAIL=inputs % wide if packed else 0,
        SCALE_O=block[0],
        SCALE_I=block[1],
        PRECISE=precise and weight_EOI.dtype is torch.float8_e4m3fn,
        RESIDENTS=tile.residents,
        num_warps=4,
        maxnreg=launch_registers(warp_groups, tile.residents),
        **dependent(out),
    )
