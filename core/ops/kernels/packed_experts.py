"""Products of routed experts in MXFP4, whose codes are decoded in registers and multiplied from there.

Tiles, pairs and the two products are those of experts.py. Weights are the left operands, since tensor cores take those
from registers; the same bits of a span's words are consecutive inputs of one block (core.ops.packed_experts), so the
kernel multiplies one such strip after the other, and decoded weights never move between threads. Exponents are applied
in one of two ways:

- SUMS: to the float32 sums of strips. With few rows there are fewer of these than weights, and codes are exact in
  E4M3, which has no room for exponents.
- to decoded weights in registers, with more rows. bfloat16 holds both exactly; in float16 weights below 2^-24 are
  rounded.

With more than MOST_FP8_ROWS rows in a tile, sums of strips would fill the registers: x in E4M3 is converted to the
model's dtype, which is exact, and the second product's input keeps that dtype.

Shapes: T rows of a tile, O output, I inputs of a strip, G blocks of a row.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation
from dovetail.core.interfaces.expert import ExpertBias, GatedActivation, Routing
from dovetail.core.interfaces.weight import WeightFormat
from dovetail.core.ops.expert_tiles import (
    GROUPED,
    ExpertTile,
    packed_expert_tile,
    rows_of_tile,
    specialized_expert_tile,
    specialized_packed,
)
from dovetail.core.ops.formats import encode
from dovetail.core.ops.kernels.decoders import decode_small_e2m1_words
from dovetail.core.ops.kernels.expert_pairs import Sorted, gather_rows, inner_rows, order_of, sort_pairs, sum_pairs
from dovetail.core.ops.kernels.experts import activated, completed, pairs_of_tile, place_of_program, write_rows
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.matmul import device_facts
from dovetail.core.ops.packed_experts import BIAS, BLOCK, EACH, SPANS, PackedExperts
from dovetail.core.ops.rehearsal import report_kernel
from dovetail.core.ops.weight_formats import E2M1

SPAN = EACH * SPANS[0]
"""Inputs of the longest span."""
MOST_FP8_ROWS = 32
E2M1_IN_E4M3 = 6
"""decode_small_e2m1_words returns codes of E2M1 with exponents that are less by this."""


@triton.jit
def _power(packed, AT: tl.constexpr, BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Return 2^(exponent - BIAS) for the exponents at bit AT of int64."""
    exponents = ((packed >> AT) & 255).to(tl.int32)
    if BIAS != 127:
        exponents = tl.minimum(exponents + (127 - BIAS), 255)
    return (exponents << 23).to(tl.float32, bitcast=True).to(DTYPE)


