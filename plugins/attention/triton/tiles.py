"""Block sizes by shape, from `benchmarks/attention.py --tune` on an H200. No tuning happens at run time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton

from dovetail.plugins.attention.triton.gather import MOST_ROWS, PAGE, ROOM_BYTES, copied_page, copied_pages

SHARED_BYTES = 200 * 1024
"""Shared memory that the blocks in flight of one program may take, of 227 KiB on Hopper."""


DECODE_ROWS = 64
"""Most query rows of a tile for decode."""
GATHER, GATHER_16 = 256, 1024
"""Tokens of a prompt, on average, from which on its pages are gathered, and of 16 bits for a kernel that reads them
nearly as well as they are: tiles then read each key often enough."""
WARP_KEYS = 16
"""Keys of a lane in a slab (DecodeTile)."""
EMPTY = -1
"""The word that stands in a mailbox of attend_decode where nothing has arrived: of float32, one of the NaNs."""
SHORT_PROMPT = 768
"""Tokens of a prompt, on average, up to which blocks of 64 keys lose less beside the diagonal than those of 128."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch of the attention kernel is cut."""

    block_m: int
    """Rows: query tokens x query heads of a kv head."""
    block_n: int
    """Keys in a block."""
    warps: int
    stages: int
    """Blocks of K and V on their way from memory at a time."""
    programs: int
    """Programs for each multiprocessor that splitting long rows aims at."""
    least: int = 256
    """Keys of the shortest range that a row is split into: shorter ones cost more to join than they save."""
    root: int = 0
    """The same for each unit of the longest row's cube root: longer ranges cost the row's time, more of them the time
    in which its last one reads them."""
    tma: bool = False
    """Read K and V through tensor map descriptors where pages allow it."""
    pairs: bool = False
    """Read 8-bit V as words of two columns."""
    key_warps: int = 0
    """Warps that take a block of keys each; 0: all of them work on each block together."""

    @property
    def span(self) -> int:
        """Keys that a program works on at a time."""
        return self.block_n * max(self.key_warps, 1)

    @property
    def prefetch_keys(self) -> int:
        """Keys whose pages come with an item."""
        return 0

    def grain(self, page_tokens: int) -> int:
        """Keys, from a block's first one on, that surely share a page."""
        return math.gcd(page_tokens, self.span)

    def box_words(self, head_dim: int) -> int:
        """What a range of a split row leaves in a mailbox; 0: it leaves a partial result, and is counted."""
        return 0


@dataclass(frozen=True, slots=True)
class PromptTile(Tile):
    """Of attend_prompts (hopper/kernel.py): two warp groups with 64 rows each, and a warp that fetches for both."""

    persistent: bool = False
    """As many programs as multiprocessors, which take items in turn; otherwise a program for each item."""


@dataclass(frozen=True, slots=True)
class DecodeTile(Tile):
    """Of attend_decode (hopper/decode.py): rows of one token, each warp a lane with keys of its own."""

    slabs: int = 1
    """Of 16 keys of each lane, in a block."""

    @property
    def span(self) -> int:
        return self.slabs * self.warps * WARP_KEYS

    @property
    def prefetch_keys(self) -> int:
        return self.stages * self.span

    def box_words(self, head_dim: int) -> int:
        """For each head a column of the output, and a logarithm."""
        return (head_dim + 1) * (8 if self.block_m <= 8 else 16)


@dataclass(frozen=True, slots=True)
class Shape:
    """What tiles are chosen by."""

    group: int
    """Query heads of a kv head."""
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_tokens: int
    hopper: bool = False
    """attend_prompts and attend_decode may serve it: the GPU and Triton can, and no tree masks keys."""

    @property
    def padded_dim(self) -> int:
        return max(16, triton.next_power_of_2(self.head_dim))

    @property
    def reads_tensor_maps(self) -> bool:
        """A tensor map moves whole rows of 16-bit values, as wide as the tile."""
        return self.padded_dim == self.head_dim and self.kv_dtype == self.dtype and self.dtype.itemsize == 2

    @property
    def attends_prompts(self) -> bool:
        return (
            self.hopper
            and self.reads_tensor_maps
            and self.page_tokens % PAGE == 0
            and self.head_dim in (64, 128)
            and self.group <= 64
            and self.group & (self.group - 1) == 0
        )

    @property
    def decodes(self) -> bool:
        """attend_decode takes rows of one token: 16-bit queries, and lines of 128 bytes."""
        return (
            self.hopper
            and self.dtype.itemsize == 2
            and (self.kv_dtype == self.dtype or self.kv_dtype.itemsize == 1)
            and self.head_dim in (64, 128)
            and self.head_dim * self.kv_dtype.itemsize >= 128
            and self.group <= 16
        )

    @property
    def reads_pairs(self) -> bool:
        """Words of two 8-bit values become float16."""
        return (
            self.kv_dtype.itemsize == 1 and self.dtype.itemsize == 2 and self.head_dim % 2 == 0 and self.head_dim > 16
        )


