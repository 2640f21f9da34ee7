"""Products of routed experts. Pairs of token and expert are sorted by expert; each tile has rows of one expert. All
shapes are static: tiles that a step does not need end at once, so one CUDA graph serves every routing.

The first product gathers rows of x and ends in the activation, the second ends in the routing weight and writes a row
for each pair, and a last kernel sums the rows of a token in the order of its experts.

Shapes: T tokens, K experts of a token, P = T * K pairs, E experts, C hidden channels, F channels of an expert, O
output, I input.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.activation import ActFormat, Activation
from dovetail.core.interfaces.expert import ExpertBias, GatedActivation, Routing
from dovetail.core.ops.choices import Choices, installed
from dovetail.core.ops.expert_choice import DOWN, UP, divides, fits, listed_tile
from dovetail.core.ops.expert_tiles import (
    GROUPED,
    MOST_ROWS,
    ExpertTile,
    expert_tile,
    specialized,
    specialized_expert_tile,
    specialized_rows,
)
from dovetail.core.ops.experts import ExpertWeights
from dovetail.core.ops.formats import encode
from dovetail.core.ops.kernels.expert_pairs import (
    Order,
    Sorted,
    order_of,
    sort_pairs,
    sum_pairs,
)
from dovetail.core.ops.kernels.launch import announce, dependent, wait
from dovetail.core.ops.matmul import KINDS, device_facts
from dovetail.core.ops.rehearsal import report_kernel

IMPRECISE = 128
"""Number of 8-bit products that the tensor core sums in its accumulator of fewer bits before adding to float32."""


@triton.jit
def _load_rows(ptr, rows, columns, inside, width, EVEN: tl.constexpr, EVICT: tl.constexpr):
    """Load columns of rows with `width` columns; zero outside."""
    ok = inside[:, None]
    if not EVEN:
        ok = ok & (columns < width)[None, :]
    return tl.load(ptr + rows[:, None] * width + columns[None, :], mask=ok, other=0.0, eviction_policy=EVICT)


@triton.jit
def _multiply(acc, x, weight, SWAP: tl.constexpr, IMPRECISE: tl.constexpr, PRECISION: tl.constexpr):
    """Return acc + x @ weight^T; with SWAP, both operands of the sum are transposed."""
    if SWAP:
        return tl.dot(weight, x.T, acc, max_num_imprecise_acc=IMPRECISE, input_precision=PRECISION, out_dtype=acc.dtype)
    else:
        return tl.dot(x, weight.T, acc, max_num_imprecise_acc=IMPRECISE, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def _multiply_block(acc, x, weight, scale_O, SWAP: tl.constexpr):
    """Return acc + (x @ weight^T) * scale of one block of inputs."""
    if weight.shape[1] < 32:  # Tensor cores multiply 8-bit values in steps of 32 inputs. E4M3 is exact in float16.
        x, weight = x.to(tl.float16), weight.to(tl.float16)
    if SWAP:
        return acc + tl.dot(weight, x.T) * scale_O[:, None]
    else:
        return acc + tl.dot(x, weight.T) * scale_O[None, :]


@triton.jit
def completed(acc_TO, x_scale_T, scale_ptr, bias_ptr, at_O, inside_O):
    """Apply scales and bias. Pointers are to the expert's first output."""
    if x_scale_T is not None:
        acc_TO = acc_TO * x_scale_T[:, None]
    if scale_ptr is not None:
        acc_TO = acc_TO * tl.load(scale_ptr + at_O, mask=inside_O, other=0.0)[None, :]
    if bias_ptr is not None:
        acc_TO += tl.load(bias_ptr + at_O, mask=inside_O, other=0.0).to(tl.float32)[None, :]
    return acc_TO


@triton.jit
def place_of_program(tiles, outputs, GROUP: tl.constexpr, BLOCK_O: tl.constexpr):
    """Return this program's tile of rows and its first output."""
    o_tiles = (outputs + BLOCK_O - 1) // BLOCK_O
    program = tl.program_id(0)
    group = program // (GROUP * o_tiles)
    in_group = program - group * GROUP * o_tiles
    size = tl.minimum(tiles - group * GROUP, GROUP)
    return group * GROUP + in_group % size, in_group // size * BLOCK_O


