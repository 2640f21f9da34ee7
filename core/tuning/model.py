"""Prediction of a matmul's time from the facts of a GPU, for shapes that no table has.

A program streams blocks of weight and input through shared memory and multiplies them. The slowest of four rates
determines the time per block: the GPU's memory, the SM's path to memory, its path to the L2 cache, and its tensor
cores. To this come the time until the first block arrives, the sums of split tiles, and the launch. The constants that
do not follow from the GPU's facts (`Fit`) are fitted by benchmarks/fit_tiles.py to the timings of searches.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.tiles import MatmulTile
from dovetail.core.tuning.candidates import ITEMSIZE, resident
from dovetail.core.tuning.gpu import Gpu

FLOPS_PER_CYCLE = 8192
"""16-bit operations of an SM per clock cycle, as of Hopper; 8-bit ones take half the time."""
MMA_ROWS = 64
"""Rows of the left operand of a tensor core instruction."""
LIBRARY_TILES = ((64, 128), (128, 128), (128, 256), (256, 128))
"""(rows, outputs) of the library's tiles."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants of the prediction."""

    launch: float = 1.0e-6
    """Seconds from the end of the preceding kernel to the first load, and from the last product to the end."""
    latency: float = 0.9e-6
    """Seconds from a load to its data, under load."""
    memory: float = 0.93
    """Attainable share of the memory's bandwidth."""
    sm: float = 1.9
    """Bandwidth of one SM from memory, as a multiple of its equal share."""
    l2: float = 2.2
    """Bandwidth of the L2 cache, as a multiple of the memory's."""
    products: float = 0.75
    """Attainable share of the tensor cores' rate."""
    operand: float = 48.0
    """Columns of the right operand whose products take as long as reading the left operand."""
    block: float = 60.0
    """Cycles of an SM per block, for barriers and addresses."""
    split: float = 1.6e-6
    """Seconds to join the sums of a split tile, besides their bytes."""
    overlap: float = 1.2e-6
    """Seconds during which a prefetching tile reads its weight while the preceding kernel runs."""
    library_launch: float = 3.5e-6
    """Seconds of the library's matmul besides the streams."""
    library_memory: float = 0.85
    library_products: float = 0.62
    library_rows: float = 1.0
    """Factor on the library's time with scales per row."""


FIT = Fit()


def tile_seconds(tile: MatmulTile, rows: int, outputs: int, inputs: int, kind: str, gpu: Gpu, fit: Fit = FIT) -> float:
    """Return the time of x [rows, inputs] @ weight [outputs, inputs]^T with this tile, after another kernel."""
    itemsize = ITEMSIZE[kind]
    _, tiles, blocks, programs = tile.launch(rows, outputs, inputs)
    units = tiles * blocks
    active = min(programs, gpu.processors)
    each = min(resident(tile, itemsize, gpu), ceil_div(programs, gpu.processors))
    # Blocks of the SM with the most work.
    work = ceil_div(programs, gpu.processors) * units / programs
    weight_block = tile.outputs * tile.inputs * itemsize
    x_block = tile.tokens * tile.inputs * itemsize
    share = gpu.bandwidth / gpu.processors
    in_flight = each * weight_block * (tile.prefetch or tile.stages)
    stream = min(fit.sm * share, in_flight / fit.latency)
    stream = min(stream, fit.memory * gpu.bandwidth / active)
    cache = fit.l2 * gpu.bandwidth / active
    cycles = _product_cycles(tile, itemsize, fit) / fit.products + fit.block / each
    per_block = max(weight_block / stream, (weight_block + x_block) / cache, cycles / gpu.clock)
    total = fit.launch + fit.latency + work * per_block
    if tile.prefetch:
        held = min(tile.prefetch, units / programs) * weight_block
        total -= min(fit.overlap, held / stream)
    if tile.splits_tiles(rows, outputs, inputs):
        sums = 2 * programs * tile.tokens * tile.outputs * 4
        total += fit.split + sums / (fit.l2 * gpu.bandwidth)
    return total


def _product_cycles(tile: MatmulTile, itemsize: int, fit: Fit) -> float:
    """Return the tensor cores' cycles for a block, at their full rate but for reading the left operand."""
    left, right = (tile.outputs, tile.tokens) if tile.swap else (tile.tokens, tile.outputs)
    left = ceil_div(left, MMA_ROWS) * MMA_ROWS
    return 2 * left * (right + fit.operand) * tile.inputs * itemsize / 2 / FLOPS_PER_CYCLE


def library_seconds(rows: int, outputs: int, inputs: int, kind: str, gpu: Gpu, fit: Fit = FIT) -> float:
    """Return the time of the library's matmul with its best tile."""
    itemsize = ITEMSIZE[kind]
    nbytes = (outputs * inputs + rows * (inputs + outputs)) * itemsize
    stream = nbytes / (fit.library_memory * gpu.bandwidth)
    rate = fit.library_products * FLOPS_PER_CYCLE * 2 / itemsize * gpu.clock
    products = min(
        ceil_div(ceil_div(rows, height) * ceil_div(outputs, width), gpu.processors) * 2 * height * width * inputs / rate
        for height, width in LIBRARY_TILES
    )
    total = fit.library_launch + max(stream, products)
    return total * (fit.library_rows if kind == "fp8" else 1.0)
