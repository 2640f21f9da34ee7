"""Producer warp group of `attend_latents_hopper`: it fetches blocks of latents into a ring of two places.

Shared memory consists of boxes of 64 keys x 64 columns (a row is 128 bytes, the widest swizzle), as in fetch.py.
Latents of 8 bits pass through registers, where they become float16, which holds all E4M3 numbers, and are multiplied by
their scales. (There is no such instruction for bfloat16, whose bits took three times as many.) The next half block is
being loaded meanwhile. 16-bit latents and rotated columns are copied.

Shapes: N keys of a block, L kv rank, R rotary dim, G groups of columns with a scale.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dovetail.core.interfaces.model import LATENT_GROUP
from dovetail.core.ops.kernels.gluon import barrier
from dovetail.plugins.attention.triton.hopper.fetch import BOX, ITEM_FIELDS

PLACES = gl.constexpr(2)
"""Blocks in the ring, one for each consumer warp group. Not even half a block more fits into shared memory."""
AHEAD = gl.constexpr(2)
"""Groups of columns that are loaded before they are needed, in registers."""
LATENT_FACTOR = gl.constexpr(2.0**5)
"""Factor of 8-bit latents in shared memory. float16 holds those of up to 2000; greater ones become infinite. (RMS norm
makes latents of at most 23 times its weight.) Scales of groups whose greatest magnitude is 0.001 are rounded as normal
numbers; at 0.0001 they are off by up to 0.5 %, which is less than E4M3's own error."""
GROUP = gl.constexpr(LATENT_GROUP)
"""Columns that share a scale."""
FETCH_WARPS = gl.constexpr(4)
"""Warps of the producer."""
BYTES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [FETCH_WARPS.value, 1], [1, 0]))
"""Layout of words of 8-bit values. Eight threads write 16 bytes each to different banks of the swizzled boxes."""
ROTATED = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [FETCH_WARPS.value, 1], [1, 0]))
"""Layout of rotated columns beside 8-bit latents. Threads have the same keys as in BYTES."""
PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [FETCH_WARPS.value, 1], [1, 0]))
"""Layout of a box of 16-bit values."""


