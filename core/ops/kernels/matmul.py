"""x @ weight^T for few rows. Its time is bound by reading the weight, so each SM streams an equal part of it.

The work is divided as in Stream-K (Osama et al. 2023): the (tile, input block) units of all tiles are numbered, and
each program processes an equal range of them. The last program to arrive at a split tile sums it, always in the order
of the programs, so results are bitwise reproducible. One program per tile and split-K are special cases.

The weight is the left operand: tensor cores need 64 rows there but only 16 columns, which are the tokens.

Shapes: T tokens, I input, O output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.ops.kernels.launch import announce, dependent, prefetch, wait
from dovetail.core.ops.padding import readable_rows
from dovetail.core.ops.tiles import MatmulTile


@triton.jit
def _load(source, row, column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr,
          TMA: tl.constexpr, EVICT: tl.constexpr):  # fmt: skip
    """Load a block of a row-major matrix, zero outside. EVEN: the block width divides the number of columns."""
    if TMA:
        return source.load([row, column])
    else:
        r = row + tl.arange(0, ROWS)
        c = column + tl.arange(0, COLUMNS)
        at = source + r.to(tl.int64)[:, None] * columns + c[None, :]
        inside = (r < rows)[:, None]
        if not EVEN:
            inside = inside & (c < columns)[None, :]
        return tl.load(at, mask=inside, other=0.0, eviction_policy=EVICT)


@triton.jit
def _write(acc, row_o, row_t, epilogue, size, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr):
    """Scale acc_OT, add the bias, round once and store."""
    acc = acc.to(tl.float32)
    x_scale_ptr, x_scale_st, weight_scale_ptr, weight_scale_so, bias_ptr, out_ptr = epilogue
    tokens, outputs, _ = size
    o = row_o + tl.arange(0, BLOCK_O)
    t = row_t + tl.arange(0, BLOCK_T)
    if x_scale_ptr is not None:
        acc = acc * tl.load(x_scale_ptr + t * x_scale_st, mask=t < tokens, other=0.0)[None, :]
    if weight_scale_ptr is not None:
        acc = acc * tl.load(weight_scale_ptr + o * weight_scale_so, mask=o < outputs, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + o, mask=o < outputs, other=0.0).to(tl.float32)[:, None]
    at = out_ptr + t.to(tl.int64)[None, :] * outputs + o[:, None]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(t < tokens)[None, :] & (o < outputs)[:, None])


@triton.jit
def _add(acc, operands, row_o, row_t, row_i, size, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
         EVEN: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr, IMPRECISE: tl.constexpr, PRECISION: tl.constexpr,
         SCALE_O: tl.constexpr, SCALE_I: tl.constexpr):  # fmt: skip
    """Return acc + weight @ x^T for one input block; without SWAP, both operands of the sum are transposed."""
    x, weight, block_scale_ptr = operands
    tokens, outputs, inputs = size
    w_OI = _load(weight, row_o, row_i, outputs, inputs, BLOCK_O, BLOCK_I, EVEN, TMA, "evict_first")
    x_TI = _load(x, row_t, row_i, tokens, inputs, BLOCK_T, BLOCK_I, EVEN, TMA, "evict_last")
    if SCALE_O > 0:
        scale = tl.load(block_scale_ptr + row_o // SCALE_O * tl.cdiv(inputs, SCALE_I) + row_i // SCALE_I)
        acc += (tl.dot(w_OI, x_TI.T) if SWAP else tl.dot(x_TI, w_OI.T)) * scale
    elif SWAP:
        acc = tl.dot(w_OI, x_TI.T, acc, max_num_imprecise_acc=IMPRECISE, input_precision=PRECISION, out_dtype=acc.dtype)
    else:
        acc = tl.dot(x_TI, w_OI.T, acc, max_num_imprecise_acc=IMPRECISE, input_precision=PRECISION, out_dtype=acc.dtype)
    return acc


@triton.jit
def _reduce_split(
    total, tile, done, part_ptr, count_ptr, epilogue, size, cut, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr
):
    """Store this program's sum over `done` units of a split tile. The tile's last program to arrive adds all sums."""
    t_tiles, blocks, units, programs = cut
    mine = tl.program_id(0)
    start = tile * blocks
    at = part_ptr + tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    # Only the first and the last tile of a program can be split.
    slot = 2 * mine + (start > mine * units // programs).to(tl.int32)
    tl.store(at + slot.to(tl.int64) * (BLOCK_O * BLOCK_T), total)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr + tile, done, sem="acq_rel") + done == blocks:
        tl.store(count_ptr + tile, 0)
        total = tl.zeros((BLOCK_O, BLOCK_T), part_ptr.dtype.element_ty)
        first = ((start + 1) * programs - 1) // units
        last = ((start + blocks) * programs - 1) // units
        for program in range(first, last + 1):
            slot = 2 * program + (start > program * units // programs).to(tl.int32)
            total += tl.load(at + slot.to(tl.int64) * (BLOCK_O * BLOCK_T), cache_modifier=".cg")
        _write(total, tile // t_tiles * BLOCK_O, tile % t_tiles * BLOCK_T, epilogue, size, BLOCK_T, BLOCK_O)


@triton.jit
def _run_units(operands, first, last, part_ptr, count_ptr, epilogue, size, cut, BLOCK_T: tl.constexpr,
               BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr, SWAP: tl.constexpr,
               IMPRECISE: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr, SCALE_O: tl.constexpr,
               SCALE_I: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Process units [first, last) of one tile."""
    t_tiles, blocks, units, programs = cut
    tile = first // blocks
    row_o = tile // t_tiles * BLOCK_O
    row_t = tile % t_tiles * BLOCK_T
    acc = tl.zeros((BLOCK_O, BLOCK_T) if SWAP else (BLOCK_T, BLOCK_O), SUM)
    for block in range(first - tile * blocks, last - tile * blocks):
        acc = _add(acc, operands, row_o, row_t, block * BLOCK_I, size, BLOCK_T, BLOCK_O, BLOCK_I, EVEN, TMA,
                   SWAP, IMPRECISE, PRECISION, SCALE_O, SCALE_I)  # fmt: skip
    # The weight has been read, so the next kernel may launch while the sums are reduced and written.
    announce(PDL)
    total = acc if SWAP else acc.T
    if part_ptr is None:
        _write(total, row_o, row_t, epilogue, size, BLOCK_T, BLOCK_O)
    elif last - first == blocks:
        _write(total, row_o, row_t, epilogue, size, BLOCK_T, BLOCK_O)
    else:
        _reduce_split(total, tile, last - first, part_ptr, count_ptr, epilogue, size, cut, BLOCK_T, BLOCK_O)


