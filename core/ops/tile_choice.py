"""Choice of the matmul kernel's tile for few rows, or of the library. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from functools import lru_cache
from math import log2
from typing import Any

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import shown
from dovetail.core.interfaces.tuning import Choice, Key, make_key
from dovetail.core.ops.choices import Choices, installed
from dovetail.core.ops.tiles import GROUP_ROWS, HOPPER_SHARED, MOST_SHARED_TILES, MatmulTile, specialized_tiles

OP = "matmul"
"""Name of the operation in tuning tables. Its key has `weight` (a kind), `outputs` and `inputs`."""
WEIGHTS = ("bf16", "fp8", "fp8_block", "int8")
"""Kinds of weights: fp8 has a scale for each output or one for all, fp8_block one for each BLOCK x BLOCK numbers."""
BLOCK = 128
LIKE = {"fp8_block": "fp8", "int8": "fp8"}
"""Kinds whose times are predicted from another kind's, which has as many bytes and products."""
BOX_BYTES = 128
"""Bytes of a row that kernels for Hopper copy to shared memory at a time."""
MOST_ROWS = 64
"""Number of rows up to which the rule picks tiles that are bound by reading the weight. fp8 without entries goes to
the library above it."""
FEW_ROWS = 32
"""Number of rows of fp8_block up to which Hopper prefetches the weight."""
MOST_SPLIT = 8
LIBRARY_ROWS = "library_rows"
"""Field of a choice that is no tile: the library multiplies so many rows, with any values in those that x lacks. For
some numbers of rows it is slower than for more: on an H200, 28672 x 4096 in bf16 takes it longer with 448 than 512."""
MOST_LIBRARY_ROWS = 2
"""Maximum of the library's rows for each of x."""
PRODUCTS, COPIED = 2420, 45
"""8-bit products, and bytes that are copied to shared memory, of an SM per cycle."""
READ = 14
"""Bytes of the weight that come from memory for an SM per cycle."""
AGAIN = 0.02
"""Share of a product's time that each doubling of the tiles of rows adds."""
PER_BLOCK, PER_TILE, PER_SPLIT, SUMMED = 27, 2560, 8000, 6
"""Cycles for barriers of a block, to begin and to write a tile, and to join split ones, and sums that are added per
cycle. Fitted to timings on an H100 and an H200 (benchmarks/NOTES.md)."""


def choose(
    rows: int,
    outputs: int,
    inputs: int,
    kind: str,
    device: str,
    processors: int,
    prefetch: bool = True,
    shared: int = HOPPER_SHARED,
) -> MatmulTile | None:
    """Return the kernel's tile for x [rows, inputs] @ weight [outputs, inputs]^T, or None if the library is faster.

    `kind` is the weight's: "fp8", "int8" or "bf16". `device` and `processors` are the GPU's name and number of SMs. The
    installed entry with the next higher number of rows applies. For shapes without entries, 8 bits follow a rule,
    since the library is slow for few rows with per-row scales, and bf16 uses the library. With `prefetch` false, the
    GPU cannot run Hopper's kernels, and the rule replaces their tiles. `shared`: bytes of shared memory that a program
    may use.
    """
    return _choose(installed(), rows, outputs, inputs, kind, device, processors, prefetch, shared)


@lru_cache(maxsize=1 << 14)
def _choose(
    choices: Choices,
    rows: int,
    outputs: int,
    inputs: int,
    kind: str,
    device: str,
    processors: int,
    prefetch: bool,
    shared: int,
) -> MatmulTile | None:
    key = matmul_key(kind, outputs, inputs)
    ruled = by_rule(rows, outputs, inputs, kind, processors, shared, prefetch)
    tile = ruled
    if choices.tuned(OP, device, key):
        tile = listed_tile(choices.find(OP, device, key, rows))
        if tile is None and kind in LIKE:
            tile = ruled  # No library has blocks, and that for int8 is slower.
    if tile is not None and tile.needs_hopper and not prefetch:
        tile = by_rule(rows, outputs, inputs, kind, processors, shared, False)
    return tile if tile is not None and tile.fits_32_bits(rows, outputs, inputs) else None