@gluon.jit
def latent_item(items_ptr, work, works, UNITS: gl.constexpr):
    """Return the unit and fields of a program's item, and its number of blocks: 0 = there is no such item."""
    real = work < works
    index = work // UNITS
    item = items_ptr + index * ITEM_FIELDS
    row = gl.load(item, mask=real, other=-1)
    first = gl.load(item + 1, mask=real, other=0)
    count = gl.load(item + 2, mask=real, other=0)
    first_at = gl.load(item + 3, mask=real, other=0)
    lo = gl.load(item + 5, mask=real, other=0)
    hi = gl.load(item + 6, mask=real, other=0)
    part = gl.load(item + 7, mask=real, other=-1)
    # An item without keys has one block, in which no key is seen.
    blocks = gl.where(row >= 0, gl.maximum((hi - lo + BOX - 1) // BOX, 1), 0)
    return index, work % UNITS, row, first, count, first_at, lo, hi, part, blocks


@gluon.jit
def _slots(table, keys, hi, PAGE: gl.constexpr):
    page = gl.load(table + keys // PAGE, mask=keys < hi, other=0)
    return page * PAGE + keys % PAGE


@gluon.jit
def _load_group(page_ptr, slot, exists, group: gl.constexpr, L: gl.constexpr):
    """Load words of four latents. As loop-carried values, bytes would take a register each."""
    WORDS: gl.constexpr = GROUP // 4
    column = group * WORDS + gl.arange(0, WORDS, gl.SliceLayout(0, BYTES))
    return gl.load(page_ptr + (slot.to(gl.int64) * (L // 4))[:, None] + column[None, :], mask=exists[:, None], other=0)


@gluon.jit
def _load_scales(scale_ptr, slot, exists, G: gl.constexpr):
    scales = ()
    for group in gl.static_range(G):
        scales += (gl.load(scale_ptr + slot.to(gl.int64) * G + group, mask=exists, other=0.0),)  # type: ignore[assignment]
    return scales


@gluon.jit
def scaled(x, scale):
    """Return words of four E4M3 numbers [..., W] times scale [..., 1] * LATENT_FACTOR as pairs of words of two float16
    numbers [..., W, 2]."""
    ASM: gl.constexpr = """{
        .reg .b16 low, high;
        .reg .b32 a, b;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 a, low;
        cvt.rn.f16x2.e4m3x2 b, high;
        mul.rn.f16x2 $0, a, $3;
        mul.rn.f16x2 $1, b, $3;
    }"""
    factor = (scale * LATENT_FACTOR).to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32)
    twice = (factor & 0xFFFF) * 0x10001
    front, back = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,r,r", [x, twice], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(front, back)


@gluon.jit
def copy_box(to, pointers, exists):
    """Start to copy a box; keys that do not exist are zeros."""
    async_copy.async_copy_global_to_shared(to, pointers, mask=exists[:, None])


@gluon.jit
def _announce(full, stage):
    """Signal that a block has arrived, once the tensor cores can see what all threads wrote."""
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    mbarrier.arrive(full.index(stage))


@gluon.jit
def produce_latents(rings, full, empty, source, items_ptr, works, table_ptr, table_stride, UNITS: gl.constexpr,
                    L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Fetch the blocks of all items of this program, as far ahead as the ring allows."""
    page_ptr, scale_ptr, rotary_ptr = source
    boxes, groups, rotary = rings
    NARROW: gl.constexpr = scale_ptr is not None
    BOXES: gl.constexpr = L // BOX
    G: gl.constexpr = L // GROUP
    COPY: gl.constexpr = ROTATED if NARROW else PAIRS
    column = gl.arange(0, BOX, gl.SliceLayout(0, COPY))[None, :]
    at = gl.arange(0, BOX, gl.SliceLayout(1, BYTES if NARROW else PAIRS))
    # Uses of the places so far.
    used0, used1 = 0, 0
    for work in range(gl.program_id(0), works, gl.num_programs(0)):
        index, unit, row, first, count, first_at, lo, hi, part, blocks = latent_item(items_ptr, work, works, UNITS)
        table = table_ptr + row.to(gl.int64) * table_stride
        slot = _slots(table, lo + at, hi, PAGE)
        if NARROW:
            scales = _load_scales(scale_ptr, slot, lo + at < hi, G)
            loaded = ()
            for group in gl.static_range(AHEAD):
                loaded += (_load_group(page_ptr, slot, lo + at < hi, group, L),)  # type: ignore[assignment]
        for b in range(blocks):
            stage = b % PLACES
            n = lo + b * BOX
            used = gl.where(stage == 0, used0, used1) + b // PLACES
            next_slot = _slots(table, n + BOX + at, hi, PAGE)
            if NARROW:
                next_scales = _load_scales(scale_ptr, next_slot, n + BOX + at < hi, G)
                mbarrier.wait(empty.index(stage), (used & 1) ^ 1)
                rotary_slot = gl.convert_layout(slot, gl.SliceLayout(1, ROTATED), assert_trivial=True)
                rotary_at = gl.convert_layout(n + at, gl.SliceLayout(1, ROTATED), assert_trivial=True)
                rotated = rotary_ptr + (rotary_slot.to(gl.int64) * R)[:, None] + column
                copy_box(rotary.index(stage), rotated, rotary_at < hi)
                async_copy.commit_group()
                for group in gl.static_range(G):
                    if group + AHEAD < G:
                        loading = _load_group(page_ptr, slot, n + at < hi, group + AHEAD, L)
                    else:
                        loading = _load_group(page_ptr, next_slot, n + BOX + at < hi, group + AHEAD - G, L)
                    words = scaled(loaded[0], scales[group][:, None])  # type: ignore[misc]
                    groups.index(stage * G + group).store(gl.reshape(words, [BOX, GROUP // 2]))
                    loaded = _shifted(loaded, loading)
                scales = next_scales
            else:
                mbarrier.wait(empty.index(stage), (used & 1) ^ 1)
                start = page_ptr + (slot.to(gl.int64) * (L + R))[:, None] + column
                for box in gl.static_range(BOXES):
                    copy_box(boxes.index(stage * BOXES + box), start + box * BOX, n + at < hi)
                copy_box(rotary.index(stage), start + L, n + at < hi)
                async_copy.commit_group()
            slot = next_slot
            _announce(full, stage)
        used0 += (blocks + 1) // PLACES
        used1 += blocks // PLACES


@gluon.jit
def _shifted(values, last):
    """Return the tuple without its first value, and with another one at its end."""
    result = ()
    for i in gl.static_range(1, len(values)):
        result += (values[i],)
    return result + (last,)
