"""Products of routed experts in any WeightFormat, whose codes are decoded in registers and multiplied from there.

Tiles, pairs and the two products are those of experts.py; words, strips and scales are those of packed_matmul.py.
Weights are the left operands, since tensor cores take those from registers. Scales are applied to the float32 sums of
runs of strips (SUMS) while a tile has so few rows that sums are fewer than weights, and else to decoded weights.

Shapes: T rows of a tile, O output, I inputs of a strip.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from math import gcd

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation
from dovetail.core.interfaces.expert import ExpertBias, GatedActivation, Routing
from dovetail.core.interfaces.weight import PackedWeight, ShiftedDecoder
from dovetail.core.ops.expert_tiles import GROUPED, ExpertTile, stacked_expert_tile
from dovetail.core.ops.formats import encode
from dovetail.core.ops.kernels.expert_pairs import Sorted, gather_rows, order_of, sort_pairs, sum_pairs
from dovetail.core.ops.kernels.experts import activated, completed, pairs_of_tile, place_of_program, write_rows
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.kernels.packed_matmul import LEAST_STRIP, WHOLE, decoded_strip, of_strip
from dovetail.core.ops.matmul import device_facts
from dovetail.core.ops.packed_matmul import multiplies_e4m3
from dovetail.core.ops.packing import LANES
from dovetail.core.ops.rehearsal import report_kernel
from dovetail.core.ops.stacked_experts import StackedExperts, fits_strips

MOST_SUM_ROWS = 32
"""Rows of a tile up to which sums of runs leave registers for decoded weights. E4M3, which has no room for scales, is
multiplied up to here."""


@triton.jit
def _of_runs(ptr, o, outputs, groups, steps, column, RUNS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
             STRIP: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """Return the scales or zeros of each run of strips of a block. WIDTH: inputs of a run."""
    found = (of_strip(ptr, o, outputs, groups, steps, column, GROUP, STRIP, DTYPE),)
    for run in tl.static_range(1, RUNS):
        found += (of_strip(ptr, o, outputs, groups, steps, column + run * WIDTH, GROUP, STRIP, DTYPE),)  # type: ignore[assignment]
    return found


@triton.jit
def _subtrahend(zero, BLOCK_O: tl.constexpr, STRIP: tl.constexpr, UNIT: tl.constexpr, LESS: tl.constexpr,
                DTYPE: tl.constexpr):  # fmt: skip
    """Return what a product subtracts from a strip of codes that are decoded to (value + shift) * UNIT. `zero`: None,
    or zeros plus the shift. LESS: bits in E4M3 of the shift times -UNIT; a conversion of constants came out wrong
    (packed_operands.filled)."""
    if zero is None:
        return tl.full((BLOCK_O, STRIP), LESS, tl.int8).to(DTYPE, bitcast=True)
    else:
        return tl.broadcast_to((zero * -UNIT).to(DTYPE), (BLOCK_O, STRIP))


@triton.jit
def _add_strip(total, word, x_IT, zero, scale, STRIP_AT: tl.constexpr, BITS: tl.constexpr, CODE: tl.constexpr,
               VALUE: tl.constexpr, DECODE: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr, LESS: tl.constexpr,
               TWICE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return total + weight @ x of strip number STRIP_AT, over UNIT."""
    DTYPE: tl.constexpr = x_IT.dtype
    if TWICE:
        w_OI = decoded_strip(word, None, None, STRIP_AT, BITS, DTYPE, DTYPE, DTYPE, DECODE, WORDS)
        less_OI = _subtrahend(zero, word.shape[0], word.shape[1], UNIT, LESS, DTYPE)
        total = tl.dot(less_OI, x_IT, total, input_precision=PRECISION)
    else:
        w_OI = decoded_strip(word, zero, scale, STRIP_AT, BITS, CODE, VALUE, DTYPE, DECODE, WORDS)
    return tl.dot(w_OI, x_IT, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["tiles", "x_scale_st"])