def library_rows(rows: int, outputs: int, inputs: int, kind: str, device: str) -> int:
    """Return how many rows the library should multiply where `choose` returns None: `rows`, or more if that is faster.
    Arguments as for choose."""
    return _library_rows(installed(), rows, outputs, inputs, kind, device)


@lru_cache(maxsize=1 << 14)
def _library_rows(choices: Choices, rows: int, outputs: int, inputs: int, kind: str, device: str) -> int:
    choice: Mapping[str, Any] = choices.find(OP, device, matmul_key(kind, outputs, inputs), rows) or {}
    wanted: int = choice.get(LIBRARY_ROWS, rows)
    # An entry serves fewer rows than its own, too, of which this may be too large a multiple.
    return wanted if wanted <= MOST_LIBRARY_ROWS * rows else rows


def runs(tile: MatmulTile, kind: str) -> bool:
    """Whether this kind's kernels can run the tile."""
    # Their 256 outputs are two instructions, whose sums are apart.
    wide = tile.specialized and tile.split == 1
    if kind == "fp8_block":
        return (tile.outputs <= BLOCK or wide) and (tile.needs_hopper or tile.inputs <= BLOCK)
    if kind == "int8":
        return not tile.prefetch and (not tile.specialized or tile.outputs <= BLOCK or wide)
    return True


