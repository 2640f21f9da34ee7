"""Products of routed experts on Hopper: a producer warp fetches blocks, warp groups multiply them.

The structure is that of specialized_packed.py, for units of several experts (expert_units.py): persistent programs take
units in turn, and the ring of blocks in shared memory stays filled across them. What consumers do with a block depends
on the weight: packed_expert_units.py decodes it, block_expert_units.py applies scales of blocks, plain_expert_units.py
multiplies 16 bits as they are.

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
from dovetail.core.ops.kernels.block_expert_units import consume_blocks
from dovetail.core.ops.kernels.expert_pairs import Sorted
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
from dovetail.core.ops.kernels.plain_expert_units import consume_plain
from dovetail.core.ops.matmul import device_facts
from dovetail.core.ops.packed_experts import EACH, SPANS


@gluon.jit
def _consume(rings, work, scale, epilogue, size, BLOCK_T: gl.constexpr, ACTIVE: gl.constexpr, GATED: gl.constexpr,
             LIMITED: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr, PLACES: gl.constexpr,
             TAIL: gl.constexpr, SCALE_O: gl.constexpr, SCALE_I: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Consumer warp group for outputs [WIDE * WHICH, WIDE * (WHICH + 1)) of each tile."""
    x, weight, full, empty = rings
    if weight.dtype == gl.int32:
        consume_packed(rings, work, scale, epilogue, size, BLOCK_T, ACTIVE, GATED, LIMITED, GROUP, GROUPS, PLACES,
                       TAIL, WHICH)  # fmt: skip
    elif SCALE_I == 0:
        consume_plain(rings, work, epilogue, size, BLOCK_T, ACTIVE, GATED, LIMITED, GROUP, GROUPS, PLACES,
                      WHICH)  # fmt: skip
    else:
        consume_blocks(rings, work, scale, epilogue, size, BLOCK_T, ACTIVE, GATED, LIMITED, GROUP, GROUPS, PLACES,
                      SCALE_O, SCALE_I, WHICH)  # fmt: skip


@gluon.jit(do_not_specialize=["tiles", "x_scale_st", "o_tiles", "blocks"])
def experts_specialized(
    x_source,
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
    rows,
    blocks,
    alpha,
    limit,
    offset,
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
    RESIDENTS: gl.constexpr,
    PDL: gl.constexpr,
):
    """`scale_ptr`: exponents, or scales of blocks of SCALE_O outputs and SCALE_I inputs, `groups` in a row; None = the
    weight has 16 bits.
    `outputs`: channels, of gate and up each if GATED. `rows`: rows of an expert's matrix. `blocks`: those of a unit,
    with X_BOXES boxes of x each. TAIL: inputs of the last block if it has fewer. GROUPS: consumer warp groups, 1 or 2.
    PLACES: blocks in the ring."""
    BLOCK_T: gl.constexpr = x_source.block_type.shape[0]
    X_WIDE: gl.constexpr = x_source.block_type.shape[1]
    WIDE: gl.constexpr = source.block_type.shape[1]
    weight = gl.allocate_shared_memory(source.dtype, [PLACES * 2 * GROUPS, BOX, WIDE], source.layout)
    x = gl.allocate_shared_memory(x_source.dtype, [PLACES * X_BOXES, BLOCK_T, X_WIDE], x_source.layout)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    barrier()
    rings = (x, weight, full, empty)
    size = (outputs, rows, outputs if GATED else BOX, blocks)
    LAST: gl.constexpr = TAIL // X_WIDE if TAIL > 0 else X_BOXES
    # The partitions start after the wait, so all of them see what earlier kernels wrote.
    if GATED:
        if PDL:
            gdc_wait()
        work = (tiles_ptr, gl.load(tiles_ptr + 3 * tiles), o_tiles)
        begin = o_tiles * 0
    else:
        work = (tiles_ptr, gl.load(tiles_ptr + 3 * tiles), o_tiles)
        begin = fill(x_source, source, rings, work, size, GATED, GROUP, GROUPS, PLACES, X_BOXES, LAST, PDL)
    scale = (scale_ptr, groups)
    of_rows = (x_scale_ptr, x_scale_st, order_ptr, routing_ptr)
    epilogue = (of_rows, bias_ptr, out_ptr, (alpha, limit, offset))
    REGISTERS: gl.constexpr = consumer_registers(GROUPS, RESIDENTS)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (rings, work, scale, epilogue, size, BLOCK_T, ACTIVE, GATED, LIMITED, GROUP, GROUPS, PLACES,
                           TAIL, SCALE_O, SCALE_I, 0)),
                (produce, (x_source, source, rings, work, size, begin, GATED, GROUP, GROUPS, PLACES, X_BOXES, LAST,
                           PDL)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (rings, work, scale, epilogue, size, BLOCK_T, ACTIVE, GATED, LIMITED, GROUP, GROUPS, PLACES,
                           TAIL, SCALE_O, SCALE_I, 0)),
                (_consume, (rings, work, scale, epilogue, size, BLOCK_T, ACTIVE, GATED, LIMITED, GROUP, GROUPS, PLACES,
                           TAIL, SCALE_O, SCALE_I, 1)),
                (produce, (x_source, source, rings, work, size, begin, GATED, GROUP, GROUPS, PLACES, X_BOXES, LAST,
                           PDL)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
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
) -> None:
    """Launch the first product, which ends in `activation`, or the second one (None). `x`: rows in sorted order, and at
    least a tile of rows behind them. `weight_EOI`: E4M3, with a `scale` for each `block` of outputs and inputs, 16 bits
    without a scale, or words of packed codes, with their exponents in `scale`."""
    experts, rows, columns = weight_EOI.shape
    packed = weight_EOI.dtype is torch.int32
    assert packed or (scale is None) == (block[1] == 0), "scales of blocks, or none"
    inputs, outputs = columns * (EACH if packed else 1), out.shape[1]
    wide, boxes = (EACH * SPANS[0], X_BOXES.value) if packed else (LINE.value // weight_EOI.element_size(), 1)
    warp_groups = tile.warps // 4
    o_tiles = ceil_div(outputs, tile.outputs * (1 if activation is not None else 2))
    limit = activation.limit if activation is not None else None
    flat = weight_EOI.view(experts * rows, columns)
    processors = device_facts(out.device)[1]
    experts_specialized[(min(tile.residents * processors, pairs.tiles * o_tiles),)](
        tensor_map(x.values, tile.rows, len(x.values)),
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
        rows,
        ceil_div(inputs, wide),
        1.0 if activation is None else activation.alpha,
        0.0 if limit is None else limit,
        0.0 if activation is None else activation.offset,
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
        RESIDENTS=tile.residents,
        num_warps=4,
        maxnreg=launch_registers(warp_groups, tile.residents),
        **dependent(out),
    )
