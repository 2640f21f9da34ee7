"""All-reduce kernels that write into the other GPUs' memory, fused with residual, RMSNorm and encoding.

There are no flags. A mailbox holds EMPTY where nothing has arrived, and no rank sends EMPTY. The receiver polls until
no word is EMPTY (as NCCL's LL protocol and TensorRT-LLM's "Lamport" kernels do), then writes EMPTY back. A box has two
halves, used alternately. Two are enough: a peer refills a half only after its next call has ended. That call received
words which this rank sent after emptying the half (in two_shot perhaps through a third rank that summed them).
So there are no fences and no counters to reset, and captured graphs may be replayed in any order common to all ranks.

A program waits for the program of the same index on every rank, so all programs of a launch must be resident: grids are
capped (`Mailbox.boxes`, and TWO_SHOT_PROGRAMS times that). Words have 32 bits, which a GPU stores atomically. They hold
one float32 or two 16-bit values. Sums run in rank order in float32: the same bits on every rank.

A row is the unit that one program sums: a token's channels, or a piece of a flat tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.core.ops.kernels.formats import encode_row
from dovetail.core.ops.kernels.launch import announce, wait
from dovetail.core.ops.kernels.norm import normed

EMPTY: int = -0x7FFF8000
"""The word 0x80008000: two negative zeros in 16 bits, or a float32 of -5e-41. It is sent as 0."""
BOX_WORDS = 8192
"""Capacity of one rank's part of a box in words: the longest row."""

POLLS = 1 << 14
"""Polls of a mailbox per poll of the host's stop flag (about 10 ms). A power of two."""

_EMPTY = tl.constexpr(EMPTY)
_BOX = tl.constexpr(BOX_WORDS)
_POLLS = tl.constexpr(POLLS)


