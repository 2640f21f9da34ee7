"""All-reduce by kernels that write into the other GPUs' memory, with residual, RMSNorm and encoding folded in.

Nothing is signalled. A mailbox holds EMPTY wherever nothing has arrived, the sender never sends EMPTY, and the receiver
reads until no word is EMPTY (as NCCL's LL protocol and TensorRT-LLM's "Lamport" kernels do), then writes EMPTY back. A
box has two halves, used in turn. That is enough: a peer fills a half for the second time after its own next call has
ended, which took what this rank sent after it had emptied that half (in two_shot perhaps by way of a third rank, which
summed it). So there are no flags, no fences on the way and no counters to reset, and a captured graph may be replayed
in any order that all ranks share.

A program waits for the program of the same index on every rank, so all programs of a launch must be resident: grids are
capped (`Mailbox.boxes`, and TWO_SHOT_PROGRAMS times that). Words are 32 bits, which is what a GPU stores whole. They
hold one float32 or two 16-bit values, and sums run in rank order in float32: the same bits on every rank.

A row is what one program sums: a token's channels, or a piece of a flat tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.core.ops.kernels.formats import encode_row
from dovetail.core.ops.kernels.launch import announce, wait

EMPTY: int = -0x7FFF8000
"""The word 0x80008000: two negative zeros in 16 bits, or a float32 of -5e-41. Sent as 0 instead."""
BOX_WORDS = 8192
"""Capacity of one rank's part of a box: the longest row."""

LOOK = 1 << 14
"""Looks at a mailbox, a power of two, for one at the host's word: some 10 ms."""

_EMPTY = tl.constexpr(EMPTY)
_BOX = tl.constexpr(BOX_WORDS)
_LOOK = tl.constexpr(LOOK)


@triton.jit
def widen(words, DTYPE: tl.constexpr):
    """Values of words, in float32."""
    if DTYPE.primitive_bitwidth == 32:
        values = words.to(tl.float32, bitcast=True)
    else:
        low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        values = tl.interleave(low, high).to(tl.float32)
    return values


@triton.jit
def narrow(values, DTYPE: tl.constexpr, WORDS: tl.constexpr):
    """Words of float32 values, rounded to DTYPE."""
    if DTYPE.primitive_bitwidth == 32:
        words = values.to(tl.int32, bitcast=True)
    else:
        bits = values.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        low, high = tl.split(tl.reshape(bits, (WORDS, 2)))
        words = low | (high << 16)
    return words


@triton.jit
def mailboxes(peers_ptr, rank, WORLD: tl.constexpr):
    """Of all ranks, the next one's first. They never change: read them before the kernel waits, and not between two of
    its stores, where a load would wait for the load in front."""
    found = ()
    for i in tl.static_range(WORLD):
        to = tl.load(peers_ptr + (rank + 1 + i) % WORLD).to(tl.pointer_type(tl.int32))
        found = found + (tl.multiple_of(to, 16),)  # type: ignore[assignment]
    return found


@triton.jit
def send(words, place, inside, boxes):
    """Write words at the same place of every mailbox."""
    words = tl.where(words == _EMPTY, 0, words)
    for i in tl.static_range(len(boxes)):
        tl.store(boxes[i] + place, words, mask=inside)


@triton.jit
def deal(x_ptr, rank, part, share, size, inside, boxes, place):
    """Write to each rank its part of x, the words owner * share + part as far as they come before `size`. All are on
    their way from memory before the first is stored."""
    words = ()
    for i in tl.static_range(len(boxes)):
        theirs = (rank + 1 + i) % len(boxes) * share + part
        found = tl.load(x_ptr + theirs, mask=inside & (theirs < size), other=0)
        words = words + (tl.where(found == _EMPTY, 0, found),)
    for i in tl.static_range(len(boxes)):
        theirs = (rank + 1 + i) % len(boxes) * share + part
        tl.store(boxes[i] + place, words[i], mask=inside & (theirs < size))


@triton.jit
def going_on(stop_ptr, looks):
    """1, or 0 once a rank has died: the first word at stop_ptr, or, seldom, the one whose address stands two words on.

    That lies in the host's memory, as NCCL's abort flag does: nothing that the device does can be in its way. Read by
    all programs at once, it takes as long as many looks; who finds it set tells the others.
    """
    seldom = looks == _LOOK
    told_ptr = tl.load((stop_ptr + 2).to(tl.pointer_type(tl.int64)), mask=seldom, other=0)
    told = tl.load(told_ptr.to(tl.pointer_type(tl.int32)), mask=seldom, other=0, volatile=True)
    tl.store(stop_ptr, told, mask=told != 0)
    return (tl.load(stop_ptr, volatile=True) == 0).to(tl.int32)


@triton.jit
def again(missing, looks):
    """The number of the next look, from 1 to LOOK, or 0 where nothing is missing."""
    return missing * ((looks & (_LOOK - 1)) + 1)


