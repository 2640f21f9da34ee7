"""Bookkeeping kernels of a step: layout of tokens and pages, draft verification by matching.

Shapes: T tokens, B rows, S slots, L token capacity, P pages of a table, N rows of logits, R rows that sample, W sampled
positions of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.ops.kernels.draw import hashes, mix
from dovetail.core.ops.random import Purpose
from dovetail.core.ops.samples import SampleInputs
from dovetail.core.ops.step import Accepted, PageLayout, TokenLayout


@triton.jit(do_not_specialize=["rows", "decodes", "total", "parts", "padding"])
def _lay_out_tokens(
    slots_ptr,
    row_start_ptr,
    computed_ptr,
    tokens_ptr,
    tokens_stride,
    ids_ptr,
    positions_ptr,
    rows_ptr,
    token_slots_ptr,
    live_ptr,
    drafts_ptr,
    kv_len_ptr,
    rows,
    decodes,
    total,
    parts,
    padding,
    BLOCK: tl.constexpr,
):
    """Program (row, part). Row `rows` is the padding, which may be longer than every row."""
    row = tl.program_id(0)
    first = tl.load(row_start_ptr + row)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if row == rows:
        nothing = tl.zeros((BLOCK,), tl.int64)
        for begin in range(first, total, parts * BLOCK):
            to = begin + index
            ok = to < total
            tl.store(ids_ptr + to, nothing.to(tl.int32), mask=ok)
            tl.store(positions_ptr + to, nothing, mask=ok)
            tl.store(rows_ptr + to, nothing, mask=ok)
            tl.store(token_slots_ptr + to, nothing + padding, mask=ok)
            tl.store(live_ptr + to, nothing.to(tl.int8), mask=ok)
        return
    slot = tl.load(slots_ptr + row)
    count = tl.load(row_start_ptr + row + 1) - first
    start = tl.load(computed_ptr + slot)
    ok = index < count
    position = start + index
    to = first + index
    tl.store(ids_ptr + to, tl.load(tokens_ptr + slot * tokens_stride + position, mask=ok, other=0), mask=ok)
    tl.store(positions_ptr + to, position, mask=ok)
    tl.store(rows_ptr + to, tl.zeros((BLOCK,), tl.int64) + row, mask=ok)
    tl.store(token_slots_ptr + to, tl.zeros((BLOCK,), tl.int64) + slot, mask=ok)
    last = count
    if drafts_ptr is not None:
        if row < decodes:
            last = tl.load(drafts_ptr + slot).to(tl.int32)
    live = (index <= last) & (slot != padding)
    tl.store(live_ptr + to, live.to(tl.int8), mask=ok)
    if tl.program_id(1) == 0:
        tl.store(kv_len_ptr + row, (start + count).to(tl.int32))


def lay_out_tokens_triton(
    slots_B: torch.Tensor,
    row_start_B1: torch.Tensor,
    computed_S: torch.Tensor,
    tokens_SL: torch.Tensor,
    total: int,
    longest: int,
    drafts_S: torch.Tensor | None = None,
    decodes: int = 0,
) -> TokenLayout:
    device = slots_B.device
    ids_T = torch.empty(total, dtype=torch.int32, device=device)
    # Align each tensor to 16 bytes. Otherwise Triton would compile separate kernels for odd totals.
    indices_3T = torch.empty(3, total + total % 2, dtype=torch.int64, device=device).narrow(1, 0, total)
    positions_T, rows_T, slots_T = indices_3T.unbind(0)
    live_T = torch.empty(total, dtype=torch.bool, device=device)
    kv_len_B = torch.empty(len(slots_B), dtype=torch.int32, device=device)
    block = 32 if longest <= 32 else 256
    parts = ceil_div(longest, block)
    _lay_out_tokens[len(slots_B) + 1, parts](
        slots_B,
        row_start_B1,
        computed_S,
        tokens_SL,
        tokens_SL.stride(0),
        ids_T,
        positions_T,
        rows_T,
        slots_T,
        live_T.view(torch.int8),
        drafts_S,
        kv_len_B,
        len(slots_B),
        decodes,
        total,
        parts,
        len(computed_S) - 1,
        BLOCK=block,
        num_warps=block // 64 or 1,
    )
    return TokenLayout(ids_T, positions_T, rows_T, slots_T, live_T, kv_len_B)


@triton.jit(do_not_specialize=["rows", "total"])
def _lay_out_pages(
    slots_ptr,
    token_slots_ptr,
    positions_ptr,
    table_ptr,
    given_ptr,
    page_table_ptr,
    write_ptr,
    rows,
    total,
    P: tl.constexpr,
    PAGE: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first programs each copy COPY pages of a row's table; the others each place BLOCK tokens."""
    program = tl.program_id(0)
    PARTS: tl.constexpr = (P + COPY - 1) // COPY
    if program < rows * PARTS:
        row = program // PARTS
        index = program % PARTS * COPY + tl.arange(0, COPY)
        pages = tl.load(table_ptr + tl.load(slots_ptr + row) * P + index, mask=index < P)
        tl.store(page_table_ptr + row.to(tl.int64) * P + index, pages, mask=index < P)
    else:
        token = (program - rows * PARTS) * BLOCK + tl.arange(0, BLOCK)
        ok = token < total
        slot = tl.load(token_slots_ptr + token, mask=ok, other=0)
        position = tl.load(positions_ptr + token, mask=ok, other=0)
        page = tl.load(table_ptr + slot * P + position // PAGE, mask=ok, other=0).to(tl.int64)
        given = position < tl.load(given_ptr + slot, mask=ok, other=0)
        page = tl.where(given, 0, page)
        tl.store(write_ptr + token, page * PAGE + position % PAGE, mask=ok)


def lay_out_pages_triton(
    slots_B: torch.Tensor, tokens: TokenLayout, table_SP: torch.Tensor, given_S: torch.Tensor, page_tokens: int
) -> PageLayout:
    rows, total, pages = len(slots_B), len(tokens.cache_T), table_SP.shape[1]
    page_table_BP = table_SP.new_empty(rows, pages)
    write_T = torch.empty_like(tokens.cache_T)
    block = 256
    # Several programs copy one table in parallel: a table of 131072 tokens has thousands of pages.
    copy = min(power_of_2(pages), 1024)
    _lay_out_pages[(rows * ceil_div(pages, copy) + ceil_div(total, block),)](
        slots_B,
        tokens.slots_T,
        tokens.cache_T,
        table_SP,
        given_S,
        page_table_BP,
        write_T,
        rows,
        total,
        P=pages,
        PAGE=page_tokens,
        COPY=copy,
        BLOCK=block,
        num_warps=2,
    )
    return PageLayout(page_table_BP, write_T)


@triton.jit(do_not_specialize=["last"], do_not_specialize_on_alignment=["samples_ptr"])
def _gather_samples(
    states_ptr,
    positions_ptr,
    samples_ptr,
    out_ptr,
    position_ptr,
    slots_n_ptr,
    slots_ptr,
    base_ptr,
    limit_ptr,
    last,
    C,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (n, part of the columns)."""
    n = tl.program_id(0).to(tl.int64)
    row = n // W
    w = n % W
    first = tl.load(samples_ptr + row * 3)
    slot = tl.load(samples_ptr + row * 3 + 1)
    limit = tl.load(samples_ptr + row * 3 + 2)
    token = tl.maximum(tl.minimum(first + tl.minimum(w, limit), last), 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < C
    tl.store(out_ptr + n * C + column, tl.load(states_ptr + token * C + column, mask=ok), mask=ok)
    if tl.program_id(1) == 0:
        base = tl.load(positions_ptr + tl.maximum(tl.minimum(first, last), 0)) + 1
        tl.store(position_ptr + n, tl.load(positions_ptr + token) + 1)
        tl.store(slots_n_ptr + n, slot)
        if w == 0:
            tl.store(slots_ptr + row, slot)
            tl.store(base_ptr + row, base)
            tl.store(limit_ptr + row, limit)


def gather_samples_triton(
    states_TC: torch.Tensor, positions_T: torch.Tensor, samples_R3: torch.Tensor, into: SampleInputs
) -> None:
    states_TC = states_TC.contiguous()
    channels, many = states_TC.shape[1], len(into.slots_N)
    block = min(2048, power_of_2(channels))
    _gather_samples[many, ceil_div(channels, block)](
        states_TC,
        positions_T,
        samples_R3,
        into.states_NC,
        into.position_N,
        into.slots_N,
        into.slots_R,
        into.base_R,
        into.limit_R,
        len(states_TC) - 1,
        channels,
        W=many // len(into.slots_R),
        BLOCK=block,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["vocab"], do_not_specialize_on_alignment=["slots_ptr", "lengths_ptr", "most_ptr"])
def _write_drafts(
    drafts_ptr,
    count_ptr,
    slots_ptr,
    lengths_ptr,
    most_ptr,
    tokens_ptr,
    tokens_stride,
    number_ptr,
    vocab,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    count = tl.minimum(tl.load(count_ptr + row).to(tl.int64), tl.load(most_ptr + row))
    k = tl.arange(0, BLOCK)
    draft = tl.load(drafts_ptr + row * K + k, mask=k < K, other=-1).to(tl.int64)
    ends = (k >= count) | (draft < 0) | (draft >= vocab)
    kept = tl.min(tl.where(ends, k, K), axis=0).to(tl.int64)
    place = tokens_ptr + slot * tokens_stride + tl.load(lengths_ptr + row) + k
    tl.store(place, tl.where(k < kept, draft, 0).to(tl.int32), mask=k < K)
    tl.store(number_ptr + slot, kept)


def write_drafts_triton(
    drafts_BK: torch.Tensor,
    count_B: torch.Tensor,
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    most_B: torch.Tensor,
    tokens_SL: torch.Tensor,
    drafts_S: torch.Tensor,
    vocab: int,
) -> None:
    drafts_BK = drafts_BK.contiguous()
    rows, most = drafts_BK.shape
    if rows:
        _write_drafts[(rows,)](
            drafts_BK,
            count_B.contiguous(),
            slots_B.contiguous(),
            lengths_B.contiguous(),
            most_B.contiguous(),
            tokens_SL,
            tokens_SL.stride(0),
            drafts_S,
            vocab,
            K=most,
            BLOCK=power_of_2(most),
            num_warps=1,
        )


@triton.jit(
    do_not_specialize_on_alignment=[
        *("slots_ptr", "base_ptr", "limit_ptr", "accepted_ptr", "lengths_ptr", "drafted_ptr"),
    ]
)
def _accept(
    drawn_ptr,
    slots_ptr,
    base_ptr,
    limit_ptr,
    tokens_ptr,
    tokens_stride,
    computed_ptr,
    drafts_ptr,
    accepted_ptr,
    lengths_ptr,
    drafted_ptr,
    padding,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    base = tl.load(base_ptr + row)
    count = tl.minimum(tl.load(drafts_ptr + slot), tl.load(limit_ptr + row))
    w = tl.arange(0, BLOCK)
    drawn = tl.load(drawn_ptr + row * W + w, mask=w < W, other=-1)
    place = tokens_ptr + slot * tokens_stride + base + w
    draft = tl.load(place, mask=w < W - 1, other=-1).to(tl.int64)
    disagree = (w >= count) | (drawn != draft)
    accepted = tl.min(tl.where(disagree, w, W - 1), axis=0).to(tl.int64)
    real = slot != padding
    # All threads must have read their drafts before any is overwritten.
    tl.debug_barrier()
    tl.store(place, tl.maximum(drawn, 0).to(tl.int32), mask=(w <= accepted) & real)
    if real:
        tl.store(computed_ptr + slot, base + accepted)
        tl.store(drafts_ptr + slot, tl.zeros((), tl.int64))
    tl.store(accepted_ptr + row, accepted)
    tl.store(lengths_ptr + row, base + accepted + 1)
    tl.store(drafted_ptr + row, count)


def accept_triton(
    tokens_RW: torch.Tensor,
    slots_R: torch.Tensor,
    base_R: torch.Tensor,
    limit_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    computed_S: torch.Tensor,
    drafts_S: torch.Tensor,
) -> Accepted:
    tokens_RW = tokens_RW.contiguous()
    rows, width = tokens_RW.shape
    accepted_R, lengths_R, drafted_R = torch.empty(3, rows, dtype=torch.int64, device=tokens_RW.device).unbind(0)
    if rows:
        _accept[(rows,)](
            tokens_RW,
            slots_R.contiguous(),
            base_R.contiguous(),
            limit_R.contiguous(),
            tokens_SL,
            tokens_SL.stride(0),
            computed_S,
            drafts_S,
            accepted_R,
            lengths_R,
            drafted_R,
            len(computed_S) - 1,
            W=width,
            BLOCK=power_of_2(width),
            num_warps=1,
        )
    return Accepted(accepted_R, lengths_R, drafted_R)


@triton.jit(do_not_specialize=["vocab"], do_not_specialize_on_alignment=["slots_ptr", "base_ptr"])
def _simulate(
    drawn_ptr,
    slots_ptr,
    base_ptr,
    tokens_ptr,
    tokens_stride,
    key_ptr,
    rate_ptr,
    out_ptr,
    vocab,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    PURPOSE: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    position = tl.load(base_ptr + row) + tl.arange(0, BLOCK)
    w = tl.arange(0, BLOCK)
    own = tl.load(drawn_ptr + row * W + w, mask=w < W, other=-1)
    draft = tl.load(tokens_ptr + slot * tokens_stride + position, mask=w < W - 1, other=0).to(tl.int64)
    a, b = hashes(tl.load(key_ptr + slot), position, PURPOSE)
    coin = ((mix(mix(a) ^ b) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    other = tl.where(own == draft, (draft + 1) % vocab, own)
    rate = tl.load(rate_ptr + w, mask=w < W - 1, other=0.0)
    agreed = tl.where(coin < rate, draft, other)
    tl.store(out_ptr + row * W + w, tl.where((own < 0) | (w == W - 1), own, agreed), mask=w < W)


def simulate_triton(
    tokens_RW: torch.Tensor,
    slots_R: torch.Tensor,
    base_R: torch.Tensor,
    tokens_SL: torch.Tensor,
    key_S: torch.Tensor,
    rate_K: torch.Tensor,
    vocab: int,
) -> torch.Tensor:
    """Return the tokens of core.worker.simulated_acceptance.simulate."""
    tokens_RW = tokens_RW.contiguous()
    rows, width = tokens_RW.shape
    out_RW = torch.empty_like(tokens_RW)
    if rows:
        _simulate[(rows,)](
            tokens_RW,
            slots_R.contiguous(),
            base_R.contiguous(),
            tokens_SL,
            tokens_SL.stride(0),
            key_S,
            rate_K,
            out_RW,
            vocab,
            W=width,
            BLOCK=power_of_2(width),
            PURPOSE=int(Purpose.SIMULATED),
            num_warps=1,
        )
    return out_RW
