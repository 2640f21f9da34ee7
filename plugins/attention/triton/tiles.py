"""Block sizes by shape, tuned by `benchmarks/attention.py --tune` on an H200. There is no autotuning at run time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from dovetail.core.arithmetic import ceil_div, power_of_2
from dovetail.core.interfaces import AttentionLayer
from dovetail.core.ops.tiles import HOPPER_SHARED
from dovetail.plugins.attention.triton.gather import MOST_ROWS, PAGE, ROOM_BYTES, copied_page, copied_pages

SHARE = 200 / 227
"""Share of a program's shared memory for its blocks in flight."""

DECODE_ROWS = 64
"""Maximum number of query rows in a decode tile."""
GATHER, GATHER_16 = 256, 1024
"""Mean number of tokens per prompt from which pages are gathered: tiles then read each key often enough. The second
value is for 16-bit pages and a kernel that reads them in place nearly as fast."""
MANY = 4
"""Programs per SM, counting head tiles, from which more programs than an SM runs at a time wait. Their starts and ends
then take a larger share than the latency of a block, so smaller blocks and fewer of them in flight are faster."""
FEW, SEVERAL = 1 / 8, 3 / 4
"""Programs per SM between which the kernel for all GPUs is faster for a few rows of several tokens: one tile has all
query heads and tokens of a row."""
DECODE_HEADS = 16
"""Maximum number of query heads in a tile of attend_decode. Tiles of 32 took twice as long."""
WARP_KEYS = 16
"""Keys of a warp in a slab (DecodeTile)."""
EMPTY = -1
"""Word of an empty mailbox of attend_decode; as float32 it is a NaN."""
PACKED_HEADS = 64
"""Maximum number of query heads in a tile of attend_prompts, the rows of a warp group."""
PACKED_LOSS = 1 / 15
"""Maximum share of additional rows without a head. Tiles of fewer heads have more tokens, of which the first see fewer
keys than the tile reads."""
SHORT_PROMPT = 768
"""Mean number of tokens per prompt up to which blocks of 64 keys waste less at the diagonal than blocks of 128."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Tiling of one launch of the attention kernel."""

    block_m: int
    """Rows: query tokens x query heads of a kv head."""
    block_n: int
    """Keys in a block."""
    warps: int
    stages: int
    """Blocks of K and V in flight."""
    programs: int
    """Target number of programs per SM when long rows are split."""
    least: int = 256
    """Minimum number of keys per range of a split row. Shorter ranges cost more to join than they save."""
    root: int = 0
    """Minimum number of keys per range for each unit of the cube root of the longest row's keys. Longer ranges take
    more time each; more ranges take more time to join."""
    tma: bool = False
    """Whether K and V are read through tensor maps, where pages allow it."""
    pairs: bool = False
    """Whether 8-bit V is read as words of two columns."""
    key_warps: int = 0
    """Number of warps that each process a different block of keys; 0 = all warps process the same block."""
    joins: bool = True
    """Whether the kernel joins the ranges of a row. If not, every item has a partial result for a later kernel."""

    def queries(self, group: int) -> int:
        """Query tokens of a tile. `group`: query heads per kv head."""
        return self.block_m // group

    def head_tiles(self, group: int) -> int:
        """Number of tiles over which the query heads of a kv head are distributed."""
        return 1

    @property
    def span(self) -> int:
        """Keys that a program processes at a time."""
        return self.block_n * max(self.key_warps, 1)

    @property
    def prefetch_keys(self) -> int:
        """Number of a range's first keys whose pages are stored with the item."""
        return 0

    def grain(self, page_tokens: int) -> int:
        """Number of consecutive keys, from the start of a block, that are always in the same page."""
        return math.gcd(page_tokens, self.span)

    def box_words(self, head_dim: int) -> int:
        """Words of a mailbox for a program's range of a row; 0 = ranges write partial results and use counters."""
        return 0


@dataclass(frozen=True, slots=True)
class PromptTile(Tile):
    """Tile of attend_prompts (hopper/kernel.py): two warp groups with 64 rows each, and a producer warp for both."""

    persistent: bool = False
    """Whether there is one program per SM, which processes several items; otherwise one program per item."""

    def queries(self, group: int) -> int:
        return self.block_m // packed_heads(group)

    def head_tiles(self, group: int) -> int:
        return ceil_div(group, packed_heads(group))