@triton.jit
def _add_strip(acc, word_OI, x_IT, exponents_O, STRIP: tl.constexpr, OF_SPAN: tl.constexpr, BIAS: tl.constexpr,
               DECODE: tl.constexpr, WORDS: tl.constexpr, SUMS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return acc + weight @ x of a strip, which is in block OF_SPAN of its span."""
    DTYPE: tl.constexpr = x_IT.dtype
    if WORDS:
        weight_OI = DECODE(word_OI, 4 * STRIP, DTYPE)
    else:
        weight_OI = DECODE((word_OI >> (4 * STRIP)) & 15, DTYPE)
    if SUMS:
        scale_O = _power(exponents_O, 8 * OF_SPAN, BIAS, tl.float32)
        return acc + tl.dot(weight_OI, x_IT, input_precision=PRECISION) * scale_O[:, None]
    else:
        weight_OI *= _power(exponents_O, 8 * OF_SPAN, BIAS, DTYPE)[:, None]
        return tl.dot(weight_OI, x_IT, acc, input_precision=PRECISION)


@triton.jit
def _add_span(acc, acc_up, x_at, code_at, exponent_at, inside_O, inside_T, start, up_codes, up_exponents,
              GATED: tl.constexpr, LANES: tl.constexpr, STRIP: tl.constexpr, EVEN: tl.constexpr, EACH: tl.constexpr,
              BLOCK: tl.constexpr, BIAS: tl.constexpr, DECODE: tl.constexpr, WORDS: tl.constexpr, SUMS: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """Add a span of LANES words, whose first input is `start`. `up_codes` and `up_exponents` lead from a pointer of
    gate to that of up. EVEN: all outputs are inside."""
    lane = tl.arange(0, STRIP)
    ok_OI, ok_IT = inside_O[:, None], inside_T[None, :]
    if LANES < STRIP:
        ok_OI = ok_OI & (lane < LANES)[None, :]
        ok_IT = ok_IT & (lane < LANES)[:, None]
    words = code_at + start // EACH
    word_OI = _load(words, ok_OI, EVEN and LANES == STRIP)
    exponents_O = _load(exponent_at, inside_O, EVEN)
    if GATED:
        up_OI = _load(words + up_codes, ok_OI, EVEN and LANES == STRIP)
        up_O = _load(exponent_at + up_exponents, inside_O, EVEN)
    for strip in tl.static_range(EACH):
        x_IT = tl.load(x_at + start + strip * LANES, mask=ok_IT, other=0.0, eviction_policy="evict_last")
        block = strip * LANES // BLOCK
        acc = _add_strip(acc, word_OI, x_IT, exponents_O, strip, block, BIAS, DECODE, WORDS, SUMS, PRECISION)
        if GATED:
            acc_up = _add_strip(acc_up, up_OI, x_IT, up_O, strip, block, BIAS, DECODE, WORDS, SUMS, PRECISION)
    return acc, acc_up


@triton.jit
def _load(ptr, ok, EVEN: tl.constexpr):
    """Load what no other program of this tile reads."""
    if EVEN:
        return tl.load(ptr, eviction_policy="evict_first")
    return tl.load(ptr, mask=ok, other=0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["tiles", "x_scale_st"])
def _packed_expert_matmul(
    x_ptr,
    x_scale_ptr,
    x_scale_st,
    codes_ptr,
    exponents_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    experts_ptr,
    routing_ptr,
    out_ptr,
    tiles,
    outputs,
    inputs,
    alpha,
    limit,
    offset,
    ACTIVE: tl.constexpr,
    GATED: tl.constexpr,
    LIMITED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    TAIL: tl.constexpr,
    STRIP: tl.constexpr,
    LEAST_STRIP: tl.constexpr,
    EVEN: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    DECODE: tl.constexpr,
    WORDS: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile, as in experts.py. TAIL: inputs after whole spans of SPAN inputs. EVEN: BLOCK_O divides the outputs."""
    wait(PDL)
    tile, start_O = place_of_program(tiles, outputs, GROUP, BLOCK_O)
    expert, place_T, inside_T, pair_T = pairs_of_tile(order_ptr, tiles_ptr, experts_ptr, tile, ROWS)
    if expert < 0:
        return
    row_T = (pair_T // ACTIVE if GATED else place_T).to(tl.int64)
    at_O = start_O + tl.arange(0, BLOCK_O)
    inside_O = at_O < outputs
    rows = outputs * (2 if GATED else 1)
    expert_O = expert.to(tl.int64) * rows
    words = inputs // EACH
    row_codes = codes_ptr + (expert_O + at_O)[:, None] * words
    row_x = x_ptr + row_T[None, :] * inputs
    TAILS: tl.constexpr = (TAIL // (SPAN // 2)) + (TAIL // (SPAN // 4)) % 2 + (TAIL // (SPAN // 8)) % 2
    exponent_at = exponents_ptr + expert_O * (inputs // SPAN + TAILS) + at_O
    up_codes = outputs * words
    acc = tl.zeros((BLOCK_O, ROWS), tl.float32)
    acc_up = acc
    lane = tl.arange(0, STRIP)
    code_at, x_at = row_codes + lane[None, :], row_x + lane[:, None]
    for start in range(0, inputs - TAIL, SPAN):
        acc, acc_up = _add_span(acc, acc_up, x_at, code_at, exponent_at + start // SPAN * rows, inside_O, inside_T,
                                start, up_codes, outputs, GATED, STRIP, STRIP, EVEN, EACH, BLOCK, BIAS, DECODE, WORDS,
                                SUMS, PRECISION)  # fmt: skip
    exponent_at += inputs // SPAN * rows
    lane = tl.arange(0, LEAST_STRIP)
    code_at, x_at = row_codes + lane[None, :], row_x + lane[:, None]
    for half in tl.static_range(1, 4):
        if TAIL & (SPAN >> half) != 0:
            start = inputs - TAIL % (2 * (SPAN >> half))
            acc, acc_up = _add_span(acc, acc_up, x_at, code_at, exponent_at, inside_O, inside_T, start, up_codes,
                                    outputs, GATED, STRIP >> half, LEAST_STRIP, EVEN, EACH, BLOCK, BIAS, DECODE, WORDS,
                                    SUMS, PRECISION)  # fmt: skip
            exponent_at += rows
    announce(PDL)
    if bias_ptr is not None:
        bias_ptr += expert_O
    x_scale_T = None
    if x_scale_ptr is not None:
        x_scale_T = tl.load(x_scale_ptr + row_T * x_scale_st, mask=inside_T, other=0.0)
    y_TO = completed(acc.T, x_scale_T, None, bias_ptr, at_O, inside_O)
    if GATED:
        up_TO = completed(acc_up.T, x_scale_T, None, bias_ptr, outputs + at_O, inside_O)
        y_TO = activated(y_TO, up_TO, alpha, limit, offset, LIMITED)
        write_rows(out_ptr, y_TO, place_T, inside_T, at_O, outputs)
    else:
        y_TO = y_TO * tl.load(routing_ptr + pair_T, mask=inside_T, other=0.0)[:, None]
        write_rows(out_ptr, y_TO, pair_T, inside_T, at_O, outputs)


def packed_experts_triton(
    x: Activation,
    routing: Routing,
    weights: PackedExperts,
    activation: GatedActivation,
    bias: ExpertBias | None,
    between: ActFormat,
    dtype: torch.dtype,
    chosen: tuple[ExpertTile, ExpertTile] | None = None,
) -> torch.Tensor:
    """Launch the kernels of core.ops.packed_experts.packed_gated_experts. `chosen`: tiles of the two products, with
    equally many rows; None = those of the rule."""
    (tokens, active), device = routing.experts_TK.shape, x.values.device
    experts, hidden, words = weights.down.shape
    channels = EACH * words
    if not tokens:
        return torch.empty(tokens, hidden, dtype=dtype, device=device)

    # Start-up calls the rule when this call has replaced both.
    in_8_bits, itemsize_of_x = between is not PLAIN, x.values.element_size()

    def choice(rows: int) -> tuple[bool, ExpertTile]:
        """Return whether E4M3 is converted to `dtype`, and the tile, for tiles of `rows` rows."""
        wide = rows > MOST_FP8_ROWS and in_8_bits
        itemsize = dtype.itemsize if wide else itemsize_of_x
        return wide, _tile(rows, itemsize, weights.format, (hidden, channels), device)

    def kernel(count: int) -> Hashable:
        found = choice(rows_of_tile(count * active, experts))
        order = order_of(count, active, experts, found[1].rows if found[1].residents else None)
        return found, order.rows, order.block, order.counts

    shapes = weights.down.shape, weights.format, dtype, x.values.dtype
    report_kernel(("packed experts", active, *shapes, in_8_bits), tokens, kernel)
    rows = rows_of_tile(tokens * active, experts) if chosen is None else chosen[0].rows
    wide, tile = choice(rows)
    first, second = chosen or (tile, tile)
    # Hopper's kernel reads sorted rows, however few.
    pairs = sort_pairs(routing, experts, rows if chosen is not None or first.residents else None)
    if wide:
        between = PLAIN
    if first.residents:
        x = replace(x, values=gather_rows(x.values, pairs, dtype), sums=None)
    elif wide:
        x = replace(x, values=x.values.to(dtype))
    inner_PF = inner_rows(tokens * active, channels, second, dtype, device)
    up_bias, down_bias = (None, None) if bias is None else (bias.up, bias.down)
    _multiply_pairs(x, weights, weights.up, weights.up_exponents, up_bias, pairs, first, inner_PF, activation)
    inner = encode(inner_PF, (between,))[between]
    down_PC = torch.empty(tokens * active, hidden, dtype=dtype, device=device)
    _multiply_pairs(inner, weights, weights.down, weights.down_exponents, down_bias, pairs, second, down_PC, None)
    return sum_pairs(down_PC, routing)


def _multiply_pairs(
    x: Activation,
    weights: PackedExperts,
    codes_EOW: torch.Tensor,
    exponents_ESO: torch.Tensor,
    bias_EO: torch.Tensor | None,
    pairs: Sorted,
    tile: ExpertTile,
    out: torch.Tensor,
    activation: GatedActivation | None,
) -> None:
    """Launch the first product, which ends in `activation`, or the second one (None)."""
    if tile.residents:
        from dovetail.core.ops.kernels.specialized_experts import multiply_specialized

        given = codes_EOW, exponents_ESO, (0, 0), bias_EO
        return multiply_specialized(x, *given, pairs, tile, out, activation)
    outputs, inputs = out.shape[1], EACH * codes_EOW.shape[2]
    limit = activation.limit if activation is not None else None
    kind = x.values.dtype
    fmt, fp8 = weights.format, kind is torch.float8_e4m3fn
    by_words = x.values.is_cuda and kind is not torch.float32 and fmt.decode_words is not None
    small = fp8 and by_words and fmt is E2M1
    by_words = by_words and (small or not fp8 or fmt.narrow_words)
    decode, bias = (fmt.decode_words if by_words else fmt.decode), BIAS
    if small:
        decode, bias = decode_small_e2m1_words, BIAS - E2M1_IN_E4M3
    _packed_expert_matmul[(pairs.tiles * ceil_div(outputs, tile.outputs),)](
        x.values.contiguous(),
        x.scale,
        0 if x.scale is None or x.scale.numel() == 1 else x.scale.stride(0),
        codes_EOW,
        exponents_ESO,
        bias_EO,
        pairs.order_P,
        pairs.tiles_M3,
        pairs.routing.experts_TK,
        pairs.routing.weights_TK,
        out,
        pairs.tiles,
        outputs,
        inputs,
        1.0 if activation is None else activation.alpha,
        0.0 if limit is None else limit,
        0.0 if activation is None else activation.offset,
        ACTIVE=pairs.routing.experts_TK.shape[1],
        GATED=activation is not None,
        LIMITED=limit is not None,
        ROWS=tile.rows,
        BLOCK_O=tile.outputs,
        GROUP=GROUPED,
        SPAN=SPAN,
        TAIL=inputs % SPAN,
        STRIP=SPANS[0],
        LEAST_STRIP=SPANS[0] if fp8 else SPANS[1],
        EVEN=outputs % tile.outputs == 0,
        EACH=EACH,
        BLOCK=BLOCK,
        BIAS=bias,
        DECODE=decode,
        WORDS=by_words,
        SUMS=fp8 or tile.rows <= SPANS[1],
        PRECISION="ieee" if kind is torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(out),
    )


def _tile(rows: int, itemsize: int, fmt: WeightFormat, shape: tuple[int, int], device: torch.device) -> ExpertTile:
    """`itemsize`: bytes of a number of x as it is multiplied. `shape`: hidden channels, and those of an expert."""
    if device.type != "cuda":  # Triton's interpreter
        return packed_expert_tile(rows, itemsize, 64 << 10)
    _, _, hopper, shared = device_facts(device)
    if hopper and itemsize == 2 and fmt is E2M1 and specialized_packed(*shape):
        return specialized_expert_tile(rows, 0.5, shared)
    return packed_expert_tile(rows, itemsize, shared)
