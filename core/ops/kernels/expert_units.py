"""Work of the kernels of routed experts for Hopper (specialized_experts.py): units, the ring of blocks in shared
memory that a producer fills, and the ends of both products.

A unit is a tile of rows times a tile of outputs. Each consumer warp group has two boxes of 64 rows of the weight: gate
and up of the same outputs, or twice as many outputs. For packed weights rows of x are copied in sorted order first, so
that a tensor map can read them; a tile's box may reach into the rows of the next expert, whose outputs are not stored.
The producer of other weights (expert_rows.py) gathers rows.

Shapes: T rows of a tile, O outputs of a box.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.core.ops.kernels.experts import activated
from dovetail.core.ops.kernels.gluon import advance, barrier

BOX = gl.constexpr(64)
"""Rows of a box of the weight, as many as a matrix instruction takes."""
EACH_ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Layout of what a unit's rows have one of."""


@gluon.jit
def unit_of(tiles_ptr, unit, live, o_tiles, GROUP: gl.constexpr):
    """Return a unit's expert, its first place, the end of the expert's places, and its tile of outputs. Past the last
    unit, return the last one's; if no pair has an expert, the first expert's, whose weights can be read, without
    places: nothing has written those of its tile."""
    unit = gl.maximum(gl.minimum(unit, live * o_tiles - 1), 0)
    group = unit // (GROUP * o_tiles)
    rest = unit - group * (GROUP * o_tiles)
    size = gl.maximum(gl.minimum(live - group * GROUP, GROUP), 1)
    at = tiles_ptr + 3 * (group * GROUP + rest % size)
    first, end = gl.load(at + 1, mask=live > 0, other=0), gl.load(at + 2, mask=live > 0, other=0)
    return gl.maximum(gl.load(at), 0), first, end, rest // size


@gluon.jit
def fetch_weight(source, ring, full, place, block, expert, o_tile, size, GATED: gl.constexpr, GROUPS: gl.constexpr,
                 wanted):  # fmt: skip
    """Start the copies of a block's boxes of the weight, two for each group."""
    outputs, rows, leap, blocks = size
    WIDE: gl.constexpr = BOX if GATED else 2 * BOX
    start = o_tile * (GROUPS * WIDE)
    for half in gl.static_range(2):
        for which in gl.static_range(GROUPS):
            # Instead of boxes past the last output, the first one again, which is in the L2 cache.
            o = start + which * WIDE + (0 if GATED else half * BOX)
            row = expert * rows + gl.where(o < outputs, o, start) + (half * leap if GATED else 0)
            to = ring.index((place * 2 + half) * GROUPS + which)
            at = [row, block * source.block_type.shape[1]]
            tma.async_copy_global_to_shared(source, at, full.index(place), to, pred=wanted)


@gluon.jit
def expect_weight(source, full, place, GROUPS: gl.constexpr, wanted):
    """Announce the bytes of a block's boxes of the weight to its barrier."""
    mbarrier.expect(full.index(place), 2 * GROUPS * source.block_type.nbytes, pred=wanted)


@gluon.jit
def _fetch_x(source, ring, full, place, block, first, blocks, X_BOXES: gl.constexpr, LAST: gl.constexpr, wanted):
    """Start the copies of a block's boxes of x."""
    for box in gl.static_range(X_BOXES):
        at = [first, (block * X_BOXES + box) * source.block_type.shape[1]]
        ok = wanted if box < LAST else wanted & (block < blocks - 1)
        tma.async_copy_global_to_shared(source, at, full.index(place), ring.index(place * X_BOXES + box), pred=ok)


@gluon.jit
def _expect(x_source, source, full, place, block, blocks, GROUPS: gl.constexpr, X_BOXES: gl.constexpr,
            LAST: gl.constexpr, wanted):  # fmt: skip
    """Announce a block's bytes to its barrier."""
    WEIGHT: gl.constexpr = 2 * GROUPS * source.block_type.nbytes
    X: gl.constexpr = x_source.block_type.nbytes
    if LAST == X_BOXES:
        mbarrier.expect(full.index(place), WEIGHT + X_BOXES * X, pred=wanted)
    else:
        mbarrier.expect(full.index(place), WEIGHT + X_BOXES * X, pred=wanted & (block < blocks - 1))
        mbarrier.expect(full.index(place), WEIGHT + LAST * X, pred=wanted & (block == blocks - 1))