@dataclass(frozen=True, slots=True)
class DecodeTile(Tile):
    """Tile of attend_decode (hopper/decode.py). Each warp processes different keys. Rows of a tile are query heads: 8,
    16 or 32."""

    slabs: int = 1
    """Slabs per block; a slab has 16 keys of each warp."""
    tokens: int = 1
    """Query tokens of a tile. With several, it has all heads of a kv head for each of them."""

    def queries(self, group: int) -> int:
        return self.tokens

    def head_tiles(self, group: int) -> int:
        return 1 if self.tokens > 1 else ceil_div(group, self.block_m)

    @property
    def span(self) -> int:
        return self.slabs * self.warps * WARP_KEYS

    @property
    def prefetch_keys(self) -> int:
        return self.stages * self.span

    def box_words(self, head_dim: int) -> int:
        """A column of the output and a logarithm for each head."""
        return (padded_dim(head_dim) + 1) * self.block_m


@dataclass(frozen=True, slots=True)
class Geometry:
    """Facts of a layer and its pages. Layers of the same geometry use the same work items."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_tokens: int

    @classmethod
    def of(cls, layer: AttentionLayer, dtype: torch.dtype, kv_dtype: torch.dtype, page_tokens: int) -> Geometry:
        return cls(layer.heads, layer.kv_heads, layer.head_dim, layer.window, dtype, kv_dtype, page_tokens)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Shape:
    """Properties of a layer and step by which tiles are chosen."""

    group: int
    """Number of query heads per kv head."""
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_tokens: int
    hopper: bool = False
    """Whether attend_prompts and attend_decode can run: GPU and Triton support them, and there is no tree mask."""
    shared_bytes: int = HOPPER_SHARED
    """Maximum shared memory of a program."""

    @property
    def padded_dim(self) -> int:
        return padded_dim(self.head_dim)

    @property
    def reads_tensor_maps(self) -> bool:
        """Whether tensor maps can be used: they copy whole rows of 16-bit values, as wide as the tile."""
        return self.padded_dim == self.head_dim and self.kv_dtype == self.dtype and self.dtype.itemsize == 2

    @property
    def attends_prompts(self) -> bool:
        return (
            self.hopper
            and self.kv_dtype == self.dtype
            and self.dtype.itemsize == 2
            and self.page_tokens % PAGE == 0
            and self.padded_dim in (64, 128, 256)
            and self.head_dim % 8 == 0
        )

    @property
    def decodes(self) -> bool:
        """Whether attend_decode supports rows of one token: 16-bit queries, and keys in whole units of 16 bytes."""
        return (
            self.hopper
            and self.dtype.itemsize == 2
            and (self.kv_dtype == self.dtype or self.kv_dtype.itemsize == 1)
            and self.padded_dim in (64, 128, 256)
            and self.head_dim * self.kv_dtype.itemsize % 16 == 0
        )

    @property
    def reads_pairs(self) -> bool:
        """Whether V can be read as words of two 8-bit values, which are converted to float16."""
        return (
            self.kv_dtype.itemsize == 1 and self.dtype.itemsize == 2 and self.head_dim % 2 == 0 and self.head_dim > 16
        )


class Tiles:
    """Tile table. Benchmarks replace it."""

    def decode(self, shape: Shape, tokens: int, programs: float) -> Tile:
        """Tile for decode rows of at most `tokens` tokens. `programs`: rows times kv heads per SM."""
        if tokens == 1 and shape.decodes and not reads_quicker_in_small_blocks(shape, programs):
            return decode_tile(shape, programs)
        scarce = programs < 1
        rows = power_of_2(max(16, shape.group, min(shape.group * tokens, DECODE_ROWS)))
        if decodes_several(shape, tokens) and (rows <= 32 or not scarce):
            if FEW <= programs < SEVERAL and shape.padded_dim <= 128:
                return fit(Tile(rows, 64, 4, 3, 2, least=128, pairs=True), shape)
            return several_tokens(shape, tokens, programs)
        if shape.dtype.itemsize == 4:
            return fit(Tile(rows, 16, 4, 2, 2), shape)
        if rows > 32:
            return fit(Tile(rows, 64, 4, 3, 2) if shape.padded_dim <= 128 else Tile(rows, 64, 8, 2, 2), shape)
        if shape.padded_dim > 128:
            return fit(Tile(rows, 64, 4, 3, 2), shape)
        if scarce and shape.kv_dtype.itemsize == 1:
            return fit(Tile(rows, 128, 8, 3, 2, least=128, pairs=True), shape)
        if scarce:
            return fit(Tile(rows, 128, 4, 4, 1, least=128), shape)
        if shape.kv_dtype.itemsize == 1 and shape.page_tokens < 64 and shape.group * tokens <= 16:
            columns = power_of_2(max(8, shape.group * tokens))
            return fit(Tile(columns, 32, 2, 4, 4, pairs=True, key_warps=2), shape)
        if shape.kv_dtype.itemsize == 1:
            return fit(Tile(rows, 64, 4, 3, 2, pairs=True), shape)
        return fit(Tile(rows, 32, 2, 4, 4) if rows <= 16 else Tile(rows, 64, 4, 4, 2), shape)

    def prefill(self, shape: Shape, tokens: int, rows: int) -> Tile:
        """Tile for `rows` prompt rows with `tokens` tokens in total."""
        if shape.attends_prompts:
            short = tokens <= rows * SHORT_PROMPT
            if shape.padded_dim > 128:
                return PromptTile(128, 64, 4, 2, 1, least=1024, tma=True, persistent=not short)
            if short:
                return PromptTile(128, 64, 4, 4, 1, least=1024, tma=True, persistent=True)
            # With several prompts, the load is more balanced if the GPU schedules the items.
            return PromptTile(128, 128, 4, 2, 1, least=1024, tma=True, persistent=rows == 1)
        least = power_of_2(shape.group)
        if shape.dtype.itemsize == 4:
            # float32 matmuls do not use tensor cores and keep both operands in registers.
            return fit(Tile(max(16, least), 16, 4, 2, 1, least=1024), shape)
        if shape.padded_dim > 128:
            return fit(Tile(max(64, least), 64, 8, 2, 1, least=1024), shape)
        if shape.kv_dtype.itemsize == 1:
            return fit(Tile(max(128, least), 128, 8, 2, 1, least=1024), shape)
        if shape.reads_tensor_maps and shape.page_tokens % PAGE == 0 and least <= 64:
            return fit(Tile(64, 64, 4, 3, 1, least=1024, tma=True), shape)
        return fit(Tile(max(128, least), 64, 8, 3, 1, least=1024, tma=True), shape)

    def gather(self, shape: Shape, tokens: int, bounds: Sequence[int], kv_heads: int) -> bool:
        """Whether to copy pages first (gather.py). `bounds`: maximum keys per row. `tokens`: tokens of all rows."""
        if shape.dtype.itemsize != 2 or len(bounds) > MOST_ROWS:
            return False
        narrow = shape.kv_dtype.itemsize == 1
        copied = replace(shape, kv_dtype=shape.dtype, page_tokens=copied_page(shape.page_tokens))
        if tokens < len(bounds) * (GATHER if narrow or copied.attends_prompts else GATHER_16):
            return False
        if not narrow and (shape.page_tokens % PAGE == 0 or not shape.reads_tensor_maps):
            return False
        keys = sum(copied_pages(bounds, shape.page_tokens)) * copied_page(shape.page_tokens)
        return 2 * keys * kv_heads * shape.head_dim * shape.dtype.itemsize <= ROOM_BYTES


def padded_dim(head_dim: int) -> int:
    """Columns of a block in the kernels."""
    return max(16, power_of_2(head_dim))


@cache
def packed_heads(group: int) -> int:
    """Query heads of a kv head in a tile of attend_prompts: as many as leave few rows without a head. It is a power of
    two, so that a warp group's 64 rows are whole tokens."""
    sizes = [1 << i for i in range(PACKED_HEADS.bit_length())]
    return max(pack for pack in sizes if ceil_div(group, pack) * pack - group <= PACKED_LOSS * group)


