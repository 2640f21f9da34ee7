"""End of a tile of core.ops.kernels.specialized_packed: sums of several programs are joined, scaled and written.

Shapes: T tokens, O outputs of a warp group.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dovetail.core.ops.kernels.gluon import barrier

TOGETHER = gl.constexpr(4)
"""Partial sums that are loaded together."""
THREADS = gl.constexpr(128)
"""Threads of a warp group."""


@gluon.jit
def write(acc, row_o, row_t, epilogue, tokens, outputs, GROUP_O: gl.constexpr, BLOCK_T: gl.constexpr):
    """Scale acc_OT, add the bias, round once and store."""
    x_scale_ptr, x_scale_st, row_scale_ptr, bias_ptr, out_ptr = epilogue
    o = row_o + gl.arange(0, GROUP_O, gl.SliceLayout(1, acc.type.layout))
    t = row_t + gl.arange(0, BLOCK_T, gl.SliceLayout(0, acc.type.layout))
    if x_scale_ptr is not None:
        acc = acc * gl.load(x_scale_ptr + t * x_scale_st, mask=t < tokens, other=0.0)[None, :]
    if row_scale_ptr is not None:
        acc = acc * gl.load(row_scale_ptr + o, mask=o < outputs, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += gl.load(bias_ptr + o, mask=o < outputs, other=0.0).to(gl.float32)[:, None]
    # Each warp stores the 16 rows of its matrix instructions, 16 bytes per thread.
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1])
    values = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), WIDE)
    to_o = row_o + gl.arange(0, GROUP_O, gl.SliceLayout(1, WIDE))
    to_t = row_t + gl.arange(0, BLOCK_T, gl.SliceLayout(0, WIDE))
    at = out_ptr + to_t.to(gl.int64)[None, :] * outputs + to_o[:, None]
    gl.store(at, values, mask=(to_t < tokens)[None, :] & (to_o < outputs)[:, None])


@gluon.jit
def reduce_split(acc, tile, done, cut, part_ptr, count_ptr, GROUP_O: gl.constexpr, BLOCK_T: gl.constexpr,
                 GROUPS: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Store this program's sum over `done` units of a split tile. Return the sum of all programs, and whether this one
    arrived last."""
    units, blocks = cut
    programs = gl.num_programs(0)
    mine = gl.program_id(0)
    start = tile * blocks
    ACC: gl.constexpr = acc.type.layout
    SIZE: gl.constexpr = GROUP_O * BLOCK_T
    o = gl.arange(0, GROUP_O, gl.SliceLayout(1, ACC))
    t = gl.arange(0, BLOCK_T, gl.SliceLayout(0, ACC))
    at = part_ptr + WHICH * SIZE + o[:, None] * BLOCK_T + t[None, :]
    # Only the first and the last tile of a program can be split.
    slot = 2 * mine + (start > mine * units // programs).to(gl.int32)
    gl.store(at + slot.to(gl.int64) * (GROUPS * SIZE), acc)
    counter = count_ptr + tile * GROUPS + WHICH
    barrier()
    arrived = gl.atomic_add(counter, done, sem="acq_rel") + done
    barrier()
    is_last = arrived == blocks
    total = gl.zeros([GROUP_O, BLOCK_T], gl.float32, ACC)
    if is_last:
        gl.store(counter, 0)
        first = ((start + 1) * programs - 1) // units
        last = ((start + blocks) * programs - 1) // units
        # Several loads at a time, since each takes as long as all of them.
        for some in range(first, last + 1, TOGETHER):
            sums = ()
            for more in gl.static_range(TOGETHER):
                program = some + more
                slot = 2 * program + (start > program * units // programs).to(gl.int32)
                there = at + slot.to(gl.int64) * (GROUPS * SIZE)
                sums += (gl.load(there, mask=program <= last, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]
            for more in gl.static_range(TOGETHER):
                total += sums[more]
    return total, is_last


@gluon.jit
def join_parts(acc, tile, done, begins, cut, part_ptr, count_ptr, GROUP_O: gl.constexpr, BLOCK_T: gl.constexpr,
               GROUPS: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Return what reduce_split does, for sums that take half of a thread's registers, so that writing and reading them
    takes long. A program that `begins` the tile and finds all other sums written adds these to its own, which it does
    not write. The order of additions is that of the parts, whichever program arrives last. `cut`: units, blocks of a
    tile, and its number of parts; 0 = equal ranges of all units."""
    units, blocks, parts = cut
    programs, mine = gl.num_programs(0), gl.program_id(0)
    start = tile * blocks
    ACC: gl.constexpr = acc.type.layout
    SIZE: gl.constexpr = GROUP_O * BLOCK_T
    own = _by_thread(acc, BLOCK_T)
    thread = gl.arange(0, THREADS, gl.SliceLayout(1, own.type.layout))
    number = gl.arange(0, SIZE // THREADS, gl.SliceLayout(0, own.type.layout))
    # 16 bytes of a thread are next to those of the next thread.
    place = thread[:, None] * 4 + (number // 4 * (4 * THREADS) + number % 4)[None, :]
    at = part_ptr + WHICH * SIZE + place
    counter = count_ptr + tile * GROUPS + WHICH
    arrived = done
    if begins:
        # The others have little to do beside their parts of this tile, or computed them first.
        arrived += gl.atomic_add(counter, 0, sem="acquire")
    if arrived < blocks or not begins:
        gl.store(at + _slot(mine, start, units, programs, parts).to(gl.int64) * (GROUPS * SIZE), own)
        barrier()
        arrived = gl.atomic_add(counter, done, sem="acq_rel") + done
    barrier()
    is_last = arrived == blocks
    total = gl.where(begins, own, 0.0)
    if is_last:
        gl.store(counter, 0)
        if parts > 0:
            first, last = tile * parts, tile * parts + parts - 1
        else:
            first = ((start + 1) * programs - 1) // units
            last = ((start + blocks) * programs - 1) // units
        for program in range(first + begins.to(gl.int32), last + 1):
            slot = _slot(program, start, units, programs, parts).to(gl.int64)
            total += gl.load(at + slot * (GROUPS * SIZE), cache_modifier=".cg")
    return _by_token(total, ACC, BLOCK_T), is_last


@gluon.jit
def _by_thread(acc_OT, BLOCK_T: gl.constexpr):
    """Return the sums [O, T] of 64 outputs of a matrix instruction as [threads, sums of a thread]. Nothing is moved."""
    # Warps, halves and rows of 16 outputs; eights of tokens, threads of a row, and pairs.
    parts = acc_OT.reshape([4, 2, 8, BLOCK_T // 8, 4, 2])
    return parts.permute((0, 2, 4, 3, 1, 5)).reshape([THREADS, BLOCK_T // 2])


@gluon.jit
def _by_token(sums, ACC: gl.constexpr, BLOCK_T: gl.constexpr):
    """Reverse _by_thread."""
    parts = sums.reshape([4, 8, 4, BLOCK_T // 8, 2, 2])
    return gl.convert_layout(parts.permute((0, 4, 1, 3, 2, 5)).reshape([64, BLOCK_T]), ACC, assert_trivial=True)


@gluon.jit
def _slot(program, start, units, programs, parts):
    """Return where the sum of a program's part of the tile that begins at unit `start` is: only the first and the last
    tile of a range can be split."""
    return gl.where(parts > 0, program, 2 * program + (start > program * units // programs).to(gl.int32))
