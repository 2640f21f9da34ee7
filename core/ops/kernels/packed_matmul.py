"""x @ weight^T with a packed weight, whose codes are decoded in registers and multiplied from there.

The work is divided as in matmul.py (Stream-K): each program processes an equal range of the (tile, input block) units,
and the last program to arrive at a split tile sums it.

The same bits of the LANES words of a block are consecutive inputs (core.ops.packing), so the kernel multiplies one such
strip after the other, and decoded weights never move between threads. Scales are applied in one of two ways:

- SUMS: to float32 sums over strips of one group. With few rows there are fewer sums than weights, and integers with
  their zeros subtracted are exact in 16 bits and in E4M3.
- to decoded weights in registers: with many rows, and for groups smaller than a strip.

Shapes: T tokens, I inputs of a strip, O output, G groups.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops.formats import SUM_COLUMNS
from dovetail.core.ops.kernels.launch import announce, dependent, prefetch, wait
from dovetail.core.ops.kernels.matmul import PREFETCH_LINES, _reduce_split, _write
from dovetail.core.ops.packed_tiles import ROUNDED_TOKENS, SUMMED, packed_counters
from dovetail.core.ops.packing import LANES
from dovetail.core.ops.tiles import MatmulTile


@triton.jit
def _of_group(at, ok, group, groups, step, DTYPE: tl.constexpr):
    """Return the scales or zeros [O] of a group. `at`: pointers to those of the first group, or the first word."""
    if at.dtype.element_ty == tl.int32:
        # Words of four scales in E4M3. Single bytes are read: Triton's pipeline would copy words to shared memory.
        byte = (at + (group >> 2) * step).to(tl.pointer_type(tl.uint8), bitcast=True) + (group & 3)
        bits = tl.load(byte, mask=ok & ((group >> 2) < groups), other=0).to(tl.int32)
        # Exponent and mantissa become those of float32, whose exponent has a bias that is greater by 120.
        return ((bits << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)
    else:
        return tl.load(at + group * step, mask=ok & (group < groups), other=0.0).to(DTYPE)


@triton.jit
def of_strip(
    source_ptr, o, outputs, groups, steps, first, GROUP: tl.constexpr, STRIP: tl.constexpr, DTYPE: tl.constexpr
):
    """Return the scales or zeros of a strip, whose first input is `first`: [O, 1], or [O, I] if it has several.
    `groups`: those of a row, or its words of four groups. `steps`: strides of outputs and groups or words."""
    at, ok = source_ptr + o.to(tl.int64) * steps[0], o < outputs
    group = first // GROUP
    values = _of_group(at, ok, group, groups, steps[1], DTYPE)[:, None]
    for more in tl.static_range(1, (STRIP + GROUP - 1) // GROUP):
        of_next = _of_group(at, ok, group + more, groups, steps[1], DTYPE)[:, None]
        values = tl.where((tl.arange(0, STRIP) < more * GROUP)[None, :], values, of_next)
    return values


@triton.jit
def decoded_strip(word_OI, zero, scale, STRIP: tl.constexpr, BITS: tl.constexpr, CODE: tl.constexpr,
                  VALUE: tl.constexpr, DTYPE: tl.constexpr, DECODE: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Return strip number STRIP of words in DTYPE: codes are decoded to CODE, and less `zero` and times `scale`, each
    None or as of_strip returns it, in VALUE."""
    if WORDS:
        value_OI = DECODE(word_OI, STRIP * BITS, CODE).to(VALUE)
    else:
        value_OI = DECODE((word_OI >> (STRIP * BITS)) & ((1 << BITS) - 1), CODE).to(VALUE)
    if zero is not None:
        value_OI -= zero
    if scale is not None:
        value_OI *= scale
    return value_OI.to(DTYPE)


