"""Partition of the products of routed experts into programs, by a rule. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dovetail.core.arithmetic import ceil_div
from dovetail.core.ops.tiles import HOPPER_SHARED, RESERVED, SM_SHARED

LEAST_ROWS, MOST_ROWS = 16, 128
BLOCK_BYTES = 128
"""Bytes of a row that a loop iteration reads, with many rows."""
GROUPED = 16
"""Tiles of rows that are multiplied by the same outputs one after another: their weights come from the L2 cache."""
FEW_CHANNELS = 2048
"""Channels of an expert below which the beginning and end of a tile take longer than reading its weights twice."""
SPECIALIZED = {16: (1, 3), 32: (1, 3), 64: (1, 2), 128: (2, 1)}
"""Consumer warp groups and programs of an SM, by the rows of a tile."""


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Launch parameters of core.ops.kernels.experts, packed_experts or specialized_experts."""

    rows: int
    """Pairs of token and expert in a tile, all of one expert."""
    outputs: int
    """Output channels in a tile; of gate and up each."""
    inputs: int
    """Columns of a block, which one loop iteration reads."""
    warps: int
    stages: int
    """Blocks in flight."""
    residents: int = 0
    """Programs of an SM that core.ops.kernels.specialized_experts leaves registers for; 0 = another kernel runs. Each
    of its warp groups has 64 of `outputs`, and in the second product 64 more."""

    def shared_bytes(self, itemsize: int, gated: bool) -> int:
        """Upper estimate of a program's shared memory."""
        return (self.rows + self.outputs * (1 + gated)) * self.inputs * itemsize * self.stages


def rows_of_tile(pairs: int, experts: int) -> int:
    """Return the rows of a tile: enough for half as many again as an expert has on average, so that most experts have
    one tile while they are few, and their weights are read once."""
    mean = pairs / min(experts, max(pairs, 1))
    rows = LEAST_ROWS
    while rows < min(1.5 * mean, MOST_ROWS):
        rows *= 2
    return rows


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Return the greatest number of tiles that `pairs` can need, however they are distributed over experts."""
    touched = min(pairs, experts)
    return touched + (pairs - touched) // rows


def direct(tokens: int, active: int, experts: int) -> bool:
    """Whether each pair is a tile by itself. With so few pairs hardly two have the same expert, and sorting them would
    take longer than reading some weights twice, from the L2 cache."""
    return tokens == 1 or 4 * tokens * active <= experts


def expert_tile(
    rows: int,
    tiles: int,
    outputs: int,
    inputs: int,
    itemsize: int,
    gated: bool,
    processors: int,
    shared: int,
    group: int = 0,
) -> ExpertTile:
    """Return the tile for `rows` rows and about `tiles` tiles of rows. `outputs`: channels of the product, of gate and
    up each if `gated`. `itemsize`: bytes of a weight. `shared`: bytes of shared memory that a program may use.
    `group`: inputs that share a scale of the weight; 0 = all. The sum of such a block is apart, which takes registers.

    With few rows, reading weights is the limit: programs are small enough that every SM has one, and that two fit on an
    SM, so that one reads while the other begins or ends. With many rows, tiles are as large as registers allow.
    """
    if rows >= MOST_ROWS:
        # Tensor cores before Hopper's hold operands in registers.
        most = 256 if shared >= HOPPER_SHARED else 128
        tile = ExpertTile(rows, most // (1 + gated), BLOCK_BYTES // itemsize, warps=8, stages=4)
    elif rows >= 64:
        tile = ExpertTile(rows, 64 if gated else 128, BLOCK_BYTES // itemsize, warps=4, stages=4)
    else:
        most = 64 if gated else 128
        while most > 32 and tiles * ceil_div(outputs, most) < 1.5 * processors:
            most //= 2
        tile = ExpertTile(rows, most, 2 * BLOCK_BYTES // itemsize, warps=4, stages=4)
        shared //= 2
    if group:
        wide = tile.outputs if rows < 64 else tile.outputs // 2
        tile = replace(tile, outputs=wide, inputs=min(tile.inputs, group))
    while inputs % tile.inputs and tile.inputs > 64:  # Columns past the end would be masked in every block.
        tile = replace(tile, inputs=tile.inputs // 2)
    while tile.shared_bytes(itemsize, gated) > shared and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def packed_expert_tile(rows: int, itemsize: int, shared: int) -> ExpertTile:
    """Return the tile of core.ops.kernels.packed_experts. `itemsize`: bytes of a number of x; others as in
    `expert_tile`. A group of four warps multiplies 64 outputs at least, and registers have room for no more."""
    tile = ExpertTile(rows, 64, 256, warps=4, stages=4)
    if rows >= MOST_ROWS:
        tile = replace(tile, outputs=128, warps=8)
    while packed_shared(tile, itemsize) > (shared if rows >= 64 else shared // 2) and tile.stages > 1:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def packed_shared(tile: ExpertTile, itemsize: int) -> int:
    """Upper estimate of a program's shared memory in bytes: rows of x, and codes of gate and up."""
    return (tile.rows * itemsize + tile.outputs) * tile.inputs * tile.stages


