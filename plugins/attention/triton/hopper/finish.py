"""End of an item of `attend_prompts`: a warp group writes its rows of the output, or joins the ranges of a split row.

Shapes: D columns of a value, H query heads, of OUT_HEADS in the output, K kv heads. A row is a query token and one of
the PACK query heads of its unit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dovetail.core.ops.kernels.gluon import barrier
from dovetail.plugins.attention.triton.hopper.fetch import GROUPS, ITEM_FIELDS, ROWS
from dovetail.plugins.attention.triton.scores import LOW, add_sink


@gluon.jit
def _rows(count, unit, GROUP: gl.constexpr, PACK: gl.constexpr, WHICH: gl.constexpr, M: gl.constexpr):
    """Return query and head of each row of a warp group, and whether they exist. M: layout."""
    TILES: gl.constexpr = (GROUP + PACK - 1) // PACK
    row = WHICH * ROWS + gl.arange(0, ROWS, M)
    query = row // PACK
    exists = query < count
    head = unit % TILES * PACK + row % PACK
    if GROUP % PACK:
        exists = exists & (head < GROUP)
    return query, unit // TILES * GROUP + head, exists


@gluon.jit
def _put(
    out_ptr, acc, first, count, unit, H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    OUT_HEADS: gl.constexpr, PACK: gl.constexpr, WIDE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    query, head, exists = _rows(count, unit, H // K, PACK, WHICH, gl.SliceLayout(1, WIDE))
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WIDE))[None, :]
    offset = ((first + query).to(gl.int64) * OUT_HEADS + head) * D
    values = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), WIDE)
    gl.store(out_ptr + offset[:, None] + dims, values, mask=exists[:, None] & (dims < D))


@gluon.jit
def finish(
    acc, m, total, index, unit, first, count, part, v_scale, sinks_ptr, out_ptr, part_ptr, lse_ptr, count_ptr,
    items_ptr, H: gl.constexpr, K: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, OUT_HEADS: gl.constexpr,
    PACK: gl.constexpr, OUT: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Write rows of the output, or a range's partial result. The tile's last range to arrive joins all ranges."""
    # Each warp stores the 16 rows of its matrix instructions, 16 bytes per thread.
    WIDE: gl.constexpr = gl.BlockedLayout([2, 8], [8, 4], [4, 1], [1, 0])
    M: gl.constexpr = gl.SliceLayout(1, OUT)
    TILES: gl.constexpr = (H // K + PACK - 1) // PACK
    QUERIES: gl.constexpr = GROUPS * ROWS // PACK
    m = gl.convert_layout(m, M)
    total = gl.convert_layout(gl.sum(total, axis=1), M)
    if sinks_ptr is not None:
        # The first range of a row counts its sink.
        _, sink_head, has_head = _rows(count, unit, H // K, PACK, WHICH, M)
        is_first = gl.load(items_ptr + index * ITEM_FIELDS + 10) == index
        sink = gl.load(sinks_ptr + sink_head, mask=has_head & is_first, other=float("-inf"))
        acc, total, m = add_sink(acc, total, m, sink)
    # A query that saw no key gives zeros.
    acc = acc * (v_scale / gl.where(total > 0, total, 1.0))[:, None]
    if part < 0:
        _put(out_ptr, acc, first, count, unit, H, K, D, BLOCK_D, OUT_HEADS, PACK, WIDE, WHICH)
    else:
        query, head, exists = _rows(count, unit, H // K, PACK, WHICH, M)
        dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, OUT))[None, :]
        ok = exists[:, None] & (dims < D)
        to = (part + query).to(gl.int64) * H + head
        gl.store(part_ptr + (to * D)[:, None] + dims, acc, mask=ok)
        gl.store(lse_ptr + to, gl.where(total > 0, m + gl.log2(total), float("-inf")), mask=exists)
        # Each warp group uses a separate counter, that of the tile's first or second item, and joins its own rows.
        splits = gl.load(items_ptr + index * ITEM_FIELDS + 9)
        first_item = gl.load(items_ptr + index * ITEM_FIELDS + 10)
        count_ptr += (first_item + WHICH) * (K * TILES) + unit
        barrier()
        arrived = gl.atomic_add(count_ptr, 1, sem="acq_rel")
        barrier()
        if arrived == splits - 1:
            gl.store(count_ptr, 0)
            first_part = part - (index - first_item) * QUERIES
            m = gl.full([ROWS], LOW, gl.float32, M)
            total = gl.zeros([ROWS], gl.float32, M)
            acc = gl.zeros([ROWS, BLOCK_D], gl.float32, OUT)
            for split in range(splits):
                to = (first_part + split * QUERIES + query).to(gl.int64) * H + head
                lse = gl.load(lse_ptr + to, mask=exists, other=float("-inf"), cache_modifier=".cg")
                x = gl.load(part_ptr + (to * D)[:, None] + dims, mask=ok, other=0.0, cache_modifier=".cg")
                new_m = gl.maximum(m, lse)
                weight = gl.exp2(lse - new_m)
                alpha = gl.exp2(m - new_m)
                total = total * alpha + weight
                acc = acc * alpha[:, None] + weight[:, None] * x
                m = new_m
            acc = acc / gl.where(total > 0, total, 1.0)[:, None]
            _put(out_ptr, acc, first, count, unit, H, K, D, BLOCK_D, OUT_HEADS, PACK, WIDE, WHICH)
