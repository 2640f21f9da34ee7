"""Producer warp of `attend_prompts`: it fetches queries and blocks of keys and values into rings in shared memory.

Shared memory consists of boxes of 64 rows x 64 columns, as a tensor map delivers them (a row is 128 bytes, the widest
swizzle). Boxes are ordered by columns, so those of a block also form one [N, D] matrix.

A ring is (boxes, full, empty). Each place has a barrier that completes when the block has arrived (full) and one that
completes when both warp groups have released it (empty). Keys may have further columns, which all kv heads share: a box
for every 64 keys, in memory of their own, which the barriers of K cover. Shapes: N keys of a block, D (padded) head
dim, H query heads, K kv heads. A unit is a tile of PACK query heads of a kv head.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from dovetail.plugins.attention.triton.plan import ITEM

ITEM_FIELDS = gl.constexpr(ITEM.value)
ROWS = gl.constexpr(64)
"""Rows of a warp group, as many as one matrix instruction takes."""
BOX = gl.constexpr(64)
"""Rows and columns of a box."""
GROUPS = gl.constexpr(2)
"""Number of consumer warp groups."""


@gluon.jit
def next_item(items_ptr, base, odd, works, UNITS: gl.constexpr):
    """Return this program's item and its unit in the round that starts at `base`. Every second round is reversed.
    Items of a row are in decreasing order of work, so the program with the longest item of a round gets the shortest of
    the next."""
    at = gl.where(odd != 0, base + gl.num_programs(0) - 1 - gl.program_id(0), base + gl.program_id(0))
    real = at < works
    index = at // UNITS
    item = items_ptr + index * ITEM_FIELDS
    row = gl.load(item, mask=real, other=-1)
    real = real & (row >= 0)
    first = gl.load(item + 1, mask=real, other=0)
    count = gl.load(item + 2, mask=real, other=0)
    first_at = gl.load(item + 3, mask=real, other=0)
    seen_from = gl.load(item + 4, mask=real, other=0)
    lo = gl.load(item + 5, mask=real, other=0)
    hi = gl.load(item + 6, mask=real, other=0)
    part = gl.load(item + 7, mask=real, other=-1)
    length = gl.load(item + 8, mask=real, other=0)
    return index, at % UNITS, row, first, count, first_at, seen_from, lo, hi, part, length


@gluon.jit
def next_place(stage, phase, STAGES: gl.constexpr):
    """Return the next place in a ring and the phase parity of its barrier."""
    around = stage == STAGES - 1
    return gl.where(around, 0, stage + 1), gl.where(around, phase ^ 1, phase)


@gluon.jit
def _pages(table, n, lo, seen_from, length, PAGE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the slots at which the boxes of a block start. Boxes without existing keys are read from page 0."""
    slot0 = _slot(table, n, n >= lo, seen_from, length, PAGE)
    slot1 = slot0
    if BLOCK_N > BOX:
        slot1 = _slot(table, n + BOX, n >= lo, seen_from, length, PAGE)
    return slot0, slot1