@triton.jit
def pairs_of_tile(order_ptr, tiles_ptr, experts_ptr, tile, ROWS: tl.constexpr):
    """Return a tile's expert, negative if there is none, and its places in the sorted order, whether they are its own,
    and their pairs."""
    if tiles_ptr is None:
        expert = tl.load(experts_ptr + tile)
        place_T = tile + tl.arange(0, ROWS)
        inside_T = place_T < tile + 1
        pair_T = place_T
    else:
        expert = tl.load(tiles_ptr + 3 * tile)
        place_T = tl.load(tiles_ptr + 3 * tile + 1) + tl.arange(0, ROWS)
        inside_T = (place_T < tl.load(tiles_ptr + 3 * tile + 2)) & (expert >= 0)
        pair_T = tl.load(order_ptr + place_T, mask=inside_T, other=0)
    return expert, place_T, inside_T, pair_T


@triton.jit
def activated(gate, up, alpha, limit, offset, LIMITED: tl.constexpr):
    """Return GatedActivation of float32 blocks."""
    if LIMITED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + offset)


@triton.jit
def write_rows(out_ptr, y_TO, to_T, inside_T, at_O, outputs):
    to = out_ptr + to_T.to(tl.int64)[:, None] * outputs + at_O[None, :]
    tl.store(to, y_TO.to(out_ptr.dtype.element_ty), mask=inside_T[:, None] & (at_O < outputs)[None, :])