PREFETCH_LINES = tl.constexpr(4)
"""Cache lines that a program prefetches from each of its first weight rows before it may start. More of them would
slow down the programs that are still streaming."""


@triton.jit(do_not_specialize=["tokens", "x_scale_st", "weight_scale_so", "t_tiles", "blocks", "units", "programs"])
def _matmul(
    x,
    weight,
    weight_ptr,
    x_scale_ptr,
    weight_scale_ptr,
    block_scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    tokens,
    outputs,
    inputs,
    x_scale_st,
    weight_scale_so,
    t_tiles,
    blocks,
    units,
    programs,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    EVEN: tl.constexpr,
    ONE_TILE: tl.constexpr,
    TMA: tl.constexpr,
    SWAP: tl.constexpr,
    IMPRECISE: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALE_O: tl.constexpr,
    SCALE_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """ONE_TILE: no program has units of two tiles. IMPRECISE: number of products that FP8 tensor cores may sum in fewer
    bits before adding to float32; None = all. SCALE_O, SCALE_I: outputs and inputs that share a scale of the weight,
    multiples of BLOCK_O and BLOCK_I; 0 = each output has one."""
    epilogue = (x_scale_ptr, x_scale_st, weight_scale_ptr, weight_scale_so, bias_ptr, out_ptr)
    operands = (x, weight, block_scale_ptr)
    size = (tokens, outputs, inputs)
    cut = (t_tiles, blocks, units, programs)
    mine = tl.program_id(0)
    lo = mine * units // programs
    hi = (mine + 1) * units // programs
    if PDL:
        # Prefetch the first weight blocks while the preceding kernel ends.
        LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
        row = lo // blocks // t_tiles * BLOCK_O + tl.arange(0, BLOCK_O)[:, None]
        column = lo % blocks * BLOCK_I + tl.arange(0, PREFETCH_LINES)[None, :] * LINE
        first_lines = weight_ptr + row.to(tl.int64) * inputs + column
        prefetch(first_lines, (row < outputs) & (column < inputs))
    wait(PDL)
    # Integers are summed as such.
    SUM: tl.constexpr = tl.int32 if weight_ptr.dtype.element_ty == tl.int8 else tl.float32
    if ONE_TILE:
        _run_units(operands, lo, hi, part_ptr, count_ptr, epilogue, size, cut, BLOCK_T, BLOCK_O, BLOCK_I, EVEN, TMA,
                   SWAP, IMPRECISE, PRECISION, SUM, SCALE_O, SCALE_I, PDL)  # fmt: skip
    else:
        # The end of a tile begun by another program, whole tiles, and the beginning of a tile that another program
        # ends. Whole tiles form one loop, so the last matmuls of a tile overlap with the first loads of the next.
        whole_lo = tl.minimum(tl.cdiv(lo, blocks) * blocks, hi)
        whole_hi = tl.maximum(hi // blocks * blocks, whole_lo)
        if part_ptr is not None:
            if whole_lo > lo:
                _run_units(operands, lo, whole_lo, part_ptr, count_ptr, epilogue, size, cut, BLOCK_T, BLOCK_O, BLOCK_I,
                           EVEN, TMA, SWAP, IMPRECISE, PRECISION, SUM, SCALE_O, SCALE_I, False)  # fmt: skip
        acc = tl.zeros((BLOCK_O, BLOCK_T) if SWAP else (BLOCK_T, BLOCK_O), SUM)
        for unit in range(whole_lo, whole_hi):
            tile = unit // blocks
            block = unit - tile * blocks
            row_o = tile // t_tiles * BLOCK_O
            row_t = tile % t_tiles * BLOCK_T
            acc = _add(acc, operands, row_o, row_t, block * BLOCK_I, size, BLOCK_T, BLOCK_O, BLOCK_I, EVEN,
                       TMA, SWAP, IMPRECISE, PRECISION, SCALE_O, SCALE_I)  # fmt: skip
            if block == blocks - 1:
                total = acc if SWAP else acc.T
                _write(total, row_o, row_t, epilogue, size, BLOCK_T, BLOCK_O)
                acc = tl.zeros((BLOCK_O, BLOCK_T) if SWAP else (BLOCK_T, BLOCK_O), SUM)
        if part_ptr is not None:
            if whole_hi < hi:
                _run_units(operands, whole_hi, hi, part_ptr, count_ptr, epilogue, size, cut, BLOCK_T, BLOCK_O, BLOCK_I,
                           EVEN, TMA, SWAP, IMPRECISE, PRECISION, SUM, SCALE_O, SCALE_I, False)  # fmt: skip


@triton.jit
def _rescale(
    sums_ptr, x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr, outputs, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    announce(PDL)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < outputs
    scale = tl.load(weight_scale_ptr + o, mask=inside, other=0.0)
    bias = 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + o, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    sums = tl.load(sums_ptr + row * outputs + o, mask=inside, other=0).to(tl.float32)
    y = sums * tl.load(x_scale_ptr + row) * scale + bias
    tl.store(out_ptr + row * outputs + o, y.to(out_ptr.dtype.element_ty), mask=inside)


def rescale_triton(
    sums_TO: torch.Tensor,
    x_scale_T1: torch.Tensor,
    weight_scale_O: torch.Tensor,
    bias_O: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return int32 sums * x_scale * weight_scale + bias, in `dtype`."""
    tokens, outputs = sums_TO.shape
    out_TO = torch.empty(tokens, outputs, dtype=dtype, device=sums_TO.device)
    block = min(2048, power_of_2(outputs))
    _rescale[(tokens, ceil_div(outputs, block))](
        sums_TO, x_scale_T1, weight_scale_O, bias_O, out_TO, outputs, BLOCK=block, num_warps=4, **dependent(sums_TO)
    )
    return out_TO


def matmul_triton(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    tile: MatmulTile,
    counts: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    bias_O: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    imprecise: int | None = None,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Launch the matmul kernel of a tile. Arguments are as in core.ops.matmul. `block`: outputs and inputs that share a
    scale of the weight, as core.ops.tile_choice.block_tile can serve; None = each output has one.

    `counts`, for split tiles: int32 zeros, at least one per tile, zero again when the kernel ends. Matmuls that may run
    concurrently need separate ones.
    """
    tokens, inputs = x_TI.shape
    outputs = weight_OI.shape[0]
    out_TO = torch.empty(tokens, outputs, dtype=dtype or x_TI.dtype, device=x_TI.device)
    t_tiles, tiles, blocks, programs = tile.launch(tokens, outputs, inputs)
    parts = None
    if tile.splits_tiles(tokens, outputs, inputs):
        have, need = 0 if counts is None else counts.numel(), tile.counters(tokens, outputs, inputs)
        if have < need:
            raise ValueError(f"split tiles need {need} counters; `counts` has {have}")
        sums = torch.int32 if weight_OI.dtype is torch.int8 else torch.float32
        parts = torch.empty(2 * programs * tile.tokens * tile.outputs, dtype=sums, device=x_TI.device)
    blocks_scale = None
    if block is not None:
        weight_scale, blocks_scale = None, weight_scale
    scales = (x_scale, _step(x_scale), weight_scale, _step(weight_scale), blocks_scale)
    scale_o, scale_i = block or (0, 1)
    if tile.specialized:
        from dovetail.core.ops.kernels import specialized_matmul

        exact = imprecise is not None and weight_OI.dtype is torch.float8_e4m3fn
        specialized_matmul.launch_matmul(x_TI, weight_OI, out_TO, tile, parts, counts, scales, bias_O, exact, scale_o)
        return out_TO
    if tile.prefetch:
        from dovetail.core.ops.kernels import prefetch_matmul

        prefetch_matmul.launch_matmul(x_TI, weight_OI, out_TO, tile, parts, counts, scales, bias_O, scale_o)
        return out_TO
    x, weight = x_TI, weight_OI
    if tile.tma:
        x = TensorDescriptor(x_TI, [readable_rows(x_TI, tile.tokens), inputs], [inputs, 1], [tile.tokens, tile.inputs])
        weight = TensorDescriptor.from_tensor(weight_OI, [tile.outputs, tile.inputs])
    _matmul[(programs,)](
        x,
        weight,
        weight_OI,
        x_scale,
        weight_scale,
        blocks_scale,
        bias_O,
        out_TO,
        parts,
        counts,
        tokens,
        outputs,
        inputs,
        _step(x_scale),
        _step(weight_scale),
        t_tiles,
        blocks,
        tiles * blocks,
        programs,
        BLOCK_T=tile.tokens,
        BLOCK_O=tile.outputs,
        BLOCK_I=tile.inputs,
        EVEN=inputs % tile.inputs == 0,
        ONE_TILE=programs % tiles == 0,
        TMA=tile.tma,
        SWAP=tile.swap,
        IMPRECISE=imprecise,
        SCALE_O=scale_o,
        SCALE_I=scale_i,
        PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(x_TI),
    )
    return out_TO


def _step(scale: torch.Tensor | None) -> int:
    """Stride from one row's scale to the next; 0 for a single scale."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)