@triton.jit
def widen(words, DTYPE: tl.constexpr):
    """Unpack words into float32 values."""
    if DTYPE.primitive_bitwidth == 32:
        values = words.to(tl.float32, bitcast=True)
    else:
        low = (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        values = tl.interleave(low, high).to(tl.float32)
    return values


@triton.jit
def narrow(values, DTYPE: tl.constexpr, WORDS: tl.constexpr):
    """Round float32 values to DTYPE and pack them into words."""
    if DTYPE.primitive_bitwidth == 32:
        words = values.to(tl.int32, bitcast=True)
    else:
        bits = values.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        low, high = tl.split(tl.reshape(bits, (WORDS, 2)))
        words = low | (high << 16)
    return words


@triton.jit
def mailboxes(peers_ptr, rank, WORLD: tl.constexpr):
    """Load the mailbox addresses of all ranks, beginning with the next rank. They are constant, so load them before the
    grid-dependency wait; between stores each load would wait for the previous one."""
    found = ()
    for i in tl.static_range(WORLD):
        to = tl.load(peers_ptr + (rank + 1 + i) % WORLD).to(tl.pointer_type(tl.int32))
        found = found + (tl.multiple_of(to, 16),)  # type: ignore[assignment]
    return found


@triton.jit
def send(words, place, inside, boxes):
    """Write words to the same place in every mailbox."""
    words = tl.where(words == _EMPTY, 0, words)
    for i in tl.static_range(len(boxes)):
        tl.store(boxes[i] + place, words, mask=inside)


@triton.jit
def scatter(x_ptr, rank, part, part_length, size, inside, boxes, place):
    """Write each rank its part of x: words owner * part_length + part < `size`. Issue all loads before any store."""
    words = ()
    for i in tl.static_range(len(boxes)):
        theirs = (rank + 1 + i) % len(boxes) * part_length + part
        found = tl.load(x_ptr + theirs, mask=inside & (theirs < size), other=0)
        words = words + (tl.where(found == _EMPTY, 0, found),)
    for i in tl.static_range(len(boxes)):
        theirs = (rank + 1 + i) % len(boxes) * part_length + part
        tl.store(boxes[i] + place, words[i], mask=inside & (theirs < size))


@triton.jit
def keep_waiting(stop_ptr, polls):
    """Return 1, or 0 once a rank has died.

    The flag at stop_ptr is in device memory. Its source is a flag in host memory, like NCCL's abort flag, which no work
    of the device can delay; its address is two words after stop_ptr. Reading host memory is slow, so programs poll it
    rarely, and the first to find it set copies it to stop_ptr.
    """
    poll_host = polls == _POLLS
    host_flag_ptr = tl.load((stop_ptr + 2).to(tl.pointer_type(tl.int64)), mask=poll_host, other=0)
    host_flag = tl.load(host_flag_ptr.to(tl.pointer_type(tl.int32)), mask=poll_host, other=0, volatile=True)
    tl.store(stop_ptr, host_flag, mask=host_flag != 0)
    return (tl.load(stop_ptr, volatile=True) == 0).to(tl.int32)


@triton.jit
def next_poll(missing, polls):
    """Return the number of the next poll, from 1 to POLLS, or 0 if nothing is missing."""
    return missing * ((polls & (_POLLS - 1)) + 1)


@triton.jit
def receive(
    mail_ptr, place, stride, inside, stop_ptr, DTYPE: tl.constexpr, SOURCES: tl.constexpr, VALUES: tl.constexpr
):
    """Wait for the words at place, place + stride, ..., empty the places and return the sum. Does not wait once a rank
    has died (`keep_waiting` returns 0); sums are no longer valid then."""
    total = tl.zeros((VALUES,), tl.float32)
    polls = tl.full((), 1, tl.int32)
    while polls > 0:
        # Loaded first: after the words, this load would be issued only once they have arrived.
        alive = keep_waiting(stop_ptr, polls)
        total = tl.zeros((VALUES,), tl.float32)
        missing = tl.zeros_like(place)
        for source in tl.static_range(SOURCES):
            words = tl.load(mail_ptr + place + source * stride, mask=inside, other=0, volatile=True)
            missing = missing | (words == _EMPTY).to(tl.int32)
            total += widen(words, DTYPE)
        # Reduced over the program, so that all of its threads leave the loop together.
        polls = next_poll(tl.max(missing * alive, axis=0), polls)
    tl.debug_barrier()
    nothing = tl.full(place.shape, _EMPTY, tl.int32)
    for source in tl.static_range(SOURCES):
        tl.store(mail_ptr + place + source * stride, nothing, mask=inside)
    return total


@triton.jit
def encode_fp8(x_GC, scale_in):
    """Encode to E4M3 with a scale per token; used for measurements."""
    scale_G = tl.maximum(tl.max(tl.abs(x_GC), axis=1), 1e-10) / 448.0
    return (x_GC / scale_G[:, None]).to(tl.float8e4nv), scale_G


@triton.jit
def fence():
    """Make this program's earlier writes visible to all GPUs before its later writes."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [tl.full((), 0, tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@triton.jit
def finish(
    total,
    row,
    inside,
    out_ptr,
    residual,
    after_ptr,
    after_eps,
    weight,
    plain_ptr,
    C,
    eps,
    encoding,
    weight_ptr,
    ENCODE: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,
    NORM: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Store the sum. With NORM add the residual first, then normalize and encode as core.ops.kernels.norm does. after:
    norm of the sum before the residual is added. encoding: pointers and strides of `encode_row`."""
    dtype = out_ptr.dtype.element_ty
    place = row * C + tl.arange(0, VALUES)
    if after_ptr is not None:
        after = tl.load(after_ptr + tl.arange(0, VALUES), mask=inside, other=0.0).to(tl.float32)
        total = total.to(dtype).to(tl.float32)
        total = normed(total, after, C, after_eps, dtype, after_ptr.dtype.element_ty).to(tl.float32)
    rounded = (total + residual).to(dtype)
    tl.store(out_ptr + place, rounded, mask=inside)
    if NORM:
        x = rounded.to(tl.float32)
        y = normed(x, weight, C, eps, dtype, weight_ptr.dtype.element_ty)
        if plain_ptr is not None:
            tl.store(plain_ptr + place, y, mask=inside)
        if ENCODE is not None:
            y = y.to(tl.float32)
            values_ptr, scale_ptr, static_ptr, pre_ptr, place_ptr, width, st, sg, sums_ptr = encoding
            encode_row(
                y,
                row,
                0,
                C,
                values_ptr,
                scale_ptr,
                static_ptr,
                pre_ptr,
                place_ptr,
                width,
                st,
                sg,
                sums_ptr,
                ENCODE,
                GROUP,
                SUMS,
                VALUES,
            )


@triton.jit
def one_shot(
    x_ptr,
    out_ptr,
    residual_ptr,
    after_ptr,
    weight_ptr,
    plain_ptr,
    peers_ptr,
    mail_ptr,
    half_ptr,
    stop_ptr,
    rank,
    size,
    length,
    eps,
    after_eps,
    values_ptr,
    scale_ptr,
    static_ptr,
    pre_ptr,
    place_ptr,
    width,
    scale_st,
    scale_sg,
    sums_ptr,
    ENCODE: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,
    NORM: tl.constexpr,
    WORLD: tl.constexpr,
    SPLIT: tl.constexpr,
    PER: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every rank sends its row to every rank. SPLIT programs send parts of a row; the last of them receives it.

    x_ptr: words. size, length: words in total and per row. PER: values per word. VALUES: power of two, at least a
    row's values.
    """
    announce(PDL)
    row = tl.program_id(0)
    part = tl.program_id(1)
    dtype = out_ptr.dtype.element_ty
    encoding = (values_ptr, scale_ptr, static_ptr, pre_ptr, place_ptr, width, scale_st, scale_sg, sums_ptr)
    columns = tl.arange(0, VALUES)
    inside = (columns < length * PER) & (row * length * PER + columns < size * PER)
    weight = 1.0
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    boxes = mailboxes(peers_ptr, rank, WORLD)
    wait(PDL)
    half = tl.load(half_ptr + row)
    box = (row * 2 + half) * (WORLD * _BOX)
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
        # All parts have been sent, so all programs of the row have read half_ptr.
        tl.store(half_ptr + row, 1 - half)
        C = length * PER
        finish(
            total, row, inside, out_ptr, residual, after_ptr, after_eps, weight, plain_ptr, C, eps, encoding,
            weight_ptr, ENCODE, GROUP, SUMS, NORM, VALUES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def argmax_over_ranks(
    value_ptr,
    index_ptr,
    out_ptr,
    peers_ptr,
    mail_ptr,
    half_ptr,
    stop_ptr,
    rank,
    rows,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select each row's index of the largest value over ranks; ties take the least index. Uses one_shot's boxes."""
    announce(PDL)
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    row = program * BLOCK + place
    inside = row < rows
    boxes = mailboxes(peers_ptr, rank, WORLD)
    wait(PDL)
    half = tl.load(half_ptr + program)
    box = (program * 2 + half) * (WORLD * _BOX) + place
    value = tl.load(value_ptr + row, mask=inside, other=0.0)
    value = tl.where(value == value, value, float("-inf"))
    index = tl.load(index_ptr + row, mask=inside, other=0).to(tl.int32)
    send(value.to(tl.int32, bitcast=True), box + rank * _BOX, inside, boxes)
    send(index, box + rank * _BOX + BLOCK, inside, boxes)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.full((BLOCK,), 2147483647, tl.int32)
    polls = tl.full((), 1, tl.int32)
    while polls > 0:
        alive = keep_waiting(stop_ptr, polls)
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
        polls = next_poll(tl.max(missing * alive, axis=0), polls)
    tl.debug_barrier()
    nothing = tl.full((BLOCK,), _EMPTY, tl.int32)
    for source in tl.static_range(WORLD):
        tl.store(mail_ptr + box + source * _BOX, nothing, mask=inside)
        tl.store(mail_ptr + box + source * _BOX + BLOCK, nothing, mask=inside)
    tl.store(half_ptr + program, 1 - half)
    tl.store(out_ptr + row, at.to(tl.int64), mask=inside)


@triton.jit
def two_shot(
    x_ptr,
    out_ptr,
    residual_ptr,
    after_ptr,
    weight_ptr,
    plain_ptr,
    peers_ptr,
    mail_ptr,
    half_ptr,
    stop_ptr,
    rank,
    size,
    length,
    part_length,
    eps,
    after_eps,
    values_ptr,
    scale_ptr,
    static_ptr,
    pre_ptr,
    place_ptr,
    width,
    scale_st,
    scale_sg,
    sums_ptr,
    ENCODE: tl.constexpr,
    GROUP: tl.constexpr,
    SUMS: tl.constexpr,
    NORM: tl.constexpr,
    WORLD: tl.constexpr,
    PER: tl.constexpr,
    VALUES: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each rank sums 1/WORLD of each row and sends the sum to every rank. Programs iterate over rows.

    Arguments as in one_shot. part_length: words of a rank's part of a row, length / WORLD. PART: power of two, at least
    part_length. Half of a box: the summands from all ranks, then the sums.
    """
    announce(PDL)
    program = tl.program_id(0)
    dtype = out_ptr.dtype.element_ty
    encoding = (values_ptr, scale_ptr, static_ptr, pre_ptr, place_ptr, width, scale_st, scale_sg, sums_ptr)
    columns = tl.arange(0, VALUES)
    words = tl.arange(0, VALUES // PER)
    part = tl.arange(0, PART)
    weight = 1.0
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=columns < length * PER, other=0.0).to(tl.float32)
    boxes = mailboxes(peers_ptr, rank, WORLD)
    wait(PDL)
    half = tl.load(half_ptr + program)
    for row in range(program, tl.cdiv(size, length), tl.num_programs(0)):
        if row != program:
            # Makes the emptied half visible before a peer can write to it in the next iteration.
            fence()
        box = (program * 2 + half) * (2 * _BOX)
        inside = (columns < length * PER) & (row * length * PER + columns < size * PER)
        words_inside = (words < length) & (row * length + words < size)
        place = box + rank * (_BOX // WORLD) + part
        scatter(x_ptr + row * length, rank, part, part_length, size - row * length, part < part_length, boxes, place)
        residual = 0.0
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * length * PER + columns, mask=inside, other=0.0).to(tl.float32)
        mine = (part < part_length) & (row * length + rank * part_length + part < size)
        summed = receive(mail_ptr, box + part, _BOX // WORLD, mine, stop_ptr, dtype, WORLD, PART * PER)
        send(narrow(summed, dtype, PART), box + _BOX + rank * part_length + part, mine, boxes)
        total = receive(mail_ptr, box + _BOX + words, 0, words_inside, stop_ptr, dtype, 1, VALUES)
        C = length * PER
        finish(
            total, row, inside, out_ptr, residual, after_ptr, after_eps, weight, plain_ptr, C, eps, encoding,
            weight_ptr, ENCODE, GROUP, SUMS, NORM, VALUES,
        )  # fmt: skip
        half = 1 - half
    tl.store(half_ptr + program, half)