class Tiles:
    """The table. Benchmarks put another one in its place."""

    def decode(self, shape: Shape, tokens: int, programs: float) -> Tile:
        """For rows of at most so many tokens; programs: rows times kv heads for each multiprocessor."""
        if tokens == 1 and shape.decodes:
            wide = shape.kv_dtype.itemsize * shape.head_dim > 128
            if wide or programs <= 2:
                # Three blocks of 32 KB on their way.
                return DecodeTile(shape.group, WARP_KEYS, 4, 3, 2, least=128, slabs=1 if wide else 2, root=16)
            # Of more programs than a multiprocessor has room for, several begin and end beside others.
            return DecodeTile(shape.group, WARP_KEYS, 4, 2, 2, least=128, slabs=1, root=16)
        scarce = programs < 1
        rows = triton.next_power_of_2(max(16, shape.group, min(shape.group * tokens, DECODE_ROWS)))
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
            columns = triton.next_power_of_2(max(8, shape.group * tokens))
            return fit(Tile(columns, 32, 2, 4, 4, pairs=True, key_warps=2), shape)
        if shape.kv_dtype.itemsize == 1:
            return fit(Tile(rows, 64, 4, 3, 2, pairs=True), shape)
        return fit(Tile(rows, 32, 2, 4, 4) if rows <= 16 else Tile(rows, 64, 4, 4, 2), shape)

    def prefill(self, shape: Shape, tokens: int, rows: int) -> Tile:
        """For rows that are fed so many tokens together."""
        if shape.attends_prompts:
            if tokens <= rows * SHORT_PROMPT:
                return PromptTile(128, 64, 4, 4, 1, least=1024, tma=True, persistent=True)
            # Several prompts end more evenly where the GPU hands out the items.
            return PromptTile(128, 128, 4, 2, 1, least=1024, tma=True, persistent=rows == 1)
        least = triton.next_power_of_2(shape.group)
        if shape.dtype.itemsize == 4:
            # Products run without matrix units and keep both operands in registers.
            return fit(Tile(max(16, least), 16, 4, 2, 1, least=1024), shape)
        if shape.padded_dim > 128:
            return fit(Tile(max(64, least), 64, 8, 2, 1, least=1024), shape)
        if shape.kv_dtype.itemsize == 1:
            return fit(Tile(max(128, least), 128, 8, 2, 1, least=1024), shape)
        if shape.reads_tensor_maps and shape.page_tokens % PAGE == 0 and least <= 64:
            return fit(Tile(64, 64, 4, 3, 1, least=1024, tma=True), shape)
        return fit(Tile(max(128, least), 64, 8, 3, 1, least=1024, tma=True), shape)

    def gather(self, shape: Shape, tokens: int, bounds: Sequence[int], kv_heads: int) -> bool:
        """Whether pages are copied first (gather.py), for rows of at most so many keys that are fed so many tokens
        together."""
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


def fit(tile: Tile, shape: Shape) -> Tile:
    """Fewer stages and shorter blocks until they fit in shared memory; no way of reading that the shape rules out."""
    block_n, stages = tile.block_n, tile.stages
    bytes_per_key = shape.padded_dim * shape.kv_dtype.itemsize * max(tile.key_warps, 1)
    while 2 * stages * block_n * bytes_per_key > SHARED_BYTES and block_n > 16:
        stages, block_n = (stages - 1, block_n) if stages > 2 else (stages, block_n // 2)
    tma = tile.tma and shape.reads_tensor_maps and shape.page_tokens % block_n == 0
    # Larger tiles take the instructions of a warp group, which read 16-bit values from shared memory in any case.
    pairs = tile.pairs and shape.reads_pairs and tile.block_m <= 32
    return replace(tile, block_n=block_n, stages=stages, tma=tma, pairs=pairs)
