"""Attention of rows that decode, for Hopper, with few memory round trips between a kernel's start and end.

With few rows, a step is bound by latency, not bandwidth. So the first pages are stored with the item. If this kernel
writes the step's keys, it fetches older keys and values before the preceding kernel has ended. Each warp processes
different keys, and the warps are joined once, at the end (per_warp.py). The new key is not read back from its page
but joined as an additional entry.

Ranges of a long row are joined through mailboxes (mailboxes.py).

A slab is 16 keys of each warp; a block is SLABS slabs. If a kv head has more than M query heads, several programs
(head tiles) process M of them each. They have adjacent ids, so the keys of a range are read from memory once and then
found in the L2 cache.

Rows with drafts have several tokens. The query heads of up to Q of them are one tile, in which each token sees the keys
up to its own; further tokens are items of their own, which find the keys in the L2 cache. Their keys have been written
by another kernel.

Matrix instructions need head dims that are powers of two. Smaller ones (D < BLOCK_D) are padded with zeros in shared
memory; nothing is read for the padding. Shapes: L warps, M query heads of a program, of all its tokens, W words of
BLOCK_D (pairs of 8-bit values, or single 16-bit values).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dovetail.core.ops.kernels.gluon import barrier
from dovetail.core.ops.kernels.norm import weigh
from dovetail.plugins.attention.triton.hopper.fetch import ITEM_FIELDS
from dovetail.plugins.attention.triton.hopper.mailboxes import JOIN_GROUP, as_message, join
from dovetail.plugins.attention.triton.per_warp import unpair
from dovetail.plugins.attention.triton.scores import LOG2_E, LOW, cap_scores
from dovetail.plugins.attention.triton.tiles import WARP_KEYS

DEEP = gl.constexpr(WARP_KEYS)
"""Keys of a warp in a slab, as many as one matrix instruction sums over."""


@gluon.jit
def _load_plan(pointers, mask=None, other=None):
    """Load from the plan, bypassing L1, which before the wait may hold the last step's plan at these addresses."""
    return gl.load(pointers, mask=mask, other=other, cache_modifier=".cg")


@gluon.jit
def _seen(key, seen_from, end, WINDOW: gl.constexpr):
    seen = key < end
    if WINDOW:
        seen = seen & (key >= seen_from)
    return seen


