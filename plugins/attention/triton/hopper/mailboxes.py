"""Joining of a row's ranges through mailboxes, for `attend_decode`.

Ranges of a long row are joined without counters and fences. A mailbox holds EMPTY until data arrives, and ranges never
send EMPTY (like NCCL's LL protocol). The last of a group of ranges polls until no word is EMPTY, resets the mailboxes
to EMPTY, and sends the joined result to the row's last range. Programs start in the order of their items, so a program
waits only for programs that are already running.

Shapes: M query heads of a program, D (padded) head dim, R ranges that are read at once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dovetail.core.ops.kernels.gluon import barrier
from dovetail.plugins.attention.triton.scores import LOW
from dovetail.plugins.attention.triton.tiles import EMPTY

AT_ONCE = gl.constexpr(4)
"""Maximum number of ranges of a row whose mailboxes are read at once."""
WORDS = gl.constexpr(64)
"""Maximum number of words that a thread reads at once, since it keeps them in registers with their addresses."""
JOIN_GROUP = gl.constexpr(8)
"""Ranges of a row that are joined as a group."""
_EMPTY = gl.constexpr(EMPTY)


@gluon.jit
def _poll_mailboxes(values_ptr, lse_ptr, R: gl.constexpr, TIMES: gl.constexpr):
    """Poll the mailboxes of R ranges until all words have arrived. Return words [R, D, M] and logarithms.

    TIMES: number of columns per thread. A thread loads all its words at once and does not wait for other threads.
    """
    ASM: gl.constexpr = _poll_asm(R, TIMES)
    CONSTRAINTS: gl.constexpr = _poll_constraints(R, TIMES)
    return gl.inline_asm_elementwise(
        ASM,
        CONSTRAINTS,
        [values_ptr, lse_ptr],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=R * 4 * TIMES,
    )


@gluon.constexpr_function
def _poll_asm(ranges, times):
    """PTX of the polling loop. Operands of a thread: words, the logarithms of all its columns, then the addresses of
    both. Groups of four are contiguous."""
    count = ranges * 4
    words, logs = range(count * times), range(count * times, count * (times + 1))
    loads = [
        f"ld.relaxed.gpu.global.v4.b32 {{${at}, ${at + 1}, ${at + 2}, ${at + 3}}}, [${at + 2 * count * times}];"
        for at in (*words[::4], *logs[::4])
    ]
    # Use several chains of comparisons, since each comparison depends on the one before it.
    checks = [f"setp.eq.or.b32 p{i % 4}, ${word}, {EMPTY}, p{i % 4};" for i, word in enumerate((*words, *logs))]
    starts = [f"setp.ne.b32 p{i}, 0, 0;" for i in range(4)]
    together = "or.pred p0, p0, p1; or.pred p2, p2, p3; or.pred p0, p0, p2; @p0 bra more;"
    copies = [f"mov.b32 ${log + count * k}, ${log};" for k in range(1, times) for log in logs]
    return " ".join(["{.reg .pred p<4>;", "more:", *loads, *starts, *checks, together, *copies, "}"])


@gluon.constexpr_function
def _poll_constraints(ranges, times):
    count = 2 * ranges * 4 * times
    return ",".join(["=&r"] * count + ["l"] * count)


@gluon.jit
def as_message(x):
    bits = x.to(gl.int32, bitcast=True)
    return gl.where(bits == _EMPTY, 0x7FFFFFFF, bits)


@gluon.jit
def join(y, lse, mail_ptr, index, near, far, unit, UNITS: gl.constexpr, D: gl.constexpr, M: gl.constexpr):
    """Join y and lse [D, M] of a range with the mailboxes of the `near` items before it and of the last items of the
    `far` groups before them. The mailboxes are reset to EMPTY. unit: which of the UNITS programs of an item."""
    TIMES: gl.constexpr = max(1, D * M // (128 * gl.num_warps()))
    R: gl.constexpr = max(1, min(AT_ONCE, WORDS // (4 * TIMES)))
    RDM: gl.constexpr = gl.BlockedLayout([R, 1, 4], [1, 128 // M, M // 4], [1, gl.num_warps(), 1], [2, 1, 0])
    DM: gl.constexpr = gl.SliceLayout(0, RDM)
    BOX: gl.constexpr = (D + 1) * M
    row = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, DM))[:, None] * M, 0)
    head_m = gl.arange(0, M, gl.SliceLayout(0, DM))
    head = gl.expand_dims(head_m[None, :], 0)
    # A thread's four heads are contiguous and are loaded from the first one's address.
    four = gl.expand_dims((head_m // 4 * 4)[None, :], 0)
    range_r = gl.arange(0, R, gl.SliceLayout(1, gl.SliceLayout(2, RDM)))
    acc = gl.convert_layout(y, DM)
    top = gl.convert_layout(lse, DM)
    # A range without keys has a logarithm of minus infinity, which is weight 0.
    total = gl.where(top > LOW, 1.0, 0.0)
    top = gl.maximum(top, LOW)
    for base in range(0, near + far, R):
        # Indices past the last item repeat the last one with weight 0.
        back = gl.minimum(base + range_r, near + far - 1)
        at = index - 1 - gl.where(back < near, back, near + (back - near) * JOIN_GROUP)
        box = mail_ptr + gl.expand_dims(((at.to(gl.int64) * UNITS + unit) * BOX)[:, None], 2)
        there = gl.expand_dims((base + range_r < near + far)[:, None], 2)
        words, logs = _poll_mailboxes(box + (row + four), box + (row * 0 + four + D * M), R, TIMES)
        # Wait until all threads have read the logarithms.
        barrier()
        gl.store(box + (row + head), gl.full_like(words, _EMPTY), mask=there)
        gl.store(box + (head + D * M), gl.full([R, 1, M], _EMPTY, gl.int32, RDM), mask=there)
        logs = gl.where(there, logs.to(gl.float32, bitcast=True), float("-inf"))
        most = gl.maximum(top, gl.max(logs, axis=0))
        weight = gl.exp2(logs - gl.expand_dims(most, 0))
        alpha = gl.exp2(top - most)
        acc = acc * alpha + gl.sum(words.to(gl.float32, bitcast=True) * weight, axis=0)
        total = total * alpha + gl.sum(weight, axis=0)
        top = most
    y = gl.convert_layout(acc / gl.where(total > 0, total, 1.0), y.type.layout)
    lse = gl.where(total > 0, top + gl.log2(total), float("-inf"))
    return y, gl.convert_layout(lse, y.type.layout)