@triton.jit
def receive(
    mail_ptr, place, stride, inside, stop_ptr, DTYPE: tl.constexpr, SOURCES: tl.constexpr, VALUES: tl.constexpr
):
    """Wait for the words at place, place + stride, ... and return their sum; the places are empty again then.

    Once `going_on` says no, nothing is waited for: a rank has died, and sums no longer count.
    """
    total = tl.zeros((VALUES,), tl.float32)
    looks = tl.full((), 1, tl.int32)
    while looks > 0:
        # Asked for first: behind the words, it would be asked for only when they have come.
        going = going_on(stop_ptr, looks)
        total = tl.zeros((VALUES,), tl.float32)
        missing = tl.zeros_like(place)
        for source in tl.static_range(SOURCES):
            words = tl.load(mail_ptr + place + source * stride, mask=inside, other=0, volatile=True)
            missing = missing | (words == _EMPTY).to(tl.int32)
            total += widen(words, DTYPE)
        # Reduced over the program, so that all of its threads leave together.
        looks = again(tl.max(missing * going, axis=0), looks)
    tl.debug_barrier()
    nothing = tl.full(place.shape, _EMPTY, tl.int32)
    for source in tl.static_range(SOURCES):
        tl.store(mail_ptr + place + source * stride, nothing, mask=inside)
    return total


@triton.jit
def encode_fp8(x_GC, scale_in):
    """E4M3 by token, to measure with."""
    scale_G = tl.maximum(tl.max(tl.abs(x_GC), axis=1), 1e-10) / 448.0
    return (x_GC / scale_G[:, None]).to(tl.float8e4nv), scale_G


@triton.jit
def fence():
    """What this program wrote before is seen by all GPUs before what it writes after."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [tl.full((), 0, tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@triton.jit
def finish(
    total,
    row,
    columns,
    inside,
    out_ptr,
    residual,
    weight,
    plain_ptr,
    C,
    eps,
    values_ptr,
    scale_ptr,
    static_ptr,
    pre_ptr,
    scale_st,
    scale_sg,
    ENCODE: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Store the sum; with NORM add the residual first, and norm and encode the result as core.ops.kernels.norm does."""
    dtype = out_ptr.dtype.element_ty
    place = row * C + columns
    rounded = (total + residual).to(dtype)
    tl.store(out_ptr + place, rounded, mask=inside)
    if NORM:
        x = rounded.to(tl.float32)
        scaled = x * tl.rsqrt(tl.sum(x * x, axis=0) / C + eps)
        y = (weight * scaled.to(dtype).to(tl.float32)).to(dtype)
        if plain_ptr is not None:
            tl.store(plain_ptr + place, y, mask=inside)
        if ENCODE is not None:
            encode_row(
                y.to(tl.float32),
                row,
                0,
                C,
                values_ptr,
                scale_ptr,
                static_ptr,
                pre_ptr,
                scale_st,
                scale_sg,
                ENCODE,
                GROUP,
                VALUES,
            )