@gluon.jit
def _pages(table, key, seen_from, end, WINDOW: gl.constexpr, PAGE: gl.constexpr):
    return _load_plan(table + key // PAGE, _seen(key, seen_from, end, WINDOW), 0)


@gluon.jit
def _fetch(k_at, v_at, k_places, v_places, place, page, key, column, seen_from, end, wanted, K: gl.constexpr,
           D: gl.constexpr, BLOCK_D: gl.constexpr, WINDOW: gl.constexpr, PAGE: gl.constexpr):  # fmt: skip
    """Start copying a block's K and V if `wanted`; zeros for unseen keys and for columns past D. k_at, v_at: pointers
    to the columns of the first slot."""
    slot = ((page.to(gl.int64) * PAGE + key % PAGE) * (K * D))[:, None]
    seen = _seen(key, seen_from, end, WINDOW)[:, None]
    if BLOCK_D != D:
        seen = seen & (column < D)
    if wanted:
        async_copy.async_copy_global_to_shared(k_places.index(place), k_at + slot, mask=seen)
    async_copy.commit_group()
    if wanted:
        async_copy.async_copy_global_to_shared(v_places.index(place), v_at + slot, mask=seen)
    async_copy.commit_group()


@gluon.jit
def _angles(rope_ptr, position, dims, HALF: gl.constexpr):
    """Load the cosines and sines of a position. HALF: rotary pairs."""
    cos, sin = 0.0, 0.0
    if rope_ptr is not None:
        row = rope_ptr + position.to(gl.int64) * (2 * HALF)
        pair = gl.where(dims < HALF, dims, dims - HALF)
        cos = gl.load(row + pair, mask=dims < 2 * HALF, other=1.0)
        sin = gl.load(row + HALF + pair, mask=dims < 2 * HALF, other=0.0)
    return cos, sin


@gluon.jit
def _with_partners(x_ptr, dims, ok, HALF: gl.constexpr):
    """Load the values at x_ptr and the partners with which they are rotated; zeros if x_ptr is None."""
    x, y = 0.0, 0.0
    if x_ptr is not None:
        partner = gl.where(dims < HALF, dims + HALF, dims - HALF)
        x = gl.load(x_ptr + dims, mask=ok, other=0.0)
        y = gl.load(x_ptr + partner, mask=ok & (dims < 2 * HALF), other=0.0)
    return x, y


@gluon.jit
def _norm_rotate(loaded, weights, angles, eps, dims, NORM: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr):
    """Norm and rotate heads like core.ops.kv_write."""
    x, y = loaded
    dtype: gl.constexpr = x.dtype
    x = x.to(gl.float32)
    y = y.to(gl.float32)
    if NORM:
        weight, other = weights
        inverse = gl.rsqrt(gl.sum(x * x, axis=1) / D + eps)[:, None]
        x = weigh(x * inverse, weight.to(gl.float32), dtype, weight.dtype).to(gl.float32)
        y = weigh(y * inverse, other.to(gl.float32), dtype, weight.dtype).to(gl.float32)
    if HALF:
        cos, sin = angles
        x = x * cos + gl.where(dims < HALF, -y, y) * sin
    return x.to(dtype)


@gluon.jit
def _stored(x, scale, KV: gl.constexpr, LARGEST: gl.constexpr):
    """Convert to the pages' format: divided by the scale and clamped if it has 8 bits."""
    if LARGEST is not None:
        x = gl.maximum(gl.minimum(x.to(gl.float32) / scale, LARGEST), -LARGEST)
    return x.to(KV)


@gluon.jit
def _block(q, acc, odd, total, m, n, place, k_smem, v_smem, seen_from, end, at_m, qk_scale, WINDOW: gl.constexpr,
           SLABS: gl.constexpr, PLACES: gl.constexpr, WARPS: gl.constexpr, M: gl.constexpr, Q: gl.constexpr,
           KV: gl.constexpr, SOFT_CAP: gl.constexpr):  # fmt: skip
    """Process one block of keys. K and V of unseen keys are zeros. at_m: index of each query's own key, if Q > 1."""
    SLAB: gl.constexpr = WARPS * DEEP
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LSM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    K_OPERAND: gl.constexpr = gl.DotOperandLayout(0, S, 32 // KV.primitive_bitwidth)
    V_OPERAND: gl.constexpr = gl.DotOperandLayout(0, LSM, 2)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(1, LSM, 2)
    # Of the copy groups in flight, some of them empty, 2 * PLACES - 1 follow this block's keys.
    async_copy.wait_group(2 * PLACES - 1)
    scores = ()
    new_m = m
    for j in gl.static_range(SLABS):
        k = k_smem.index(place * SLABS + j).load(K_OPERAND).to(q.dtype)
        s = mma_v2(k, q, gl.zeros([SLAB, M], gl.float32, S)) * qk_scale
        if SOFT_CAP is not None:
            s = cap_scores(s, SOFT_CAP)
        s = gl.convert_layout(gl.reshape(s, [WARPS, DEEP, M]), LSM, assert_trivial=True)
        warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, LSM)))
        deep = gl.arange(0, DEEP, gl.SliceLayout(0, gl.SliceLayout(2, LSM)))
        key = n + j * SLAB + warp[:, None] * DEEP + deep[None, :]
        seen = _seen(key, seen_from, end, WINDOW)[:, :, None]
        if Q > 1:
            own = at_m[None, :][:, None, :]
            seen = seen & (key[:, :, None] <= own)
            if WINDOW:
                seen = seen & (key[:, :, None] > own - WINDOW)
        s = gl.where(seen, s, float("-inf"))
        new_m = gl.maximum(new_m, gl.max(s, axis=1))
        scores = scores + (s,)  # type: ignore[assignment]
    alpha = gl.exp2(m - new_m)
    total = total * alpha
    acc = acc * alpha[:, None, :]
    if KV.primitive_bitwidth == 8:
        odd = odd * alpha[:, None, :]
    async_copy.wait_group(2 * PLACES - 2)
    for j in gl.static_range(SLABS):
        p = gl.exp2(scores[j] - new_m[:, None, :])
        total += gl.sum(p, axis=1)
        p = gl.convert_layout(p.to(q.dtype), P_OPERAND)
        v = v_smem.index(place * SLABS + j).permute((0, 2, 1)).load(V_OPERAND)
        if KV.primitive_bitwidth == 8:
            even_v, odd_v = unpair(v, KV == gl.float8e4nv)
            acc = mma_v2(even_v, p, acc)
            odd = mma_v2(odd_v, p, odd)
        else:
            acc = mma_v2(v, p, acc)
    return acc, odd, total, new_m