def _stacked_expert_matmul(
    x_ptr,
    x_scale_ptr,
    x_scale_st,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    row_scale_ptr,
    bias_ptr,
    order_ptr,
    tiles_ptr,
    experts_ptr,
    routing_ptr,
    out_ptr,
    tiles,
    outputs,
    inputs,
    words,
    groups,
    scale_se,
    scale_so,
    scale_sg,
    alpha,
    limit,
    offset,
    ACTIVE: tl.constexpr,
    GATED: tl.constexpr,
    PLACED: tl.constexpr,
    LIMITED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    TILES: tl.constexpr,
    EVEN: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    STRIP: tl.constexpr,
    RUN: tl.constexpr,
    SUMS: tl.constexpr,
    DECODE: tl.constexpr,
    WORDS: tl.constexpr,
    NARROW: tl.constexpr,
    SHIFT: tl.constexpr,
    UNIT: tl.constexpr,
    LESS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile, as in experts.py; constants are those of packed_matmul.py. TILES: tiles of rows that are multiplied by
    the same outputs one after another. PLACED: x has a row for each place (gather_rows), and a scale for each token.
    EVEN: blocks divide the inputs. SHIFT, UNIT: those of DECODE (ShiftedDecoder); with SHIFT 0 and UNIT 1, it returns
    values. UNIT is 1 but for E4M3."""
    wait(PDL)
    tile, start_O = place_of_program(tiles, outputs, TILES, BLOCK_O)
    expert, place_T, inside_T, pair_T = pairs_of_tile(order_ptr, tiles_ptr, experts_ptr, tile, ROWS)
    if expert < 0:
        return
    EACH: tl.constexpr = 32 // BITS
    RUNS: tl.constexpr = EACH // RUN
    WIDTH: tl.constexpr = RUN * LANES
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SCALE: tl.constexpr = scale_ptr.dtype.element_ty
    # The reasons for these are in packed_matmul.py.
    WIDER: tl.constexpr = (WORDS and not NARROW) or zero_ptr is not None
    # E4M3 has no arithmetic: a second product subtracts zeros, with the same x.
    TWICE: tl.constexpr = UNIT != 1.0
    CODE: tl.constexpr = tl.float16 if DTYPE == tl.float8e4nv and WIDER else DTYPE
    WHOLE_ZEROS: tl.constexpr = zero_ptr is None or zero_ptr.dtype.element_ty == tl.uint8
    FEW_BITS: tl.constexpr = SCALE == tl.float8e4nv or SCALE == tl.int32
    SHORT: tl.constexpr = WHOLE_ZEROS and (SUMS or SCALE == DTYPE or FEW_BITS)
    VALUE: tl.constexpr = CODE if SHORT else tl.float32
    FACTOR: tl.constexpr = tl.float32 if SUMS else VALUE
    token_T = (pair_T // ACTIVE if GATED else place_T).to(tl.int64)
    row_T = place_T.to(tl.int64) if PLACED else token_T
    o = start_O + tl.arange(0, BLOCK_O)
    ok_O, ok_T = (o < outputs)[:, None], inside_T[None, :]
    i = tl.arange(0, STRIP)
    # The expert's first output among those of all experts.
    first_O = expert.to(tl.int64) * outputs * (2 if GATED else 1)
    code_at = codes_ptr + (first_O + o)[:, None] * words + i[None, :]
    up_codes = outputs.to(tl.int64) * words
    steps = (scale_so, scale_sg)
    first_scale = expert.to(tl.int64) * scale_se
    scale_at = scale_ptr + first_scale
    up_groups = outputs.to(tl.int64) * scale_so
    if zero_ptr is not None:
        zero_at = zero_ptr + first_scale
    x_at = x_ptr + row_T[None, :] * inputs + i[:, None]
    acc = tl.zeros((BLOCK_O, ROWS), tl.float32)
    acc_up = acc
    for start in range(0, inputs, EACH * LANES):
        for part in tl.static_range(LANES // STRIP):
            # Words of a block that are loaded together: LANES, or STRIP at this place.
            column = start + part * STRIP
            at = code_at + (start // EACH + part * STRIP)
            word = tl.load(at, mask=ok_O, other=0, eviction_policy="evict_first")
            # Loads before the products, which order memory accesses, so that latency overlaps with them.
            scales = _of_runs(scale_at, o, outputs, groups, steps, column, RUNS, WIDTH, GROUP, STRIP, FACTOR)
            if zero_ptr is not None:
                zeros = _of_runs(zero_at, o, outputs, groups, steps, column, RUNS, WIDTH, GROUP, STRIP, VALUE)
            if GATED:
                up_word = tl.load(at + up_codes, mask=ok_O, other=0, eviction_policy="evict_first")
                of_up = scale_at + up_groups
                up_scales = _of_runs(of_up, o, outputs, groups, steps, column, RUNS, WIDTH, GROUP, STRIP, FACTOR)
                if zero_ptr is not None:
                    of_up_zero = zero_at + up_groups
                    up_zeros = _of_runs(of_up_zero, o, outputs, groups, steps, column, RUNS, WIDTH, GROUP, STRIP, VALUE)
            for run in tl.static_range(RUNS):
                zero = zeros[run] + SHIFT if zero_ptr is not None else None
                scale = None if SUMS else scales[run]
                total = tl.zeros((BLOCK_O, ROWS), tl.float32) if SUMS else acc
                if GATED:
                    up_zero = up_zeros[run] + SHIFT if zero_ptr is not None else None
                    up_scale = None if SUMS else up_scales[run]
                    total_up = tl.zeros((BLOCK_O, ROWS), tl.float32) if SUMS else acc_up
                for strip in tl.static_range(run * RUN, run * RUN + RUN):
                    ok = ok_T
                    if not EVEN:
                        ok = ok & (column + strip * LANES + i < inputs)[:, None]
                    x_IT = tl.load(x_at + (column + strip * LANES), mask=ok, other=0.0, eviction_policy="evict_last")
                    total = _add_strip(total, word, x_IT, zero, scale, strip, BITS, CODE, VALUE, DECODE, WORDS, UNIT,
                                       LESS, TWICE, PRECISION)  # fmt: skip
                    if GATED:
                        total_up = _add_strip(total_up, up_word, x_IT, up_zero, up_scale, strip, BITS, CODE, VALUE,
                                              DECODE, WORDS, UNIT, LESS, TWICE, PRECISION)  # fmt: skip
                acc = acc + total * (scales[run] * (1.0 / UNIT)) if SUMS else total
                if GATED:
                    acc_up = acc_up + total_up * (up_scales[run] * (1.0 / UNIT)) if SUMS else total_up
    announce(PDL)
    if row_scale_ptr is not None:
        row_scale_ptr += first_O
    if bias_ptr is not None:
        bias_ptr += first_O
    x_scale_T = None
    if x_scale_ptr is not None:
        x_scale_T = tl.load(x_scale_ptr + token_T * x_scale_st, mask=inside_T, other=0.0)
    y_TO = completed(acc.T, x_scale_T, row_scale_ptr, bias_ptr, o, o < outputs)
    if GATED:
        up_TO = completed(acc_up.T, x_scale_T, row_scale_ptr, bias_ptr, outputs + o, o < outputs)
        y_TO = activated(y_TO, up_TO, alpha, limit, offset, LIMITED)
        write_rows(out_ptr, y_TO, place_T, inside_T, o, outputs)
    else:
        y_TO = y_TO * tl.load(routing_ptr + pair_T, mask=inside_T, other=0.0)[:, None]
        write_rows(out_ptr, y_TO, pair_T, inside_T, o, outputs)


def stacked_experts_triton(
    x: Activation,
    routing: Routing,
    weights: StackedExperts,
    activation: GatedActivation,
    bias: ExpertBias | None,
    between: ActFormat,
    dtype: torch.dtype,
    chosen: tuple[ExpertTile, ExpertTile] | None = None,
) -> torch.Tensor:
    """Launch the kernels of core.ops.stacked_experts.stacked_gated_experts. `chosen`: tiles of the two products, with
    equally many rows; None = those of the rule."""
    for group in (weights.up.group, weights.down.group):
        if not fits_strips(group):
            raise ValueError(f"groups have a multiple or a divisor of {LANES} inputs, not {group}")
    (tokens, active), device = routing.experts_TK.shape, x.values.device
    experts, hidden, _ = weights.down.codes.shape
    if not tokens:
        return torch.empty(tokens, hidden, dtype=dtype, device=device)

    # Start-up calls the rule when this call has replaced both.
    in_8_bits = x.format is not PLAIN, between is not PLAIN

    def choice(rows: int) -> tuple[tuple[bool, bool], tuple[ExpertTile, ExpertTile]]:
        """Return whether each product is in E4M3, and its tile, for tiles of `rows` rows."""
        first = in_8_bits[0] and in_e4m3(weights.up, rows)
        second = in_8_bits[1] and in_e4m3(weights.down, rows)
        up, down = (1 if narrow else dtype.itemsize for narrow in (first, second))
        tiles = tile_of(weights.up, rows, up, True, device), tile_of(weights.down, rows, down, False, device)
        return (first, second), tiles

    def kernel(count: int) -> Hashable:
        order = order_of(count, active, experts)
        return choice(order.rows), order.block, order.counts

    shapes = weights.up.codes.shape, weights.down.codes.shape, weights.up.format, weights.up.group, weights.down.group
    ordered = weights.order_EC is not None
    report_kernel(("stacked experts", active, *shapes, dtype, x.values.dtype, in_8_bits, ordered), tokens, kernel)
    pairs = sort_pairs(routing, experts, None if chosen is None else chosen[0].rows)
    (first_e4m3, second_e4m3), ruled = choice(pairs.rows)
    first, second = chosen or ruled
    if not first_e4m3:
        x = replace(x, values=x.values.to(dtype))
    if not second_e4m3:
        between = PLAIN
    if ordered:
        # Some GPUs have no 8-bit floats.
        raw = x.values.view(torch.uint8) if x.values.element_size() == 1 else x.values
        x = replace(x, values=gather_rows(raw, pairs, raw.dtype, weights.order_EC).view(x.values.dtype), sums=None)
    inner_PF = torch.empty(tokens * active, weights.down.inputs, dtype=dtype, device=device)
    up_bias, down_bias = (None, None) if bias is None else (bias.up, bias.down)
    _multiply_pairs(x, weights.up, up_bias, pairs, first, inner_PF, activation, placed=ordered)
    inner = encode(inner_PF, (between,))[between]
    down_PC = torch.empty(tokens * active, hidden, dtype=dtype, device=device)
    _multiply_pairs(inner, weights.down, down_bias, pairs, second, down_PC, None)
    return sum_pairs(down_PC, routing)


def _multiply_pairs(
    x: Activation,
    packed: PackedWeight,
    bias_EO: torch.Tensor | None,
    pairs: Sorted,
    tile: ExpertTile,
    out: torch.Tensor,
    activation: GatedActivation | None,
    placed: bool = False,
) -> None:
    """Launch the first product, which ends in `activation`, or the second one (None). `placed`: as in the kernel."""
    fmt, kind, group = packed.format, x.values.dtype, packed.group or WHOLE
    fp8, strips = kind is torch.float8_e4m3fn, group % LANES == 0
    block = LANES * (32 // fmt.stored_bits)
    run = gcd(group, block) // LANES if strips else 1
    decoder, by_words = decoder_of(packed, x.values)
    limit = activation.limit if activation is not None else None
    _stacked_expert_matmul[(pairs.tiles * ceil_div(out.shape[1], tile.outputs),)](
        x.values.contiguous(),
        x.scale,
        0 if x.scale is None or x.scale.numel() == 1 else x.scale.stride(0),
        packed.codes,
        packed.scale,
        packed.zero,
        packed.row_scale,
        bias_EO,
        pairs.order_P,
        pairs.tiles_M3,
        pairs.routing.experts_TK,
        pairs.routing.weights_TK,
        out,
        pairs.tiles,
        out.shape[1],
        packed.inputs,
        packed.codes.shape[2],
        packed.scale.shape[2],
        packed.scale.stride(0),
        *packed.steps,
        1.0 if activation is None else activation.alpha,
        0.0 if limit is None else limit,
        0.0 if activation is None else activation.offset,
        ACTIVE=pairs.routing.experts_TK.shape[1],
        GATED=activation is not None,
        PLACED=placed,
        LIMITED=limit is not None,
        ROWS=tile.rows,
        BLOCK_O=tile.outputs,
        TILES=GROUPED,
        EVEN=packed.inputs % block == 0,
        BITS=fmt.stored_bits,
        GROUP=group,
        LANES=LANES,
        STRIP=LANES if strips else LEAST_STRIP,
        RUN=run,
        SUMS=fp8 or (strips and 2 * tile.rows <= min(LANES * run, 2 * MOST_SUM_ROWS)),
        DECODE=decoder.decode,
        WORDS=by_words,
        NARROW=fmt.narrow_words,
        SHIFT=decoder.shift,
        UNIT=decoder.unit,
        LESS=decoder.less,
        PRECISION="ieee" if kind is torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(out),
    )


def decoder_of(packed: PackedWeight, x: torch.Tensor) -> tuple[ShiftedDecoder, bool]:
    """Return the decoder with the fewest instructions, and whether it takes words. Zeros are subtracted together with
    the shift."""
    fmt = packed.format
    if not reads_words(x) or fmt.decode_words is None:
        return ShiftedDecoder(fmt.decode, 0.0), False
    shifted, whole = fmt.shifted.get(x.dtype), packed.zero is None or packed.zero.dtype is torch.uint8
    if shifted is None or not whole or (packed.zero is None and shifted.unit == 1.0):
        return ShiftedDecoder(fmt.decode_words, 0.0), True
    return shifted, True


def reads_words(x: torch.Tensor) -> bool:
    """Whether several codes can be decoded by one instruction, which Triton's interpreter does not support."""
    return x.is_cuda and x.dtype is not torch.float32


def in_e4m3(packed: PackedWeight, rows: int) -> bool:
    """Whether x in E4M3 is multiplied as it is in tiles of `rows` rows."""
    return rows <= MOST_SUM_ROWS and multiplies_e4m3(packed)


def tile_of(packed: PackedWeight, rows: int, itemsize: int, gated: bool, device: torch.device) -> ExpertTile:
    """Return the tile by the rule. `itemsize`: bytes of a number of x as it is multiplied."""
    # Triton's interpreter has no device.
    shared = device_facts(device)[3] if device.type == "cuda" else 64 << 10
    return stacked_expert_tile(rows, packed.format.stored_bits, itemsize, gated, shared)