def decode_tile(shape: Shape, programs: float) -> DecodeTile:
    """Tile of attend_decode. `programs`: rows times kv heads per SM."""
    heads = 8 if shape.group <= 8 else DECODE_HEADS
    programs *= ceil_div(shape.group, heads)
    # With four warps and one slab, a block of K and V has 32 KB if a key has 256 bytes.
    key_bytes = shape.kv_dtype.itemsize * shape.padded_dim
    if key_bytes == 512:
        warps, stages, target = (2, 2, 3) if programs > 1 else (4, 3, 1)
        return DecodeTile(heads, WARP_KEYS, warps, stages, target, least=128, root=16)
    if key_bytes == 256:
        if shape.group == 1 and shape.kv_dtype.itemsize == 2 and programs > MANY:
            return DecodeTile(heads, WARP_KEYS, 2, 3, 4, least=128, root=16)
        return DecodeTile(heads, WARP_KEYS, 4, 3, 2, least=128, root=16)
    if programs <= 2:
        # Blocks of 32 KB; of 16 KB if keys are short and have few heads, since a range has few keys then.
        slabs = 256 // key_bytes if heads > 8 else 2
        return DecodeTile(heads, WARP_KEYS, 4, 3, 2, least=128, slabs=slabs, root=16)
    # With more programs than fit on an SM, their starts and ends overlap with other programs.
    return DecodeTile(heads, WARP_KEYS, 4, 2, 2, least=128, slabs=128 // key_bytes, root=16)


def decodes_several(shape: Shape, tokens: int) -> bool:
    """Whether attend_decode takes less time than the kernel for all GPUs for many rows of up to `tokens` tokens: with
    more query heads than a tile of 8, since 8-bit keys and values are converted anew for each tile."""
    narrow = shape.decodes and shape.kv_dtype.itemsize == 1
    return tokens > 1 and narrow and shape.group * tokens > 8 and 2 * shape.group <= DECODE_HEADS


def several_tokens(shape: Shape, tokens: int, programs: float) -> DecodeTile:
    """Tile of attend_decode for rows of up to `tokens` tokens, with as many of them as fit. Few warps leave more
    programs to an SM, which has four matrix units. With less than a program for each SM, more warps read a range."""
    key_bytes = shape.kv_dtype.itemsize * shape.padded_dim
    warps, stages, slabs = (2, 3, 256 // key_bytes) if programs >= 1 else (4, 2, 128 // key_bytes)
    heads = 8 if programs < FEW and 2 * shape.group <= 8 else DECODE_HEADS
    each = min(tokens, heads // shape.group)
    return DecodeTile(heads, WARP_KEYS, warps, stages, 2, least=128, root=16, slabs=max(1, slabs), tokens=each)


def reads_quicker_in_small_blocks(shape: Shape, programs: float) -> bool:
    """Whether the kernel for all GPUs takes less time than attend_decode for rows of one token.

    It does with many programs if attend_decode would move padding, if a key is short, or if several head tiles read the
    same keys. `programs`: rows times kv heads per SM.
    """
    tiles = ceil_div(shape.group, DECODE_HEADS)
    if programs * tiles <= MANY:
        return False
    if tiles > 1:
        return True
    if shape.kv_dtype.itemsize == 1:
        return shape.padded_dim <= 64
    return shape.padded_dim != shape.head_dim or (shape.padded_dim <= 64 and shape.group == 1)


def fit(tile: Tile, shape: Shape) -> Tile:
    """Reduce stages and block length until they fit in shared memory, and disable reads that the shape rules out."""
    block_n, stages = tile.block_n, tile.stages
    bytes_per_key = shape.padded_dim * shape.kv_dtype.itemsize * max(tile.key_warps, 1)
    while 2 * stages * block_n * bytes_per_key > SHARE * shape.shared_bytes and block_n > 16:
        stages, block_n = (stages - 1, block_n) if stages > 2 else (stages, block_n // 2)
    tma = tile.tma and shape.reads_tensor_maps and shape.page_tokens % block_n == 0
    # Larger tiles use warp-group instructions, which read 16-bit values from shared memory in any case.
    pairs = tile.pairs and shape.reads_pairs and tile.block_m <= 32
    return replace(tile, block_n=block_n, stages=stages, tma=tma, pairs=pairs)