def stacked_expert_tile(rows: int, bits: int, itemsize: int, gated: bool, shared: int) -> ExpertTile:
    """Return the tile of core.ops.kernels.stacked_experts. `bits`: stored bits of a code; others as in
    `packed_expert_tile`. A block is a word of each lane (core.ops.packing), of 256 or 128 inputs."""
    tile = ExpertTile(rows, 64, BLOCK_BYTES * 8 // bits, warps=4, stages=4)
    if rows >= MOST_ROWS:
        tile = replace(tile, outputs=128, warps=8)
    room = shared if rows >= 64 else shared // 2
    while stacked_shared(tile, bits, itemsize, gated) > room and tile.stages > 1:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def stacked_shared(tile: ExpertTile, bits: int, itemsize: int, gated: bool) -> int:
    """Upper estimate of a program's shared memory in bytes: rows of x, and codes."""
    of_codes = tile.outputs * (1 + gated) * bits // 8
    return (tile.rows * itemsize + of_codes) * tile.inputs * tile.stages


def specialized_packed(hidden: int, channels: int) -> bool:
    """Whether core.ops.kernels.specialized_experts can multiply packed weights of these shapes: it decodes words of a
    row's last span to whole matrix instructions."""
    return hidden % 64 == 0 and channels % 64 == 0


def specialized(rows: int, hidden: int, channels: int, itemsize: int, block: tuple[int, int] | None) -> bool:
    """Whether the same kernel multiplies weights in 8 bits, or in 16 bits, in tiles of `rows` rows. Its boxes have 64
    outputs and 128 bytes of inputs, which share a scale. `block`: inputs and outputs of the first product that share
    one; None = a scale per output. With fewer rows in 16 bits, programs of expert_tile read faster."""
    if hidden % 16 or channels % 16:
        return False
    if block is None:
        return itemsize == 1 or (itemsize == 2 and rows >= 64)
    return itemsize == 1 and block[0] % BLOCK_BYTES == 0 and block[1] % BLOCK_BYTES == 0


def specialized_rows(pairs: int, experts: int, channels: int) -> int:
    """Return the rows of a tile of that kernel. Of a tile's rows it reads only those that exist, so that tiles of 64
    rows are as fast as those of 32; of small experts, two are as fast as one of 128."""
    rows = rows_of_tile(pairs, experts)
    if rows == MOST_ROWS and channels < FEW_CHANNELS and pairs <= 64 * experts:
        return 64
    return 64 if rows == 32 else rows


def specialized_expert_tile(rows: int, itemsize: float, shared: int) -> ExpertTile:
    """Return the tile of core.ops.kernels.specialized_experts, with as many blocks in flight as fit. `itemsize`: bytes
    of a weight, 0.5 if packed. Registers limit the warp groups of an SM to two to four, since each group has sums of
    128 outputs."""
    groups, residents = SPECIALIZED[rows]
    tile = ExpertTile(rows, 64 * groups, int(BLOCK_BYTES / itemsize), 4 * groups, 8, residents)
    room = min(shared, (SM_SHARED if shared >= HOPPER_SHARED else shared) // residents - RESERVED)
    while specialized_shared(tile, itemsize) > room:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def specialized_shared(tile: ExpertTile, itemsize: float) -> int:
    """Upper estimate of a program's shared memory in bytes: the ring, and memory in which each warp group rearranges
    outputs. Packed weights are multiplied by numbers in 16 bits."""
    block = int(tile.inputs * (2 * tile.outputs * itemsize + tile.rows * max(itemsize, 2 if itemsize < 1 else 1)))
    return tile.stages * block + tile.outputs * tile.rows * 2 + RESERVED