@gluon.jit(do_not_specialize=["table_stride"])
def attend_decode(
    q_ptr,
    out_ptr,
    mail_ptr,
    items_ptr,
    first_pages_ptr,
    table_ptr,
    table_stride,
    scale,
    k_scale,
    v_scale,
    sinks_ptr,
    k_ptr,
    v_ptr,
    rope_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    M: gl.constexpr,
    Q: gl.constexpr,
    WINDOW: gl.constexpr,
    PAGE: gl.constexpr,
    GRAIN: gl.constexpr,
    SLABS: gl.constexpr,
    PLACES: gl.constexpr,
    HEAD_SCALES: gl.constexpr,
    WRITES: gl.constexpr,
    HALF: gl.constexpr,
    LARGEST: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program (kv head and head tile, item). K and V are pages [slots, K, D]. Q: most tokens of an item; with more than
    one, an item has all heads of a kv head for each of them, Q * H / K <= M. With WRITES, for Q = 1, q_ptr holds q|k|v
    before norm and rotary. PLACES: blocks in flight. first_pages: page ids of each item's first PLACES blocks, one per
    GRAIN keys. mail: BLOCK_D + 1 rows of M words for each program. Other arguments are as in attend_items."""
    if PDL:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    SLAB: gl.constexpr = WARPS * DEEP
    SPAN: gl.constexpr = SLABS * SLAB
    GROUP: gl.constexpr = H // K
    TILES: gl.constexpr = 1 if Q > 1 else (GROUP + M - 1) // M
    KV: gl.constexpr = k_ptr.dtype.element_ty
    PAIRED: gl.constexpr = KV.primitive_bitwidth == 8
    W: gl.constexpr = BLOCK_D // 2 if PAIRED else BLOCK_D
    word: gl.constexpr = gl.int16 if PAIRED else KV
    # Swizzle in units of 16 bytes. LINE: keys in the 128 bytes of all banks.
    EACH: gl.constexpr = 128 // KV.primitive_bitwidth
    LINE: gl.constexpr = max(1, 8 * EACH // BLOCK_D)
    VALUES: gl.constexpr = gl.SwizzledSharedLayout(EACH, LINE, 8 // LINE, [1, 0])
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(8, LINE, 8 // LINE, [2, 1, 0])
    k_places = gl.allocate_shared_memory(KV, [PLACES, SPAN, BLOCK_D], VALUES)
    v_places = gl.allocate_shared_memory(KV, [PLACES, SPAN, BLOCK_D], VALUES)
    k_smem = k_places._reinterpret(KV, [PLACES * SLABS, SLAB, BLOCK_D], VALUES)
    v_smem = v_places._reinterpret(word, [PLACES * SLABS, WARPS, DEEP, W], WORDS)
    S: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    LSM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    COPY: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // BLOCK_D, BLOCK_D // EACH], [WARPS, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, BLOCK_D // 32], [1, 32], [WARPS, 1], [1, 0])
    unit = gl.program_id(0)
    kv_head = unit // TILES
    first_head = unit % TILES * M
    index = gl.program_id(1)
    offset = gl.arange(0, SPAN, gl.SliceLayout(1, COPY))
    # The plan is older than the preceding kernel (launch_plan.py), and so are all pages except the step's own keys.
    item = items_ptr + index * ITEM_FIELDS
    row = _load_plan(item)
    first = _load_plan(item + 1)
    count = _load_plan(item + 2) if Q > 1 else 1
    first_at = _load_plan(item + 3)
    seen_from = _load_plan(item + 4)
    lo = _load_plan(item + 5)
    hi = _load_plan(item + 6)
    part = _load_plan(item + 7)
    splits = _load_plan(item + 9)
    first_item = _load_plan(item + 10)
    pages = ()
    for i in gl.static_range(PLACES):
        entry = index * (PLACES * SPAN // GRAIN) + (i * SPAN + offset) // GRAIN
        pages = pages + (_load_plan(first_pages_ptr + entry),)  # type: ignore[assignment]
    table = table_ptr + row.to(gl.int64) * table_stride
    first = first.to(gl.int64)
    # A token of no row has a negative key index; use position 0 for it.
    position = gl.maximum(first_at, 0)
    head = gl.arange(0, M, gl.SliceLayout(1, WIDE))[:, None]
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, WIDE))[None, :]
    if HEAD_SCALES:
        k_scale = gl.load(k_scale + kv_head)
        v_scale = gl.load(v_scale + kv_head)
    # End of the keys that are read from pages.
    end = hi
    if WRITES:
        end = gl.minimum(hi, first_at)
        has_new = (row >= 0) & (first_at >= lo) & (first_at < hi)
        new_page = _load_plan(table + first_at // PAGE, has_new, 0)
    elif PDL:
        # The range includes the step's own keys, which the preceding kernels write.
        gdc_wait()
    column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, COPY))[None, :]
    k_at, v_at = k_ptr + kv_head * D + column, v_ptr + kv_head * D + column
    for i in gl.static_range(PLACES):
        key = lo + i * SPAN + offset
        wanted = lo + i * SPAN < end
        _fetch(
            k_at, v_at, k_places, v_places, i, pages[i], key, column, seen_from, end, wanted, K, D, BLOCK_D, WINDOW,
            PAGE,
        )  # fmt: skip
    key = lo + PLACES * SPAN + offset
    page = _pages(table, key, seen_from, end, WINDOW, PAGE)
    if WRITES:
        angles = _angles(rope_ptr, position, dims, HALF)
        q_weights = _with_partners(q_weight_ptr, dims, dims < D, HALF)
        k_weights = _with_partners(k_weight_ptr, dims, dims < D, HALF)
        if PDL:
            gdc_wait()
    if row < 0:
        return
    ok = (first_head + head < GROUP * count) & (dims < D)
    if WRITES:
        q_at = q_ptr + (first * (H + 2 * K) + kv_head * GROUP + first_head + head) * D
        loaded = _with_partners(q_at, dims, ok, HALF)
        q = _norm_rotate(loaded, q_weights, angles, eps, dims, q_weight_ptr is not None, D, HALF)
    else:
        q_at = first * H + kv_head * GROUP + first_head + head
        if Q > 1:
            q_at = (first + head // GROUP) * H + kv_head * GROUP + head % GROUP
        q = gl.load(q_ptr + q_at * D + dims, mask=ok, other=0.0)
    qk_scale = scale * LOG2_E * k_scale
    if PAIRED:
        q = (q.to(gl.float32) * scale).to(gl.float16)
        qk_scale = LOG2_E * k_scale
    # Layouts for joining the warps: a thread has four heads of a column, of all warps. If values are read in pairs,
    # even dims come first. The new key's score and value are computed here; in most ranges it has weight 0.
    OWN: gl.constexpr = gl.BlockedLayout([WARPS, 1, 4], [1, 128 // M, M // 4], [1, WARPS, 1], [2, 1, 0])
    LM: gl.constexpr = gl.SliceLayout(1, OWN)
    DM: gl.constexpr = gl.SliceLayout(0, OWN)
    place_d = gl.arange(0, BLOCK_D, gl.SliceLayout(1, DM))
    dim_d = place_d
    if PAIRED:
        dim_d = place_d % W * 2 + place_d // W
    fresh_score = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(0, LM))
    fresh_value = gl.zeros([BLOCK_D], gl.float32, gl.SliceLayout(1, DM))
    if WRITES:
        if has_new:
            from_ptr = q_ptr + (first * (H + 2 * K) + H + kv_head) * D
            to = (new_page.to(gl.int64) * PAGE + first_at % PAGE) * (K * D) + kv_head * D
            new_v = gl.load(from_ptr + K * D + dim_d, mask=dim_d < D, other=0.0)
            of_new = _with_partners(from_ptr, dims, dims < D, HALF)
            new_k = _norm_rotate(of_new, k_weights, angles, eps, dims, k_weight_ptr is not None, D, HALF)
            new_k = _stored(new_k, k_scale, KV, LARGEST)
            new_v = _stored(new_v, v_scale, KV, LARGEST)
            # One of the head tiles writes.
            gl.store(v_ptr + to + dim_d, new_v, mask=(dim_d < D) & (first_head == 0))
            gl.store(k_ptr + to + dims, new_k, mask=(dims < D) & (first_head == 0))
            found = gl.sum(q.to(gl.float32) * new_k.to(gl.float32), axis=1) * qk_scale
            if SOFT_CAP is not None:
                found = cap_scores(found, SOFT_CAP)
            fresh_score = gl.convert_layout(found, gl.SliceLayout(0, LM))
            fresh_value = new_v.to(gl.float32)
    q = gl.convert_layout(gl.permute(q, (1, 0)), gl.DotOperandLayout(1, S, 32 // KV.primitive_bitwidth))

    acc = gl.zeros([WARPS, W, M], gl.float32, LSM)
    odd = acc
    total = gl.zeros([WARPS, M], gl.float32, gl.SliceLayout(1, LSM))
    m = gl.full([WARPS, M], LOW, gl.float32, gl.SliceLayout(1, LSM))
    at_m = first_at
    if Q > 1:
        at_m = first_at + gl.arange(0, M, gl.SliceLayout(0, gl.SliceLayout(1, LSM))) // GROUP
    place = 0
    for n in range(lo, end, SPAN):
        # Look up pages one block ahead, so that copies do not wait for them.
        following = _pages(table, key + SPAN, seen_from, end, WINDOW, PAGE)
        acc, odd, total, m = _block(
            q, acc, odd, total, m, n, place, k_smem, v_smem, seen_from, end, at_m, qk_scale, WINDOW, SLABS, PLACES,
            WARPS, M, Q, KV, SOFT_CAP,
        )  # fmt: skip
        wanted = n + PLACES * SPAN < end
        if wanted:
            # Wait until all warps have read the block.
            barrier()
        _fetch(
            k_at, v_at, k_places, v_places, place, page, key, column, seen_from, end, wanted, K, D, BLOCK_D, WINDOW,
            PAGE,
        )  # fmt: skip
        place = gl.where(place == PLACES - 1, 0, place + 1)
        page = following
        key += SPAN
    async_copy.wait_group(0)

    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    outputs = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_D, M], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    peaks = gl.allocate_shared_memory(gl.float32, [WARPS, M], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [WARPS, M], FLAT)
    outputs.slice(0, W, 1).store(acc)
    if PAIRED:
        outputs.slice(W, W, 1).store(odd)
    peaks.store(m)
    sums.store(total)
    barrier()
    peak = peaks.load(LM)
    top = gl.maximum(gl.max(peak, axis=0), fresh_score)
    if sinks_ptr is not None:
        # The first range of a row counts its sink, a score without a value.
        own_head = first_head + gl.arange(0, M, gl.SliceLayout(0, LM))
        counts_sink = (own_head < GROUP * count) & (index == first_item)
        sink = gl.load(sinks_ptr + kv_head * GROUP + own_head % GROUP, mask=counts_sink, other=float("-inf")) * LOG2_E
        top = gl.maximum(top, sink)
    weight = gl.exp2(peak - top[None, :])
    fresh_weight = gl.exp2(fresh_score - top)
    whole = gl.sum(sums.load(LM) * weight, axis=0) + fresh_weight
    if sinks_ptr is not None:
        whole += gl.exp2(sink - top)
    y = gl.sum(outputs.load(OWN) * gl.expand_dims(weight, 1), axis=0)
    y += fresh_value[:, None] * gl.convert_layout(fresh_weight, gl.SliceLayout(0, DM))[None, :]
    # A query that saw no key gives zeros.
    factor = gl.convert_layout(v_scale / gl.where(whole > 0, whole, 1.0), gl.SliceLayout(0, DM))
    y = y * factor[None, :]
    head_m = gl.arange(0, M, gl.SliceLayout(0, DM))
    lse = gl.convert_layout(gl.where(whole > 0, top + gl.log2(whole), float("-inf")), gl.SliceLayout(0, DM))
    lse = lse[None, :] + gl.zeros([BLOCK_D, M], gl.float32, DM)
    # The last range of each group joins the group, and the row's last range joins the groups.
    place = index - first_item
    last = place == splits - 1
    if (part >= 0) & (last | (place % JOIN_GROUP == JOIN_GROUP - 1)):
        far = gl.where(last, place // JOIN_GROUP, 0)
        y, lse = join(y, lse, mail_ptr, index, place % JOIN_GROUP, far, unit, K * TILES, BLOCK_D, M)
    if (part >= 0) & (place < splits - 1):
        box = mail_ptr + (index.to(gl.int64) * (K * TILES) + unit) * ((BLOCK_D + 1) * M)
        gl.store(box + place_d[:, None] * M + head_m[None, :], as_message(y))
        box += BLOCK_D * M
        gl.store(box + place_d[:, None] * 0 + head_m[None, :], as_message(lse), mask=(place_d == 0)[:, None])
    else:
        head_m += first_head
        out_m = first * H + kv_head * GROUP + head_m
        if Q > 1:
            out_m = (first + head_m // GROUP) * H + kv_head * GROUP + head_m % GROUP
        out = out_ptr + out_m[None, :] * D + dim_d[:, None]
        gl.store(out, y.to(out_ptr.dtype.element_ty), mask=(head_m < GROUP * count)[None, :] & (dim_d < D)[:, None])