@triton.jit
def one_shot(
    x_ptr,
    out_ptr,
    residual_ptr,
    weight_ptr,
    plain_ptr,
    peers_ptr,
    mail_ptr,
    turn_ptr,
    stop_ptr,
    rank,
    size,
    length,
    eps,
    values_ptr,
    scale_ptr,
    static_ptr,
    pre_ptr,
    scale_st,
    scale_sg,
    ENCODE: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    WORLD: tl.constexpr,
    SPLIT: tl.constexpr,
    PER: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every rank sends its row to every rank. SPLIT programs send parts of a row; the last of them receives it.

    x_ptr: words. size, length: words in all and in a row. PER: values a word. VALUES: a power of two, at least a row's.
    """
    announce(PDL)
    row = tl.program_id(0)
    part = tl.program_id(1)
    dtype = out_ptr.dtype.element_ty
    columns = tl.arange(0, VALUES)
    inside = (columns < length * PER) & (row * length * PER + columns < size * PER)
    weight = 1.0
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    boxes = mailboxes(peers_ptr, rank, WORLD)
    wait(PDL)
    turn = tl.load(turn_ptr + row)
    box = (row * 2 + turn) * (WORLD * _BOX)
    some = part * (VALUES // PER // SPLIT) + tl.arange(0, VALUES // PER // SPLIT)
    some_inside = (some < length) & (row * length + some < size)
    own = tl.load(x_ptr + row * length + some, mask=some_inside, other=0)
    send(own, box + rank * _BOX + some, some_inside, boxes)
    if part == SPLIT - 1:
        words = tl.arange(0, VALUES // PER)
        words_inside = (words < length) & (row * length + words < size)
        residual = 0.0
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * length * PER + columns, mask=inside, other=0.0).to(tl.float32)
        total = receive(mail_ptr, box + words, _BOX, words_inside, stop_ptr, dtype, WORLD, VALUES)
        # Every part has sent by now, so it has read the turn.
        tl.store(turn_ptr + row, 1 - turn)
        finish(
            total,
            row,
            columns,
            inside,
            out_ptr,
            residual,
            weight,
            plain_ptr,
            length * PER,
            eps,
            values_ptr,
            scale_ptr,
            static_ptr,
            pre_ptr,
            scale_st,
            scale_sg,
            ENCODE,
            GROUP,
            NORM,
            VALUES,
        )


@triton.jit(do_not_specialize=["rows"])
def choose(
    value_ptr,
    index_ptr,
    out_ptr,
    peers_ptr,
    mail_ptr,
    turn_ptr,
    stop_ptr,
    rank,
    rows,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of each row the index of the rank with the largest value, of equals the least. Through the boxes of one_shot."""
    announce(PDL)
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    row = program * BLOCK + place
    inside = row < rows
    boxes = mailboxes(peers_ptr, rank, WORLD)
    wait(PDL)
    turn = tl.load(turn_ptr + program)
    box = (program * 2 + turn) * (WORLD * _BOX) + place
    value = tl.load(value_ptr + row, mask=inside, other=0.0)
    value = tl.where(value == value, value, float("-inf"))
    index = tl.load(index_ptr + row, mask=inside, other=0).to(tl.int32)
    send(value.to(tl.int32, bitcast=True), box + rank * _BOX, inside, boxes)
    send(index, box + rank * _BOX + BLOCK, inside, boxes)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.full((BLOCK,), 2147483647, tl.int32)
    looks = tl.full((), 1, tl.int32)
    while looks > 0:
        going = going_on(stop_ptr, looks)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        at = tl.full((BLOCK,), 2147483647, tl.int32)
        missing = tl.zeros_like(place)
        for source in tl.static_range(WORLD):
            bits = tl.load(mail_ptr + box + source * _BOX, mask=inside, other=0, volatile=True)
            candidate = tl.load(mail_ptr + box + source * _BOX + BLOCK, mask=inside, other=0, volatile=True)
            missing = missing | ((bits == _EMPTY) | (candidate == _EMPTY)).to(tl.int32)
            score = bits.to(tl.float32, bitcast=True)
            wins = (score > best) | ((score == best) & (candidate < at))
            best = tl.where(wins, score, best)
            at = tl.where(wins, candidate, at)
        looks = again(tl.max(missing * going, axis=0), looks)
    tl.debug_barrier()
    nothing = tl.full((BLOCK,), _EMPTY, tl.int32)
    for source in tl.static_range(WORLD):
        tl.store(mail_ptr + box + source * _BOX, nothing, mask=inside)
        tl.store(mail_ptr + box + source * _BOX + BLOCK, nothing, mask=inside)
    tl.store(turn_ptr + program, 1 - turn)
    tl.store(out_ptr + row, at.to(tl.int64), mask=inside)


@triton.jit
def two_shot(
    x_ptr,
    out_ptr,
    residual_ptr,
    weight_ptr,
    plain_ptr,
    peers_ptr,
    mail_ptr,
    turn_ptr,
    stop_ptr,
    rank,
    size,
    length,
    share,
    eps,
    values_ptr,
    scale_ptr,
    static_ptr,
    pre_ptr,
    scale_st,
    scale_sg,
    ENCODE: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    WORLD: tl.constexpr,
    PER: tl.constexpr,
    VALUES: tl.constexpr,
    SHARE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each rank sums a WORLDth of each row and sends the sum to every rank. Programs go on to further rows.

    As in one_shot. share: words of a rank's part of a row, length / WORLD. SHARE: a power of two, at least that.
    A half of a box: what the ranks sent to be summed, then the sums.
    """
    announce(PDL)
    program = tl.program_id(0)
    dtype = out_ptr.dtype.element_ty
    columns = tl.arange(0, VALUES)
    words = tl.arange(0, VALUES // PER)
    part = tl.arange(0, SHARE)
    weight = 1.0
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=columns < length * PER, other=0.0).to(tl.float32)
    boxes = mailboxes(peers_ptr, rank, WORLD)
    wait(PDL)
    turn = tl.load(turn_ptr + program)
    for row in range(program, tl.cdiv(size, length), tl.num_programs(0)):
        if row != program:
            # What was emptied for the turn after this one is empty before a peer can come to it.
            fence()
        box = (program * 2 + turn) * (2 * _BOX)
        inside = (columns < length * PER) & (row * length * PER + columns < size * PER)
        words_inside = (words < length) & (row * length + words < size)
        place = box + rank * (_BOX // WORLD) + part
        deal(x_ptr + row * length, rank, part, share, size - row * length, part < share, boxes, place)
        residual = 0.0
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * length * PER + columns, mask=inside, other=0.0).to(tl.float32)
        mine = (part < share) & (row * length + rank * share + part < size)
        summed = receive(mail_ptr, box + part, _BOX // WORLD, mine, stop_ptr, dtype, WORLD, SHARE * PER)
        send(narrow(summed, dtype, SHARE), box + _BOX + rank * share + part, mine, boxes)
        total = receive(mail_ptr, box + _BOX + words, 0, words_inside, stop_ptr, dtype, 1, VALUES)
        finish(
            total,
            row,
            columns,
            inside,
            out_ptr,
            residual,
            weight,
            plain_ptr,
            length * PER,
            eps,
            values_ptr,
            scale_ptr,
            static_ptr,
            pre_ptr,
            scale_st,
            scale_sg,
            ENCODE,
            GROUP,
            NORM,
            VALUES,
        )
        turn = 1 - turn
    tl.store(turn_ptr + program, turn)
