"""Kernels of boundaries that shard the residual by rows. They use the mailbox protocol of kernels.py."""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.core.ops.kernels.launch import announce, wait
from dovetail.plugins.collective.symm_mem.kernels import (
    BOX_WORDS,
    EMPTY,
    fence,
    finish,
    keep_waiting,
    mailboxes,
    next_poll,
    receive,
    send,
)

_EMPTY = tl.constexpr(EMPTY)
_BOX = tl.constexpr(BOX_WORDS)


@triton.jit
def take(mail_ptr, place, inside, stop_ptr):
    """Wait for the words at place, empty the places and return the words."""
    words = tl.zeros_like(place)
    polls = tl.full((), 1, tl.int32)
    while polls > 0:
        alive = keep_waiting(stop_ptr, polls)
        words = tl.load(mail_ptr + place, mask=inside, other=0, volatile=True)
        polls = next_poll(tl.max((words == _EMPTY).to(tl.int32) * alive, axis=0), polls)
    tl.debug_barrier()
    tl.store(mail_ptr + place, tl.full(place.shape, _EMPTY, tl.int32), mask=inside)
    return words


@triton.jit
def _gather(
    gather_ptr,
    box,
    at,
    into_ptr,
    length,
    row_stride,
    word_stride,
    index,
    shard_rows,
    tokens,
    stop_ptr,
    WORLD: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Move the words [at, at + length) of each rank's part of a box to its row. One poll covers ROWS ranks, since each
    poll costs a round trip to memory."""
    flat = tl.arange(0, ROWS * WIDTH)
    word = flat % WIDTH
    for first in tl.static_range(0, WORLD, ROWS):
        source = first + flat // WIDTH
        row = source * shard_rows + index
        # Rows of ranks >= WORLD are past the last token, too.
        there = (word < length) & (row < tokens)
        words = take(gather_ptr, box + source * _BOX + at + word, there, stop_ptr)
        to = into_ptr + row * row_stride + word * word_stride
        tl.store(to, words.to(into_ptr.dtype.element_ty, bitcast=True), mask=there)


@triton.jit(do_not_specialize=["tokens", "shard_rows"])
def sharded(
    x_ptr,
    out_ptr,
    residual_ptr,
    after_ptr,
    weight_ptr,
    plain_ptr,
    plain_words_ptr,
    values_words_ptr,
    peers_ptr,
    mail_ptr,
    gather_peers_ptr,
    gather_ptr,
    half_ptr,
    stop_ptr,
    rank,
    tokens,
    shard_rows,
    length,
    values_length,
    values_at,
    scale_at,
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
    WORLD: tl.constexpr,
    PER: tl.constexpr,
    VALUES: tl.constexpr,
    VALUES_WORDS: tl.constexpr,
    PLAIN_ROWS: tl.constexpr,
    VALUES_ROWS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each rank sums rows [rank * shard_rows, (rank + 1) * shard_rows), adds its shard of the residual, normalizes and
    encodes them, and sends the result to every rank. Programs iterate over rows.

    Arguments as in two_shot, but out and residual have `shard_rows` rows. Summands go through the boxes of one_shot,
    results through the gather boxes: plain words, then encoded words at values_at, then scales at scale_at. Rank 0 has
    a row in every iteration, so a rank that ends one knows that all ranks have begun it. ..._ROWS: ranks per poll.
    """
    announce(PDL)
    program = tl.program_id(0)
    dtype = out_ptr.dtype.element_ty
    encoding = (values_ptr, scale_ptr, static_ptr, pre_ptr, place_ptr, width, scale_st, scale_sg, sums_ptr)
    columns = tl.arange(0, VALUES)
    words = tl.arange(0, VALUES // PER)
    inside = columns < length * PER
    words_inside = words < length
    encoded = tl.arange(0, VALUES_WORDS)
    encoded_inside = encoded < values_length
    groups = tl.arange(0, VALUES // GROUP)
    groups_inside = groups * GROUP < length * PER
    wait(PDL)
    half = tl.load(half_ptr + program)
    for index in range(program, shard_rows, tl.num_programs(0)):
        if index != program:
            # As in two_shot.
            fence()
        box = (program * 2 + half) * (WORLD * _BOX)
        for i in tl.static_range(WORLD):
            owner = (rank + 1 + i) % WORLD
            theirs = owner * shard_rows + index
            ok = words_inside & (theirs < tokens)
            summand = tl.load(x_ptr + theirs * length + words, mask=ok, other=0)
            summand = tl.where(summand == _EMPTY, 0, summand)
            to = tl.load(peers_ptr + owner).to(tl.pointer_type(tl.int32))
            tl.store(tl.multiple_of(to, 16) + box + rank * _BOX + words, summand, mask=ok)
        row = rank * shard_rows + index
        if row < tokens:
            residual = 0.0
            if residual_ptr is not None:
                residual = tl.load(residual_ptr + index * length * PER + columns, mask=inside, other=0.0).to(tl.float32)
            total = receive(mail_ptr, box + words, _BOX, words_inside, stop_ptr, dtype, WORLD, VALUES)
            # Loaded only now: the polled words need the registers.
            weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
            own_ptr = out_ptr - rank * shard_rows * length * PER
            C = length * PER
            finish(
                total, row, inside, own_ptr, residual, after_ptr, after_eps, weight, plain_ptr, C, eps, encoding,
                weight_ptr, ENCODE, GROUP, SUMS, True, VALUES,
            )  # fmt: skip
            # The sent words are read back from this program's output, whatever its dtype.
            tl.debug_barrier()
            part = box + rank * _BOX
            if plain_ptr is not None:
                own = tl.load(plain_words_ptr + row * length + words, mask=words_inside, other=0, cache_modifier=".cg")
                send(own, part + words, words_inside, mailboxes(gather_peers_ptr, rank, WORLD))
            if ENCODE is not None:
                at = values_words_ptr + row * values_length + encoded
                values = tl.load(at, mask=encoded_inside, other=0, cache_modifier=".cg")
                send(values, part + values_at + encoded, encoded_inside, mailboxes(gather_peers_ptr, rank, WORLD))
            if scale_ptr is not None:
                at_scale = scale_ptr + row * scale_st + groups * scale_sg
                scale = tl.load(at_scale, mask=groups_inside, other=0.0, cache_modifier=".cg")
                bits = scale.to(tl.int32, bitcast=True)
                send(bits, part + scale_at + groups, groups_inside, mailboxes(gather_peers_ptr, rank, WORLD))
        # This rank's own row, too: so the replacement of EMPTY is the same on every rank.
        if plain_ptr is not None:
            _gather(gather_ptr, box, 0, plain_words_ptr, length, length, 1, index, shard_rows, tokens, stop_ptr,
                    WORLD, VALUES // PER, PLAIN_ROWS)  # fmt: skip
        if ENCODE is not None:
            _gather(gather_ptr, box, values_at, values_words_ptr, values_length, values_length, 1, index, shard_rows,
                    tokens, stop_ptr, WORLD, VALUES_WORDS, VALUES_ROWS)  # fmt: skip
        if scale_ptr is not None:
            _gather(gather_ptr, box, scale_at, scale_ptr, tl.cdiv(length * PER, GROUP), scale_st, scale_sg, index,
                    shard_rows, tokens, stop_ptr, WORLD, VALUES // GROUP, SCALE_ROWS)  # fmt: skip
        half = 1 - half
    tl.store(half_ptr + program, half)


@triton.jit(do_not_specialize=["rows"])
def sum_copies(
    inbox_ptr,
    own_ptr,
    out_ptr,
    residual_ptr,
    after_ptr,
    weight_ptr,
    plain_ptr,
    rank,
    rows,
    C,
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
    VALUES: tl.constexpr,
):
    """Sum `rows` rows from every rank in rank order in float32. This rank's own rows are not in the inbox. out and
    residual have `rows` rows; the normalized outputs have the rows of all ranks, of which this rank's are written."""
    row = tl.program_id(0).to(tl.int64)
    encoding = (values_ptr, scale_ptr, static_ptr, pre_ptr, place_ptr, width, scale_st, scale_sg, sums_ptr)
    columns = tl.arange(0, VALUES)
    inside = columns < C
    place = row * C + columns
    shard_size = rows.to(tl.int64) * C
    total = tl.zeros((VALUES,), tl.float32)
    for source in tl.static_range(WORLD):
        sent = tl.load(inbox_ptr + source * shard_size + place, mask=inside & (rank != source), other=0.0)
        own = tl.load(own_ptr + place, mask=inside & (rank == source), other=0.0)
        total += sent.to(tl.float32) + own.to(tl.float32)
    residual = 0.0
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    weight = 0.0
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    own_row = rank * rows + row
    own_ptr = out_ptr - rank * shard_size
    finish(
        total, own_row, inside, own_ptr, residual, after_ptr, after_eps, weight, plain_ptr, C, eps, encoding,
        weight_ptr, ENCODE, GROUP, SUMS, NORM, VALUES,
    )  # fmt: skip
