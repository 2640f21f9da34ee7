"""Prediction of a matmul's time from the facts of a GPU, for shapes that no table has.

Programs stream blocks of weight and input through shared memory and multiply them. The time is bound by the memory and
the L2 cache for all programs, and for the SM that has the most work by its path to them, by the latency of blocks, of
which only so many are in flight, and by its instructions. To these come the launch and the time until the first block
arrives, further waves of programs, and the sums of split tiles. The constants that do not follow from the GPU's facts
(`Fit`) are fitted by benchmarks/fit_tiles.py to the timings of searches.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.tiles import MatmulTile
from dovetail.core.tuning.candidates import ITEMSIZE, resident
from dovetail.core.tuning.gpu import Gpu

MMA_ROWS = 64
"""Rows of the left operand of a tensor core instruction."""
DEFERRED, CONVERTED = "deferred", "converted"
"""Ways of the library's matmul of FP8: without scales, which the consumer applies, and followed by a conversion from
bfloat16, the only dtype that it writes."""
LIBRARY_TILES = ((64, 128), (128, 128), (128, 256), (256, 128))
"""(rows, outputs) of the library's tiles. For FP8 with scales per row, it uses those of 64 rows up to 64 rows only."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants of the prediction."""

    launch: float = 1.78e-6
    """Seconds from the end of the preceding kernel to the first load, and from the last product to the end."""
    latency: float = 7.53e-7
    """Seconds from a load of the weight to its data, under load."""
    x_latency: float = 5.62e-7
    """The same for x, which is in the L2 cache."""
    memory: float = 0.92
    """Attainable share of the memory's bandwidth."""
    sm: float = 4.73
    """Bandwidth of one SM, as a multiple of its equal share of the memory's."""
    l2: float = 3.25
    """Bandwidth of the L2 cache, as a multiple of the memory's."""
    products: float = 0.688
    """Attainable share of the tensor cores' rate."""
    operand: float = 1.46
    """Columns of the right operand whose products take as long as reading the left operand."""
    block: float = 70.3
    """Cycles of a program per block, for barriers and addresses."""
    copy: float = 10.2
    """Cycles of an SM for each KiB that no tensor memory accelerator fetches."""
    wave: float = 7.17e-8
    """Seconds between a program's end and the first product of the program that takes its place."""
    split: float = 2.75e-7
    """Seconds to join the sums of a split tile, besides their bytes."""
    join: float = 0.919
    """Bandwidth with which one program reads the sums of its tile, as a multiple of an SM's equal share of the
    memory's."""
    overlap: float = 1.18e-8
    """Seconds during which a prefetching tile reads its weight while the preceding kernel runs."""
    hardness: float = 2.95
    """Exponent with which the bounds add up: 1 = one after the other, infinite = the largest alone counts."""
    library_launch: float = 5.23e-6
    """Seconds of the library's matmul besides the streams."""
    library_memory: float = 0.89
    library_products: float = 1.0
    library_scales: float = 2.75e-6
    """Seconds of the library's 8-bit matmul for scales per row."""
    library_outputs: float = 1.52e-12
    """Seconds of that matmul for each output, to scale and to convert it."""
    library_conversion: float = 5e-7
    """Seconds to convert its outputs to float16, and seconds for each of them."""
    library_converted: float = 1e-12


FIT = Fit()


def tile_seconds(tile: MatmulTile, rows: int, outputs: int, inputs: int, kind: str, gpu: Gpu, fit: Fit = FIT) -> float:
    """Return the time of x [rows, inputs] @ weight [outputs, inputs]^T with this tile, after another kernel."""
    itemsize = ITEMSIZE[kind]
    _, tiles, blocks, programs = tile.launch(rows, outputs, inputs)
    units = tiles * blocks
    slots = resident(tile, itemsize, gpu)
    each = min(slots, ceil_div(programs, gpu.processors))
    # Blocks of the SM with the most work.
    work = ceil_div(programs, gpu.processors) * units / programs
    weight_block = tile.outputs * tile.inputs * itemsize
    x_block = tile.tokens * tile.inputs * itemsize
    stream = fit.sm * gpu.bandwidth / gpu.processors
    # While a block is multiplied, the others of its ring are in flight.
    weight_wait = fit.latency / max((tile.prefetch or tile.stages) - 1, 1)
    x_wait = fit.x_latency / max(tile.stages - 1, 1)
    cycles = _product_cycles(tile, itemsize, gpu, fit) / fit.products + fit.block / each
    if not (tile.tma or tile.needs_hopper):
        cycles += fit.copy * (weight_block + x_block) / 1024
    bounds = (
        outputs * inputs * itemsize / (fit.memory * gpu.bandwidth),
        units * (weight_block + x_block) / (fit.l2 * gpu.bandwidth),
        work * (weight_block + x_block) / stream,
        work / each * max(weight_wait, x_wait),
        work * cycles / gpu.clock,
    )
    total = fit.launch + fit.latency + sum(bound**fit.hardness for bound in bounds) ** (1 / fit.hardness)
    total += fit.wave * (ceil_div(programs, slots * gpu.processors) - 1)
    if tile.prefetch:
        held = min(tile.prefetch, units / programs) * weight_block * each
        total -= min(fit.overlap, held / stream)
    if tile.splits_tiles(rows, outputs, inputs):
        # The last program of a tile joins the sums of all, one part after the other.
        sums = ceil_div(programs, tiles) * tile.tokens * tile.outputs * 4
        total += fit.split + sums / (fit.join * gpu.bandwidth / gpu.processors)
    return total


def _product_cycles(tile: MatmulTile, itemsize: int, gpu: Gpu, fit: Fit) -> float:
    """Return the tensor cores' cycles for a block, at their full rate but for reading the left operand."""
    swap = tile.swap and not tile.specialized
    left, right = (tile.outputs, tile.tokens) if swap else (tile.tokens, tile.outputs)
    left = ceil_div(left, MMA_ROWS) * MMA_ROWS
    return left * (right + fit.operand) * tile.inputs * itemsize / gpu.flops_per_cycle


def library_seconds(
    rows: int,
    outputs: int,
    inputs: int,
    kind: str,
    gpu: Gpu,
    fit: Fit = FIT,
    way: str = "",
) -> float:
    """Return the time of the library's matmul with its best tile. `way`: DEFERRED or CONVERTED, or neither."""
    itemsize = ITEMSIZE[kind]
    nbytes = (outputs * inputs + rows * inputs) * itemsize + 2 * rows * outputs
    stream = nbytes / (fit.library_memory * gpu.bandwidth)
    rate = fit.library_products * gpu.flops_per_cycle * 2 / itemsize * gpu.clock
    scales = kind != "bf16" and way != DEFERRED
    products = min(
        ceil_div(ceil_div(rows, height) * ceil_div(outputs, width), gpu.processors) * 2 * height * width * inputs / rate
        for height, width in LIBRARY_TILES
        if height >= rows or height > MMA_ROWS or kind != "fp8" or not scales
    )
    bounds = (stream, products)
    total = fit.library_launch + sum(bound**fit.hardness for bound in bounds) ** (1 / fit.hardness)
    if scales:
        total += fit.library_scales + rows * outputs * fit.library_outputs
    if way == CONVERTED:
        total += fit.library_conversion + rows * outputs * fit.library_converted
    return total