@triton.jit(do_not_specialize=["tiles", "x_scale_st"])
def _expert_matmul(
    x_ptr,
    x_scale_ptr,
    x_scale_st,
    weight_ptr,
    scale_ptr,
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
    BLOCK_I: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_O: tl.constexpr,
    GROUP_I: tl.constexpr,
    EVEN: tl.constexpr,
    SWAP: tl.constexpr,
    IMPRECISE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile. GATED: the first product, from rows of x by token to rows by place in the sorted order; otherwise the
    second one, from there to rows by pair. With tiles_ptr None, each pair is a tile and places are pairs. EVEN: blocks
    divide the inputs. GROUP_O, GROUP_I: outputs and inputs that share a scale of the weight; 0 = a scale per output.
    Blocks divide GROUP_I."""
    wait(PDL)
    tile, start_O = place_of_program(tiles, outputs, GROUP, BLOCK_O)
    expert, place_T, inside_T, pair_T = pairs_of_tile(order_ptr, tiles_ptr, experts_ptr, tile, ROWS)
    if expert < 0:
        return
    row_T = (pair_T // ACTIVE if GATED else place_T).to(tl.int64)
    at_O = start_O + tl.arange(0, BLOCK_O)
    inside_O = at_O < outputs
    expert_O = expert.to(tl.int64) * outputs * (2 if GATED else 1)
    row_O = at_O.to(tl.int64)
    ours = weight_ptr + expert_O * inputs
    SUMS: tl.constexpr = tl.int32 if weight_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros((BLOCK_O, ROWS) if SWAP else (ROWS, BLOCK_O), SUMS)
    if GATED:
        acc_up = tl.zeros((BLOCK_O, ROWS) if SWAP else (ROWS, BLOCK_O), SUMS)
    if GROUP_I > 0:
        groups_O = (outputs + GROUP_O - 1) // GROUP_O
        groups_I = (inputs + GROUP_I - 1) // GROUP_I
        scale_row = expert * groups_O * (2 if GATED else 1) + at_O // GROUP_O
    for start in range(0, inputs, BLOCK_I):
        columns = start + tl.arange(0, BLOCK_I)
        x_TI = _load_rows(x_ptr, row_T, columns, inside_T, inputs, EVEN, "evict_last")
        weight_OI = _load_rows(ours, row_O, columns, inside_O, inputs, EVEN, "evict_first")
        if GROUP_I > 0:
            scales = scale_ptr + scale_row * groups_I + start // GROUP_I
            acc = _multiply_block(acc, x_TI, weight_OI, tl.load(scales, mask=inside_O, other=0.0), SWAP)
        else:
            acc = _multiply(acc, x_TI, weight_OI, SWAP, IMPRECISE, PRECISION)
        if GATED:
            weight_OI = _load_rows(ours, outputs + row_O, columns, inside_O, inputs, EVEN, "evict_first")
            if GROUP_I > 0:
                scales += groups_O * groups_I
                acc_up = _multiply_block(acc_up, x_TI, weight_OI, tl.load(scales, mask=inside_O, other=0.0), SWAP)
            else:
                acc_up = _multiply(acc_up, x_TI, weight_OI, SWAP, IMPRECISE, PRECISION)
    announce(PDL)
    acc = acc.to(tl.float32)
    if GATED:
        acc_up = acc_up.to(tl.float32)
    if SWAP:
        acc = acc.T
        if GATED:
            acc_up = acc_up.T
    # Scales of blocks are in the sum already.
    outer_ptr = None
    if scale_ptr is not None:
        if GROUP_I == 0:
            outer_ptr = scale_ptr + expert_O
    if bias_ptr is not None:
        bias_ptr += expert_O
    x_scale_T = None
    if x_scale_ptr is not None:
        x_scale_T = tl.load(x_scale_ptr + row_T * x_scale_st, mask=inside_T, other=0.0)
    y_TO = completed(acc, x_scale_T, outer_ptr, bias_ptr, at_O, inside_O)
    if GATED:
        up_TO = completed(acc_up, x_scale_T, outer_ptr, bias_ptr, outputs + at_O, inside_O)
        y_TO = activated(y_TO, up_TO, alpha, limit, offset, LIMITED)
        write_rows(out_ptr, y_TO, place_T, inside_T, at_O, outputs)
    else:
        y_TO = y_TO * tl.load(routing_ptr + pair_T, mask=inside_T, other=0.0)[:, None]
        write_rows(out_ptr, y_TO, pair_T, inside_T, at_O, outputs)


def gated_experts_triton(
    x: Activation,
    routing: Routing,
    weights: ExpertWeights,
    activation: GatedActivation,
    bias: ExpertBias | None,
    between: ActFormat,
    dtype: torch.dtype,
    fast_accum: bool,
    chosen: tuple[ExpertTile, ExpertTile] | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """Launch the kernels of core.ops.experts.gated_experts. `chosen`: tiles of the two products, with equally many
    rows; None = those of tuning tables, or else of the rule. `rows`: rows of a tile; None = likewise."""
    (tokens, active), device = routing.experts_TK.shape, x.values.device
    experts, hidden, channels = weights.down.shape
    if not tokens:
        return torch.empty(tokens, hidden, dtype=dtype, device=device)

    def kernel(count: int) -> Hashable:
        order, tiles = tiles_for(count, active, x, weights, rows)
        return order.rows, order.block, order.counts, tiles

    shapes = weights.up.shape, weights.up.dtype, weights.block, x.values.dtype
    report_kernel(("experts", active, *shapes), tokens, kernel)
    if chosen is None:
        order, (first, second) = tiles_for(tokens, active, x, weights, rows)
        sorted_rows = order.rows if order.block else None
    else:
        (first, second), sorted_rows = chosen, chosen[0].rows
    pairs = sort_pairs(routing, experts, sorted_rows)
    # Outputs and inputs of each product that share a scale.
    of_c, of_f = weights.block or (0, 0)
    inner_PF = torch.empty(tokens * active, channels, dtype=dtype, device=device)
    up_bias, down_bias = (None, None) if bias is None else (bias.up, bias.down)
    up = weights.up, weights.up_scale, up_bias, (of_f, of_c)
    _multiply_pairs(x, *up, pairs, first, inner_PF, activation, fast_accum)
    inner = encode(inner_PF, (between,))[between]
    down_PC = torch.empty(tokens * active, hidden, dtype=dtype, device=device)
    down = weights.down, weights.down_scale, down_bias, (of_c, of_f)
    _multiply_pairs(inner, *down, pairs, second, down_PC, None, fast_accum)
    return sum_pairs(down_PC, routing)


def _multiply_pairs(
    x: Activation,
    weight_EOI: torch.Tensor,
    scale_EO: torch.Tensor | None,
    bias_EO: torch.Tensor | None,
    block: tuple[int, int],
    pairs: Sorted,
    tile: ExpertTile,
    out: torch.Tensor,
    activation: GatedActivation | None,
    fast_accum: bool,
) -> None:
    """Launch the first product, which ends in `activation`, or the second one (None). `block`: outputs and inputs that
    share a scale; 0 = a scale per output."""
    precise = weight_EOI.dtype is torch.float8_e4m3fn and (tile.rows < MOST_ROWS or not fast_accum)
    if tile.residents:
        from dovetail.core.ops.kernels.specialized_experts import multiply_specialized

        return multiply_specialized(x, weight_EOI, scale_EO, block, bias_EO, pairs, tile, out, activation, precise)
    outputs, inputs = out.shape[1], weight_EOI.shape[2]
    limit = activation.limit if activation is not None else None
    _expert_matmul[(pairs.tiles * ceil_div(outputs, tile.outputs),)](
        x.values.contiguous(),
        x.scale,
        0 if x.scale is None or x.scale.numel() == 1 else x.scale.stride(0),
        weight_EOI,
        scale_EO,
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
        BLOCK_I=tile.inputs,
        GROUP=GROUPED,
        GROUP_O=block[0],
        GROUP_I=block[1],
        EVEN=inputs % tile.inputs == 0,
        SWAP=tile.rows < 64,
        IMPRECISE=min(IMPRECISE, tile.inputs) if precise else None,
        PRECISION="ieee" if x.values.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **dependent(out),
    )


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts by which tiles are chosen."""

    gpu: tuple[str, int, bool, int] | None
    """device_facts; None = Triton's interpreter."""
    shape: tuple[int, int, int]
    """experts, hidden, channels"""
    dtype: torch.dtype
    """The weights'."""
    block: tuple[int, int]
    """Inputs of the first and of the second product that share a scale; 0 = all."""
    alike: bool
    """Whether x has the weights' dtype."""


def tiles_for(
    tokens: int, active: int, x: Activation, weights: ExpertWeights, rows: int | None = None
) -> tuple[Order, tuple[ExpertTile, ExpertTile]]:
    """Return how pairs are sorted, and the tiles of the two products: those of installed entries, or else of the rule.
    `x`: in the format of the step's; the number of its rows does not matter. `rows`: rows of a tile; None = those of
    the first product's entry or of the rule."""
    device, dtype = x.values.device, weights.up.dtype
    gpu = device_facts(device) if device.type == "cuda" else None
    experts, hidden, channels = weights.down.shape
    facts = _Facts(gpu, (experts, hidden, channels), dtype, weights.block or (0, 0), x.values.dtype is dtype)
    return _tiles_for(installed(), tokens, active, facts, rows)


@lru_cache(maxsize=1 << 14)
def _tiles_for(
    choices: Choices, tokens: int, active: int, facts: _Facts, rows: int | None
) -> tuple[Order, tuple[ExpertTile, ExpertTile]]:
    """Every layer of a step asks for the same."""
    experts, hidden, channels = facts.shape
    order = order_of(tokens, active, experts)
    if order.block and rows is None:
        order = order_of(tokens, active, experts, _ruled_rows(tokens * active, facts))
    if facts.gpu is None or (kind := KINDS.get(facts.dtype)) is None:  # float32
        order = order if rows is None else order_of(tokens, active, experts, rows)
        return order, _ruled_tiles(order, facts)
    name, _, hopper, shared = facts.gpu
    of_key = "fp8_block" if any(facts.block) else kind, experts, active, hidden, channels

    def listed(op: str, group: int, tile_rows: int | None = None) -> ExpertTile | None:
        """Return the entry's tile if this rank's weights can have it."""
        tile = listed_tile(choices, op, name, of_key, tokens, tile_rows)
        if tile is None or not divides(tile, group) or not fits(tile.rows, bool(order.block)):
            return None
        if tile.residents:
            suits = hopper and order.block and _suits_hopper(tile.rows, facts)
            own = suits and tile == specialized_expert_tile(tile.rows, facts.dtype.itemsize, shared)
            return tile if own else None
        return tile if tile.shared_bytes(facts.dtype.itemsize, op == UP) <= shared else None

    first = listed(UP, facts.block[0]) if rows is None else None
    if order.block and (wanted := rows if first is None else first.rows) is not None:
        order = order_of(tokens, active, experts, wanted)
    second = listed(DOWN, facts.block[1], order.rows)
    ruled = _ruled_tiles(order, facts)
    return order, (first or ruled[0], second or ruled[1])


def _ruled_rows(pairs: int, facts: _Facts) -> int | None:
    """Return the rows of a tile by the rule of Hopper's kernel; None = by that of the kernel for all GPUs."""
    experts, hidden, channels = facts.shape
    rows = specialized_rows(pairs, experts, channels)
    hopper = facts.gpu is not None and facts.gpu[2]
    return rows if hopper and _suits_hopper(rows, facts) else None


def _suits_hopper(rows: int, facts: _Facts) -> bool:
    _, hidden, channels = facts.shape
    block = facts.block if any(facts.block) else None
    return facts.alike and specialized(rows, hidden, channels, facts.dtype.itemsize, block)


def _ruled_tiles(order: Order, facts: _Facts) -> tuple[ExpertTile, ExpertTile]:
    """Return the tiles of the two products by the rule."""
    size, (_, hidden, channels) = facts.dtype.itemsize, facts.shape
    processors, hopper, shared = (132, False, 64 << 10) if facts.gpu is None else facts.gpu[1:]
    # Hopper's kernel multiplies sorted pairs.
    if hopper and order.block and _suits_hopper(order.rows, facts):
        return (specialized_expert_tile(order.rows, size, shared),) * 2
    first, second = (
        expert_tile(order.rows, order.tiles, *sides, size, gated, processors, shared, group)
        for sides, gated, group in (
            ((channels, hidden), True, facts.block[0]),
            ((hidden, channels), False, facts.block[1]),
        )
    )
    return first, second
