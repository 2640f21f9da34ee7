"""Kernels that draw a token for each row of logits. Shapes: N rows of logits, S slots, V vocabulary, P parts of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda.libdevice import fast_log2f

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.ops.matmul import device_facts
from dovetail.core.ops.random import Purpose
from dovetail.core.ops.sampling_programs import DRAW, PART_COLUMNS, chosen_programs, parts_of

VOCAB_BLOCK = PART_COLUMNS
"""Logits that a program compares at a time."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["rows"])
def _gather_params(slots_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, of_a_ptr, of_b_ptr, of_c_ptr, of_d_ptr, of_e_ptr, rows,
                   BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = row < rows
    slot = tl.load(slots_ptr + row, mask=ok, other=0)
    tl.store(of_a_ptr + row, tl.load(a_ptr + slot, mask=ok), mask=ok)
    tl.store(of_b_ptr + row, tl.load(b_ptr + slot, mask=ok), mask=ok)
    tl.store(of_c_ptr + row, tl.load(c_ptr + slot, mask=ok), mask=ok)
    tl.store(of_d_ptr + row, tl.load(d_ptr + slot, mask=ok), mask=ok)
    tl.store(of_e_ptr + row, tl.load(e_ptr + slot, mask=ok), mask=ok)


def gather_params_triton(slots_N: torch.Tensor, *columns: torch.Tensor) -> list[torch.Tensor]:
    rows = len(slots_N)
    found = [column.new_empty(rows) for column in columns]
    if rows:
        _gather_params[(ceil_div(rows, 128),)](slots_N.contiguous(), *columns, *found, rows, BLOCK=128, num_warps=4)
    return found


@triton.jit
def mix(x):
    """core.ops.random._mix on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def noise_keys(position_ptr, key_ptr, row, PURPOSE: tl.constexpr):
    """Return the two hashes of a row's key and position, for `noise`."""
    return hashes(tl.load(key_ptr + row), tl.load(position_ptr + row), PURPOSE)


@triton.jit
def hashes(key, position, PURPOSE: tl.constexpr):
    """Return the two hashes of a key and positions, int64."""
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    place = ((position * 0x9E3779B1 + PURPOSE * 0x7F4A7C15) & 0xFFFFFFFF).to(tl.uint32)
    return mix(mix(low) ^ place), mix(mix(high ^ 0x5BD1E995) + place)


@triton.jit
def _log2(x, APPROX: tl.constexpr):
    if APPROX:
        return fast_log2f(x)
    return tl.log2(x)


@triton.jit
def noise(a, b, token, APPROX: tl.constexpr):
    """Return core.ops.random.gumbel / ln 2 for these tokens."""
    bits = mix(mix(a + token.to(tl.uint32) * 0x9E3779B9) ^ b)
    # The float that begins with these 23 bits is 1 + (bits >> 9) / 2^23. All of this is exact.
    uniform = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.99999994039535522
    rest = 1 - uniform
    # The hardware's logarithm is inexact near 1, where the largest noise is: there a series takes its place.
    series = rest * (1 + rest * (0.5 + rest * (0.33333333 + rest * (0.25 + rest * 0.2))))
    waited = tl.where(rest < 0.0625, series, _log2(uniform, APPROX) * -0.6931471805599453)
    return -_log2(waited, APPROX)


@triton.jit
def better(value_a, index_a, value_b, index_b):
    """Return the larger value and its index; ties go to the lower index."""
    left = (value_a > value_b) | ((value_a == value_b) & (index_a < index_b))
    return tl.where(left, value_a, value_b), tl.where(left, index_a, index_b)


@triton.jit
def _draw_parts(
    logits_ptr,
    position_ptr,
    temperature_ptr,
    key_ptr,
    least_ptr,
    drawn_ptr,
    value_ptr,
    index_ptr,
    V,
    part_columns,
    first,
    PURPOSE: tl.constexpr,
    RANDOM: tl.constexpr,
    APPROX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): find the best of `part_columns` logits. Column 0 of the row is token `first`. Rows whose
    entry of `drawn` is not -1 have their token."""
    row = tl.program_id(0).to(tl.int64)
    if drawn_ptr is not None:
        if tl.load(drawn_ptr + row) >= 0:
            return
    part = tl.program_id(1)
    begin = part * part_columns
    end = tl.minimum(begin + part_columns, V)
    temperature = 0.0
    if RANDOM:
        temperature = tl.load(temperature_ptr + row)
    least = float("-inf")
    if least_ptr is not None:
        least = tl.load(least_ptr + row)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.full((BLOCK,), 0, tl.int32) + begin
    peak = tl.full((BLOCK,), float("-inf"), tl.float32)
    if temperature > 0:
        a, b = noise_keys(position_ptr, key_ptr, row, PURPOSE)
        scale = LOG2_E / tl.maximum(temperature, 1e-30)
        for i in range(begin, end, BLOCK):
            x = tl.load(logits_ptr + row * V + i + lane, mask=i + lane < end, other=float("-inf")).to(tl.float32)
            peak = tl.maximum(peak, x, propagate_nan=tl.PropagateNan.ALL)
            y = x * scale + noise(a, b, first + i + lane, APPROX)
            if least_ptr is not None:
                y = tl.where(x >= least, y, float("-inf"))
            at = tl.where(y > best, i, at)
            best = tl.where(y > best, y, best)
        best *= 0.6931471805599453
    else:
        for i in range(begin, end, BLOCK):
            x = tl.load(logits_ptr + row * V + i + lane, mask=i + lane < end, other=float("-inf")).to(tl.float32)
            peak = tl.maximum(peak, x, propagate_nan=tl.PropagateNan.ALL)
            at = tl.where(x > best, i, at)
            best = tl.where(x > best, x, best)
    value, index = tl.reduce((best, first + at + lane), 0, better)
    # A row with NaN or +inf gets no token.
    invalid = tl.max(tl.where(peak < float("inf"), 0, 1), axis=0)
    tl.store(value_ptr + row * tl.num_programs(1) + part, tl.where(invalid > 0, float("inf"), value))
    tl.store(index_ptr + row * tl.num_programs(1) + part, index)


@triton.jit(do_not_specialize=["parts"])
def _draw_join(value_ptr, index_ptr, drawn_ptr, best_ptr, out_ptr, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if drawn_ptr is not None:
        drawn = tl.load(drawn_ptr + row)
        if drawn >= 0:
            tl.store(out_ptr + row, drawn.to(tl.int64))
            return
    part = tl.arange(0, BLOCK)
    value = tl.load(value_ptr + row * parts + part, mask=part < parts, other=float("-inf"))
    index = tl.load(index_ptr + row * parts + part, mask=part < parts, other=2147483647)
    value, index = tl.reduce((value, index), 0, better)
    tl.store(best_ptr + row, value)
    tl.store(out_ptr + row, tl.where(value == float("inf"), -1, index).to(tl.int64))


def has_fast_logarithm() -> bool:
    """Whether kernels may use the logarithm of NVIDIA GPUs, which neither other GPUs nor the interpreter have."""
    return torch.version.hip is None and not triton.knobs.runtime.interpret


def split_rows(op: str, logits_NV: torch.Tensor, most: int) -> int:
    """Return the number of programs for each row, at most `most`."""
    (rows, vocab), device = logits_NV.shape, logits_NV.device
    gpu = device_facts(device)[0] if logits_NV.is_cuda else ""
    programs = chosen_programs(op, gpu, vocab, str(logits_NV.dtype).removeprefix("torch."), rows)
    return parts_of(op, rows, most, programs)


def best_triton(
    logits_NV: torch.Tensor,
    position_N: torch.Tensor,
    temperature_N: torch.Tensor,
    key_N: torch.Tensor,
    random: bool,
    least_N: torch.Tensor | None = None,
    first: int = 0,
    drawn_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`drawn_N` (int32): tokens of rows that have been drawn, -1 = not yet; those rows have no score."""
    logits_NV = logits_NV.contiguous()
    rows, vocab = logits_NV.shape
    best_N = torch.empty(rows, device=logits_NV.device)
    out_N = torch.empty(rows, dtype=torch.int64, device=logits_NV.device)
    if not rows:
        return best_N, out_N
    most = ceil_div(vocab, VOCAB_BLOCK)
    parts = split_rows(DRAW, logits_NV, most)
    part_columns = ceil_div(ceil_div(vocab, parts), VOCAB_BLOCK) * VOCAB_BLOCK
    parts = ceil_div(vocab, part_columns)
    value = torch.empty(rows, parts, device=logits_NV.device)
    index = torch.empty(rows, parts, dtype=torch.int32, device=logits_NV.device)
    _draw_parts[rows, parts](
        logits_NV,
        position_N.contiguous(),
        temperature_N.contiguous(),
        key_N.contiguous(),
        least_N,
        drawn_N,
        value,
        index,
        vocab,
        part_columns,
        first,
        PURPOSE=int(Purpose.SAMPLE),
        RANDOM=random,
        APPROX=has_fast_logarithm(),
        BLOCK=VOCAB_BLOCK,
        num_warps=4,
    )
    _draw_join[(rows,)](value, index, drawn_N, best_N, out_N, parts, BLOCK=power_of_2(most), num_warps=1)
    return best_N, out_N