def by_rule(
    rows: int, outputs: int, inputs: int, kind: str, processors: int, shared: int, hopper: bool
) -> MatmulTile | None:
    """Return the tile for a shape without entries; None = the library."""
    if kind == "bf16":
        return None
    hopper = hopper and inputs % 16 == 0 and kind != "fp8"
    if hopper and rows > (FEW_ROWS if kind == "fp8_block" else MOST_ROWS):
        return many_rows_tile(ceil_div(rows, GROUP_ROWS), outputs, inputs, kind, processors, shared)
    if hopper and kind == "fp8_block" and (tile := block_tile(rows, outputs, inputs, processors)) is not None:
        return tile
    if rows <= MOST_ROWS or kind == "fp8":
        return few_rows_tile(rows, outputs, processors, shared)
    if kind == "int8":
        return None
    # No library multiplies with scales of blocks.
    tile = MatmulTile(64 if rows <= 64 else 128, 128, 128, warps=8, stages=4, swap=False)
    while tile.shared_bytes(itemsize=1) > shared and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def block_tile(rows: int, outputs: int, inputs: int, processors: int) -> MatmulTile | None:
    """Return the tile of prefetch_matmul for up to FEW_ROWS rows of fp8_block; None = there are so many tiles that the
    kernel for all GPUs is faster. Few tiles are split into programs for all SMs."""
    tile = MatmulTile(16 if rows <= 16 else 32, 64, 2 * BLOCK, stages=3, prefetch=5)
    _, tiles, blocks, _ = tile.launch(rows, outputs, inputs)
    if tiles > 2 * processors or inputs < tile.inputs:
        return None
    most = 3 * processors // 2 // tiles if 3 * tiles <= processors else 1
    return replace(tile, split=max(1, min(most, blocks // 2, MOST_SPLIT)))


@lru_cache(maxsize=1 << 12)
def many_rows_tile(groups: int, outputs: int, inputs: int, kind: str, processors: int, shared: int) -> MatmulTile:
    """Return the tile of specialized_matmul for more than MOST_ROWS rows of int8, or FEW_ROWS of fp8_block, with the
    fewest cycles of the slowest SM. `groups`: of GROUP_ROWS rows, which alone decide, since all tiles have whole ones:
    prompts have any number of rows, and the choice takes half a millisecond."""
    rows = groups * GROUP_ROWS

    def cycles(tile: MatmulTile) -> float:
        t_tiles, tiles, blocks, programs = tile.launch(rows, outputs, inputs)
        parts = max(1, programs // tiles)
        rounds = ceil_div(tiles, programs) if parts == 1 else 1
        products = tile.tokens * tile.outputs * tile.inputs / PRODUCTS
        copies = (tile.tokens + tile.outputs) * tile.inputs / COPIED
        busy = rounds * ceil_div(blocks, parts) * (max(products, copies) + PER_BLOCK)
        # Reads and products overlap, but neither hides the other entirely. Each tile of rows reads the weight again.
        total = (busy**3 + (outputs * inputs / (READ * processors)) ** 3) ** (1 / 3) + rounds * PER_TILE
        total *= 1 + AGAIN * log2(t_tiles)
        return total if parts == 1 else total + PER_SPLIT + parts * tile.tokens * tile.outputs / SUMMED

    def ways(tile: MatmulTile) -> Iterator[MatmulTile]:
        _, tiles, blocks, _ = tile.launch(rows, outputs, inputs)
        yield replace(tile, programs=processors) if tiles > processors else tile
        for parts in range(2, 9):
            split = replace(tile, split=parts)
            fits = tiles * parts <= processors and tiles * tile.warp_groups <= MOST_SHARED_TILES
            if parts <= blocks and fits and runs(split, kind):
                yield split

    # Few blocks in flight are enough where sums of each are scaled, since those that follow arrive meanwhile.
    least = 3 if kind == "fp8_block" else 4
    fitting = [tile for tile in specialized_tiles(rows, 1, shared) if tile.stages >= least and runs(tile, kind)]
    return min((way for tile in fitting for way in ways(tile)), key=cycles)


def few_rows_tile(rows: int, outputs: int, processors: int, shared: int) -> MatmulTile | None:
    """Return the tile for 8 bits and few rows: 64 outputs, and split in two if the tiles fill at most half of the SMs.
    Where each SM runs several programs, and where shared memory is small, fewer blocks are in flight."""
    if rows > MOST_ROWS:
        return None
    tokens = 16 if rows <= 16 else 32 if rows <= 32 else 64
    tiles = ceil_div(outputs, 64)
    if tiles > 2 * processors:
        tile = MatmulTile(tokens, 64, 128) if tokens < 64 else MatmulTile(tokens, 128, 128, warps=8)
    else:
        tile = MatmulTile(tokens, 64, 128, stages=8, split=2 if 2 * tiles <= processors else 1)
    while tile.shared_bytes(itemsize=1) > shared and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


# Tiles as choices of a tuning table.


def matmul_key(kind: str, outputs: int, inputs: int) -> Key:
    return make_key(weight=kind, outputs=outputs, inputs=inputs)


def tile_of(choice: Choice) -> MatmulTile:
    fields_of_tile: Mapping[str, Any] = choice
    return MatmulTile(**fields_of_tile)


def listed_tile(choice: Choice | None) -> MatmulTile | None:
    """Return the tile of a matmul's entry; None = the library multiplies, be it more rows than there are."""
    return None if choice is None or LIBRARY_ROWS in choice else tile_of(choice)


def choice_of(tile: MatmulTile) -> Choice:
    """Return the tile's fields that differ from their defaults."""
    default = asdict(MatmulTile(0, 0, 0))
    return {name: value for name, value in asdict(tile).items() if value != default[name]}


def check_matmul(key: Key, rows: int, choice: Choice) -> None:
    """Raise ValueError if an entry of a table cannot be the tile of this matmul."""
    facts: Mapping[str, Any] = dict(key)
    if set(facts) != {"weight", "outputs", "inputs"}:
        raise ValueError(f"the key of a matmul has weight, outputs and inputs; this one has {', '.join(facts)}")
    if facts["weight"] not in WEIGHTS:
        raise ValueError(f"weight is {shown(facts['weight'])}; there are {', '.join(WEIGHTS)}")
    if LIBRARY_ROWS in choice:
        _check_library(facts["weight"], rows, choice)
        return
    check_fields(choice)
    tile = tile_of(choice)
    if tile.specialized and tile.tokens not in (GROUP_ROWS, 2 * GROUP_ROWS, 3 * GROUP_ROWS):
        raise ValueError(f"tokens is {tile.tokens}; a specialized tile has one to three times {GROUP_ROWS}")
    if tile.specialized and tile.outputs not in (64, 128, 256):
        raise ValueError(f"outputs is {tile.outputs}; a specialized tile has 64, 128 or 256")
    itemsize = 2 if facts["weight"] == "bf16" else 1
    if not runs(tile, facts["weight"]):
        raise ValueError(f"the kernels for {facts['weight']} cannot run this tile")
    if tile.needs_hopper and tile.inputs * itemsize % BOX_BYTES:
        raise ValueError(f"inputs is {tile.inputs}; kernels for Hopper read {BOX_BYTES // itemsize} columns at a time")
    if (tile.needs_hopper or tile.tma) and facts["inputs"] * itemsize % 16:
        raise ValueError(f"a tensor map cannot read rows of {facts['inputs'] * itemsize} bytes, not a multiple of 16")
    shape = rows, facts["outputs"], facts["inputs"]
    if tile.counters(*shape) > MOST_SHARED_TILES:
        raise ValueError(f"it needs {tile.counters(*shape)} counters, and there are {MOST_SHARED_TILES}")


def _check_library(kind: str, rows: int, choice: Choice) -> None:
    wanted, most = choice[LIBRARY_ROWS], MOST_LIBRARY_ROWS * rows
    if len(choice) > 1:
        others = ", ".join(name for name in choice if name != LIBRARY_ROWS)
        raise ValueError(f"{LIBRARY_ROWS} is for the library, and {others} for a tile: a choice has either")
    if kind in LIKE:
        kinds = " and ".join(kind for kind in WEIGHTS if kind not in LIKE)
        raise ValueError(f"{LIBRARY_ROWS} is for weights of {kinds}, and this one is {kind}")
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        raise ValueError(f"{LIBRARY_ROWS} is {shown(wanted)}, not a whole number")
    if not rows <= wanted <= most:
        raise ValueError(f"{LIBRARY_ROWS} is {wanted}, which is not from the entry's {rows} to {most}")


def check_fields(choice: Choice, least_tokens: int = 16) -> None:
    """Raise ValueError if a choice has other fields than a tile, or values that no tile can have."""
    known = {field.name: field for field in fields(MatmulTile)}
    for name, value in choice.items():
        if name not in known:
            raise ValueError(f"a tile has no {shown(name)}; it has {', '.join(known)}")
        wants_bool = isinstance(known[name].default, bool)
        if isinstance(value, bool) != wants_bool or not isinstance(value, int):
            raise ValueError(f"{name} is {shown(value)}, not {'true or false' if wants_bool else 'a whole number'}")
        if not 0 <= value < 1 << 16:
            raise ValueError(f"{name} is {value}, which is not from 0 to 65535")
    sides = (16, 32, 64, 128, 256, 512, 1024)
    for name, least in (("tokens", least_tokens), ("outputs", 16), ("inputs", 16)):
        side = choice.get(name, 0)
        if side not in (least, *sides) and not (choice.get("specialized") and name == "tokens"):
            raise ValueError(f"{name} is {side}, not a power of two from {least} to 1024")
    tile = tile_of(choice)
    if tile.warps not in (1, 2, 4, 8, 16) or not 1 <= tile.stages <= 16 or not 1 <= tile.split:
        raise ValueError(f"warps={tile.warps}, stages={tile.stages}, split={tile.split} cannot be launched")