@gluon.jit
def fill(x_source, source, rings, work, size, GATED: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
         PLACES: gl.constexpr, X_BOXES: gl.constexpr, LAST: gl.constexpr, PDL: gl.constexpr):  # fmt: skip
    """Start the copies of the second product's first round: those of the weight before the first product has ended. It
    has waited for the kernels that wrote the tiles. With x_source None, rows of x are left to produce_rows. Return how
    many blocks they are."""
    x, weight, full, empty = rings
    tiles_ptr, live, o_tiles = work
    blocks = size[3]
    unit = gl.program_id(0)
    expert, first, _, o_tile = unit_of(tiles_ptr, unit, live, o_tiles, GROUP)
    for i in gl.static_range(PLACES):
        wanted = (unit < live * o_tiles) & (i < blocks)
        if x_source is None:
            expect_weight(source, full, i, GROUPS, wanted)
        else:
            _expect(x_source, source, full, i, i, blocks, GROUPS, X_BOXES, LAST, wanted)
        fetch_weight(source, weight, full, i, i, expert, o_tile, size, GATED, GROUPS, wanted)
    if PDL:
        gdc_wait()
    if x_source is not None:
        for i in gl.static_range(PLACES):
            wanted = (unit < live * o_tiles) & (i < blocks)
            _fetch_x(x_source, x, full, i, i, first, blocks, X_BOXES, LAST, wanted)
    return gl.minimum(blocks, PLACES)


@gluon.jit
def produce(x_source, source, rings, work, size, begin, GATED: gl.constexpr, GROUP: gl.constexpr,
            GROUPS: gl.constexpr, PLACES: gl.constexpr, X_BOXES: gl.constexpr, LAST: gl.constexpr,
            PDL: gl.constexpr):  # fmt: skip
    """Fetch the blocks of all units, from block `begin` of the first one on, as consumers release places. A block has
    two boxes of the weight for each group, and X_BOXES boxes of x; LAST: those of a unit's last block."""
    x, weight, full, empty = rings
    tiles_ptr, live, o_tiles = work
    blocks = size[3]
    units = live * o_tiles
    # The first round finds all places free.
    place, phase = begin % PLACES, gl.where(begin == PLACES, 0, 1)
    unit = gl.program_id(0)
    expert, first, _, o_tile = unit_of(tiles_ptr, unit, live, o_tiles, GROUP)
    while unit < units:
        unit += gl.num_programs(0)
        following = unit_of(tiles_ptr, unit, live, o_tiles, GROUP)
        for block in range(begin, blocks):
            mbarrier.wait(empty.index(place), phase)
            _expect(x_source, source, full, place, block, blocks, GROUPS, X_BOXES, LAST, True)
            fetch_weight(source, weight, full, place, block, expert, o_tile, size, GATED, GROUPS, True)
            _fetch_x(x_source, x, full, place, block, first, blocks, X_BOXES, LAST, True)
            place, phase = advance(place, phase, PLACES)
        begin *= 0
        expert, first, _, o_tile = following
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def pairs_of(order_ptr, first, end, BLOCK_T: gl.constexpr):
    """Return the pairs of a unit's rows, one in a thread. Those of the next unit are loaded before this one's end."""
    row = first + gl.arange(0, BLOCK_T, EACH_ROW)
    return gl.load(order_ptr + row, mask=row < end, other=0)


@gluon.jit
def factors_of(epilogue, pair_T, first, end, ACTIVE: gl.constexpr, GATED: gl.constexpr):
    """Return each row's pair, scale of x, and routing weight in the second product; 0 = there is none. They are loaded
    before a unit's blocks, so that their latency overlaps with these."""
    x_scale_ptr, x_scale_st, routing_ptr = epilogue[0]
    row = first + gl.arange(0, pair_T.shape[0], EACH_ROW)
    scale_T, share_T = gl.zeros_like(pair_T), gl.zeros_like(pair_T)
    if x_scale_ptr is not None:
        of_row = pair_T // ACTIVE if GATED else row
        scale_T = gl.load(x_scale_ptr + of_row * x_scale_st, mask=row < end, other=0.0)
    if not GATED:
        share_T = gl.load(routing_ptr + pair_T, mask=row < end, other=0.0)
    return pair_T, scale_T, share_T