@triton.jit
def _range_of_tile(x_ptr, codes_ptr, scale_ptr, zero_ptr, first, last, row_o, row_t, size, words, groups, steps,
                   BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, EVEN: tl.constexpr,
                   BITS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, STRIP: tl.constexpr, RUN: tl.constexpr,
                   SUMS: tl.constexpr, DECODE: tl.constexpr, WORDS: tl.constexpr, NARROW: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """Return weight @ x^T of input blocks [first, last), float32 [BLOCK_O, BLOCK_T]. RUN: strips summed together."""
    tokens, outputs, inputs = size
    EACH: tl.constexpr = 32 // BITS
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SCALE: tl.constexpr = scale_ptr.dtype.element_ty
    # E4M3 has no arithmetic, so words are decoded to float16, which holds its numbers.
    WIDER: tl.constexpr = (WORDS and not NARROW) or zero_ptr is not None
    CODE: tl.constexpr = tl.float16 if DTYPE == tl.float8e4nv and WIDER else DTYPE
    # Whole zeros are exact in 16 bits, and the product with a scale of few bits is rounded once.
    WHOLE_ZEROS: tl.constexpr = zero_ptr is None or zero_ptr.dtype.element_ty == tl.uint8
    FEW_BITS: tl.constexpr = SCALE == tl.float8e4nv or SCALE == tl.int32
    SHORT: tl.constexpr = WHOLE_ZEROS and (SUMS or SCALE == DTYPE or FEW_BITS)
    VALUE: tl.constexpr = CODE if SHORT else tl.float32
    FACTOR: tl.constexpr = tl.float32 if SUMS else VALUE
    o = row_o + tl.arange(0, BLOCK_O)
    t = row_t + tl.arange(0, BLOCK_T)
    i = tl.arange(0, STRIP)
    code_at = codes_ptr + o.to(tl.int64)[:, None] * words + i[None, :]
    x_at = x_ptr + t.to(tl.int64)[None, :] * inputs + i[:, None]
    acc = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    for block in range(first, last):
        for part in tl.static_range(BLOCK_I // (EACH * STRIP)):
            # Words of a block that are loaded together: LANES, or STRIP at this place.
            place = part // (LANES // STRIP)
            lane = part % (LANES // STRIP) * STRIP
            word_column = block * (BLOCK_I // EACH) + place * LANES + lane
            column = block * BLOCK_I + place * (LANES * EACH) + lane
            ok_OI = (o < outputs)[:, None] & (word_column < words)
            word = tl.load(code_at + word_column, mask=ok_OI, other=0, eviction_policy="evict_first")
            # Loads before the products, which order memory accesses, so that latency overlaps with them.
            scales, zeros = (), ()
            for run in tl.static_range(EACH // RUN):
                start = column + run * RUN * LANES
                scales += (of_strip(scale_ptr, o, outputs, groups, steps, start, GROUP, STRIP, FACTOR),)  # type: ignore[assignment]
                if zero_ptr is not None:
                    zeros += (of_strip(zero_ptr, o, outputs, groups, steps, start, GROUP, STRIP, VALUE),)  # type: ignore[assignment]
            for run in tl.static_range(EACH // RUN):
                total = tl.zeros((BLOCK_O, BLOCK_T), tl.float32) if SUMS else acc
                for strip in tl.static_range(run * RUN, run * RUN + RUN):
                    start = column + strip * LANES
                    ok = (t < tokens)[None, :]
                    if not EVEN:
                        ok = ok & (start + i < inputs)[:, None]
                    x_IT = tl.load(x_at + start, mask=ok, other=0.0, eviction_policy="evict_last")
                    zero = zeros[run] if zero_ptr is not None else None
                    scale = None if SUMS else scales[run]
                    w_OI = decoded_strip(word, zero, scale, strip, BITS, CODE, VALUE, DTYPE, DECODE, WORDS)
                    total = tl.dot(w_OI, x_IT, total, input_precision=PRECISION)
                if SUMS:
                    acc += total * scales[run]
                else:
                    acc = total
    return acc


@triton.jit(do_not_specialize=["tokens", "t_tiles", "blocks", "units", "programs", "x_scale_st"])
def _packed_matmul(
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    x_scale_ptr,
    row_scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    tokens,
    outputs,
    inputs,
    words,
    groups,
    scale_so,
    scale_sg,
    x_scale_st,
    t_tiles,
    blocks,
    units,
    programs,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
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
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """EVEN: the block width divides the number of inputs. GROUP: inputs of a scale. WORDS: whether DECODE
    takes words and the bit of its codes in them. NARROW: whether it also returns E4M3."""
    epilogue = (x_scale_ptr, x_scale_st, row_scale_ptr, 1, bias_ptr, out_ptr)
    size = (tokens, outputs, inputs)
    cut = (t_tiles, blocks, units, programs)
    mine = tl.program_id(0)
    lo = mine * units // programs
    hi = (mine + 1) * units // programs
    if PDL:
        # Prefetch the first words while the preceding kernel ends: a cache line holds the words of a block.
        row = lo // blocks // t_tiles * BLOCK_O + tl.arange(0, BLOCK_O)[:, None]
        column = lo % blocks * (BLOCK_I * BITS // 32) + tl.arange(0, PREFETCH_LINES)[None, :] * LANES
        prefetch(codes_ptr + row.to(tl.int64) * words + column, (row < outputs) & (column < words))
    wait(PDL)
    for tile in range(lo // blocks, tl.cdiv(hi, blocks)):
        first = tl.maximum(lo - tile * blocks, 0)
        last = tl.minimum(hi - tile * blocks, blocks)
        row_o = tile // t_tiles * BLOCK_O
        row_t = tile % t_tiles * BLOCK_T
        total = _range_of_tile(x_ptr, codes_ptr, scale_ptr, zero_ptr, first, last, row_o, row_t, size, words, groups,
                               (scale_so, scale_sg), BLOCK_T, BLOCK_O, BLOCK_I, EVEN, BITS, GROUP, LANES, STRIP, RUN,
                               SUMS, DECODE, WORDS, NARROW, PRECISION)  # fmt: skip
        if part_ptr is None:
            _write(total, row_o, row_t, epilogue, size, BLOCK_T, BLOCK_O)
        elif last - first == blocks:
            _write(total, row_o, row_t, epilogue, size, BLOCK_T, BLOCK_O)
        else:
            _reduce_split(total, tile, last - first, part_ptr, count_ptr, epilogue, size, cut, BLOCK_T, BLOCK_O)
    announce(PDL)


WHOLE = 1 << 30
"""GROUP of a matrix with one scale for each row: a multiple of every block."""
LEAST_STRIP = 16
"""Inputs of a 16-bit matrix instruction, which are a strip of groups smaller than LANES."""


def packed_matmul_triton(
    x_TI: torch.Tensor,
    packed: PackedWeight,
    tile: MatmulTile,
    counts: torch.Tensor | None,
    bias_O: torch.Tensor | None = None,
    x_scale_T1: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    sums_TS: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel. `counts`: as in core.ops.kernels.matmul. Other arguments as in core.ops.packed_matmul."""
    tokens, inputs = x_TI.shape
    outputs, words = packed.codes.shape
    bits, group = packed.format.stored_bits, packed.group or WHOLE
    block = LANES * (32 // bits)
    if tile.inputs % block:
        raise ValueError(f"a tile for codes in {bits} bits has a multiple of {block} inputs, not {tile.inputs}")
    if group % LANES and LANES % group:
        raise ValueError(f"groups have a multiple or a divisor of {LANES} inputs, not {group}")
    fp8 = x_TI.dtype is torch.float8_e4m3fn
    if fp8 and group % LANES:
        raise ValueError(f"E4M3 inputs need groups of a multiple of {LANES} inputs, not {group}: convert them to bf16")
    if sums_TS is not None and sums_TS.shape != (wanted := (tokens, SUM_COLUMNS * ceil_div(inputs, SUMMED))):
        raise ValueError(f"sums of this x have the shape {wanted}, not {tuple(sums_TS.shape)}")
    out_TO = torch.empty(tokens, outputs, dtype=dtype or x_TI.dtype, device=x_TI.device)
    t_tiles, tiles, blocks, programs = tile.launch(tokens, outputs, inputs)
    parts = None
    if tile.splits_tiles(tokens, outputs, inputs):
        have = 0 if counts is None else counts.numel()
        if have < (need := packed_counters(tile, tiles)):
            raise ValueError(f"split tiles need {need} counters; `counts` has {have}")
        parts = torch.empty(2 * programs * tile.tokens * tile.outputs, dtype=torch.float32, device=x_TI.device)
    if tile.tokens == ROUNDED_TOKENS:
        from dovetail.core.ops.kernels import rounded_packed

        rounded_packed.launch_rounded(x_TI, packed, out_TO, tile, parts, counts, x_scale_T1, bias_O)
        return out_TO
    if tile.tma:
        from dovetail.core.ops.kernels import specialized_packed

        specialized_packed.launch_packed(x_TI, packed, out_TO, tile, parts, counts, x_scale_T1, bias_O, sums_TS)
        return out_TO
    run = gcd(group, block) // LANES if group % LANES == 0 else 1
    by_words = x_TI.is_cuda and packed.format.decode_words is not None and x_TI.dtype != torch.float32
    _packed_matmul[(programs,)](
        x_TI,
        packed.codes,
        packed.scale,
        packed.zero,
        x_scale_T1,
        packed.row_scale,
        bias_O,
        out_TO,
        parts,
        counts,
        tokens,
        outputs,
        inputs,
        words,
        packed.scale.shape[1],
        *packed.steps,
        0 if x_scale_T1 is None or x_scale_T1.numel() == 1 else x_scale_T1.stride(0),
        t_tiles,
        blocks,
        tiles * blocks,
        programs,
        BLOCK_T=tile.tokens,
        BLOCK_O=tile.outputs,
        BLOCK_I=tile.inputs,
        EVEN=inputs % tile.inputs == 0,
        BITS=bits,
        GROUP=group,
        LANES=LANES,
        STRIP=LANES if group % LANES == 0 else LEAST_STRIP,
        RUN=run,
        SUMS=group % LANES == 0 and (fp8 or 2 * tile.tokens <= LANES * run),
        DECODE=packed.format.decode_words if by_words else packed.format.decode,
        WORDS=by_words,
        NARROW=packed.format.narrow_words,
        PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x_TI),
    )
    return out_TO