@gluon.jit
def _slot(table, n, wanted, seen_from, length, PAGE: gl.constexpr):
    exists = wanted & (n < length) & (n + BOX > seen_from)
    page = gl.load(table + n // PAGE, mask=exists, other=0)
    return page * PAGE + gl.where(exists, n % PAGE, 0)


@gluon.jit
def _first_pages(item, table_ptr, table_stride, PAGE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Slots of the block that an item processes first, which is its last."""
    index, unit, row, first, count, first_at, seen_from, lo, hi, part, length = item
    last = lo + gl.maximum(hi - lo - 1, 0) // BLOCK_N * BLOCK_N
    return _pages(table_ptr + row.to(gl.int64) * table_stride, last, lo, seen_from, length, PAGE, BLOCK_N)


@gluon.jit
def _fetch(source, ring, stage, phase, slot0, slot1, kv_head, D: gl.constexpr, BLOCK_N: gl.constexpr,
           shared_source, shared_boxes):  # fmt: skip
    """Fetch a block of K or V into its place in the ring, once both warp groups have released it. `shared_source`: map
    of the further columns of K; None = there are none."""
    boxes, full, empty = ring
    mbarrier.wait(empty.index(stage), phase ^ 1)
    bar = full.index(stage)
    SHARED: gl.constexpr = 0 if shared_source is None else BOX
    mbarrier.expect(bar, BLOCK_N * (D + SHARED) * 2)
    for c in gl.static_range(D // BOX):
        box = (stage * (D // BOX) + c) * (BLOCK_N // BOX)
        tma.async_copy_global_to_shared(source, [slot0, kv_head, c * BOX], bar, boxes.index(box))
        if BLOCK_N > BOX:
            tma.async_copy_global_to_shared(source, [slot1, kv_head, c * BOX], bar, boxes.index(box + 1))
    if shared_source is not None:
        box = stage * (BLOCK_N // BOX)
        tma.async_copy_global_to_shared(shared_source, [slot0, 0, 0], bar, shared_boxes.index(box))
        if BLOCK_N > BOX:
            tma.async_copy_global_to_shared(shared_source, [slot1, 0, 0], bar, shared_boxes.index(box + 1))


@gluon.jit
def produce(sources, q_ring, k_ring, v_ring, shared, items_ptr, works, table_ptr, table_stride, H: gl.constexpr,
            K: gl.constexpr, D: gl.constexpr, V: gl.constexpr, PACK: gl.constexpr, PAGE: gl.constexpr,
            BLOCK_N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Fetch as far ahead as the rings allow, across items. K is one block ahead of V, as the warp groups need them.
    `sources`: tensor maps of q [T, H, D], of K and V [slots, K, columns], and of the columns that the keys of all heads
    share [slots, 1, columns], or None. `shared`: boxes for such columns of q and K."""
    q_source, k_source, v_source, shared_source = sources
    q_boxes, q_full, q_empty = q_ring
    TILES: gl.constexpr = (H // K + PACK - 1) // PACK
    q_shared_boxes, k_shared_boxes = shared
    SHARED: gl.constexpr = 0 if shared_source is None else BOX
    k_stage, k_phase, v_stage, v_phase, q_phase, odd = 0, 0, 0, 0, 0, 0
    item = next_item(items_ptr, 0, odd, works, K * TILES)
    first_slot0, first_slot1 = _first_pages(item, table_ptr, table_stride, PAGE, BLOCK_N)
    for base in range(0, works, gl.num_programs(0)):
        # Look up items and pages ahead of their use, so that fetches do not wait for loads.
        odd = odd ^ 1
        following = next_item(items_ptr, base + gl.num_programs(0), odd, works, K * TILES)
        index, unit, row, first, count, first_at, seen_from, lo, hi, part, length = item
        table = table_ptr + row.to(gl.int64) * table_stride
        kv_head = unit // TILES
        first_head = kv_head * (H // K) + unit % TILES * PACK
        v_slot0, v_slot1 = first_slot0, first_slot1
        if hi > lo:
            last = lo + (hi - lo - 1) // BLOCK_N * BLOCK_N
            k_slot0, k_slot1 = _pages(table, last - BLOCK_N, lo, seen_from, length, PAGE, BLOCK_N)
            _fetch(
                k_source, k_ring, k_stage, k_phase, v_slot0, v_slot1, kv_head, D, BLOCK_N, shared_source,
                k_shared_boxes,
            )  # fmt: skip
            k_stage, k_phase = next_place(k_stage, k_phase, STAGES)
            for which in gl.static_range(GROUPS):
                mbarrier.wait(q_empty.index(which), q_phase ^ 1)
                bar = q_full.index(which)
                mbarrier.expect(bar, ROWS * (D + SHARED) * 2)
                for c in gl.static_range(D // BOX):
                    at = [first + which * ROWS // PACK, first_head, c * BOX]
                    tma.async_copy_global_to_shared(q_source, at, bar, q_boxes.index(which * (D // BOX) + c))
                if shared_source is not None:
                    at = [first + which * ROWS // PACK, first_head, D]
                    tma.async_copy_global_to_shared(q_source, at, bar, q_shared_boxes.index(which))
            q_phase = q_phase ^ 1
            for n in range(last - BLOCK_N, lo - 1, -BLOCK_N):
                slot0, slot1 = _pages(table, n - BLOCK_N, lo, seen_from, length, PAGE, BLOCK_N)
                _fetch(
                    k_source, k_ring, k_stage, k_phase, k_slot0, k_slot1, kv_head, D, BLOCK_N, shared_source,
                    k_shared_boxes,
                )  # fmt: skip
                k_stage, k_phase = next_place(k_stage, k_phase, STAGES)
                _fetch(
                    v_source, v_ring, v_stage, v_phase, v_slot0, v_slot1, kv_head, V, BLOCK_N, None, None
                )  # fmt: skip
                v_stage, v_phase = next_place(v_stage, v_phase, STAGES)
                v_slot0, v_slot1, k_slot0, k_slot1 = k_slot0, k_slot1, slot0, slot1
        first_slot0, first_slot1 = _first_pages(following, table_ptr, table_stride, PAGE, BLOCK_N)
        if hi > lo:
            _fetch(v_source, v_ring, v_stage, v_phase, v_slot0, v_slot1, kv_head, V, BLOCK_N, None, None)
            v_stage, v_phase = next_place(v_stage, v_phase, STAGES)
        item = following