@gluon.jit
def output_scales(scale_ptr, expert, start, size, GATED: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the scales of the outputs of both boxes."""
    outputs, rows, leap, blocks = size
    o = start + gl.arange(0, BOX, gl.SliceLayout(1, LAYOUT))
    next_o = o if GATED else o + BOX
    of_expert = scale_ptr + expert * rows
    return (
        gl.load(of_expert + o, mask=o < outputs, other=0.0),
        gl.load(of_expert + leap + o, mask=next_o < outputs, other=0.0),
    )


@gluon.jit
def keep(notes, epilogue, of_rows, GATED: gl.constexpr, WHICH: gl.constexpr):
    """Write what `finish` needs of a unit's rows to this warp group's shared memory."""
    pairs, scales, shares = notes
    pair_T, scale_T, share_T = of_rows
    if epilogue[0][0] is not None:
        scales.index(WHICH).store(scale_T)
    if not GATED:
        shares.index(WHICH).store(share_T)
        pairs.index(WHICH).store(pair_T)
    barrier()


@gluon.jit
def _store(y_OT, out_ptr, pairs, first, end, start, outputs):
    """Store rows at their places, or at `pairs`."""
    BLOCK_T: gl.constexpr = y_OT.shape[1]
    # Eight threads store the 128 bytes of a row. In 32 bits, the exchange between warps that this takes has no room.
    WHOLE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    CUT: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1])
    WIDE: gl.constexpr = CUT if out_ptr.dtype.element_ty == gl.float32 else WHOLE
    values = gl.convert_layout(y_OT.to(out_ptr.dtype.element_ty), WIDE)
    o = start + gl.arange(0, BOX, gl.SliceLayout(1, WIDE))
    row = first + gl.arange(0, BLOCK_T, gl.SliceLayout(0, WIDE))
    inside = row < end
    if pairs is not None:
        row = pairs.slice(0, BLOCK_T).load(gl.SliceLayout(0, WIDE))
    at = out_ptr + row.to(gl.int64)[None, :] * outputs + o[:, None]
    gl.store(at, values, mask=inside[None, :] & (o < outputs)[:, None])


@gluon.jit
def _add_bias(acc, bias_ptr, o, inside_O):
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + o, mask=inside_O, other=0.0).to(gl.float32)[:, None]
    return acc


@gluon.jit
def finish(acc, more, tile, notes, epilogue, size, start, GATED: gl.constexpr, LIMITED: gl.constexpr,
           WHICH: gl.constexpr):  # fmt: skip
    """Complete and store the sums of a unit [O, T], with what was kept of its rows. `tile`: its expert, first place and
    end. The first output is `start`."""
    expert, first, end = tile
    pairs, scales, shares = notes
    of_rows, bias_ptr, out_ptr, activation = epilogue
    alpha, limit, offset = activation
    outputs, rows, leap, blocks = size
    BLOCK_T: gl.constexpr = acc.shape[1]
    ACC: gl.constexpr = acc.type.layout
    o = start + gl.arange(0, BOX, gl.SliceLayout(1, ACC))
    if of_rows[0] is not None:
        scale_T = scales.index(WHICH).slice(0, BLOCK_T).load(gl.SliceLayout(0, ACC))
        acc, more = acc * scale_T[None, :], more * scale_T[None, :]
    if bias_ptr is not None:
        bias_ptr += expert.to(gl.int64) * rows
    acc = _add_bias(acc, bias_ptr, o, o < outputs)
    if GATED:
        more = _add_bias(more, bias_ptr, o + leap, o < outputs)
        y_OT = activated(acc, more, alpha, limit, offset, LIMITED)
        _store(y_OT, out_ptr, None, first, end, start, outputs)
    else:
        more = _add_bias(more, bias_ptr, o + BOX, o + BOX < outputs)
        share_T = shares.index(WHICH).slice(0, BLOCK_T).load(gl.SliceLayout(0, ACC))[None, :]
        _store(acc * share_T, out_ptr, pairs.index(WHICH), first, end, start, outputs)
        _store(more * share_T, out_ptr, pairs.index(WHICH), first, end, start + BOX, outputs)
