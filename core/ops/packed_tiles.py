"""Choice of the tile that multiplies a packed weight, or of the library. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dovetail.core.errors import shown
from dovetail.core.interfaces.tuning import Choice, Key, make_key
from dovetail.core.ops.choices import Choices, installed
from dovetail.core.ops.tile_choice import check_fields, tile_of
from dovetail.core.ops.tiles import HOPPER_SHARED, MOST_SHARED_TILES, RESERVED, MatmulTile

OP = "packed_matmul"
"""Name of the operation in tuning tables."""
MOST_ROWS = 128
"""Number of rows up to which the rule picks a tile."""
PROGRAMS = 2
"""Programs per SM."""
WORDS = 32
"""Words of a block, as core.ops.packing.LANES."""
FIELDS = ("tokens", "outputs", "inputs", "warps", "stages", "split", "programs")
"""Fields of MatmulTile that the kernel uses."""


def packed_key(name: str, bits: int, group: int, outputs: int, inputs: int, itemsize: int) -> Key:
    """`name` and `bits` (stored) are the format's; `itemsize`: bytes of a number of x."""
    return make_key(format=name, bits=bits, group=group, outputs=outputs, inputs=inputs, itemsize=itemsize)


def choose_packed(rows: int, key: Key, device: str, processors: int, shared: int) -> MatmulTile | None:
    """Return the kernel's tile for x [rows, inputs], or None if the whole weight is decoded for the library.

    The installed entry with the next higher number of rows applies, and the rule to weights without entries. `device`
    and `processors` are the GPU's name and number of SMs. `shared`: shared memory of a program in bytes."""
    return _choose(installed(), rows, key, device, processors, shared)


@lru_cache(maxsize=1 << 14)
def _choose(choices: Choices, rows: int, key: Key, device: str, processors: int, shared: int) -> MatmulTile | None:
    facts: Mapping[str, Any] = dict(key)
    shape = rows, facts["outputs"], facts["inputs"]
    if choices.tuned(OP, device, key):
        choice = choices.find(OP, device, key, rows)
        tile = None if choice is None else tile_of(choice)
        return tile if tile is not None and tile.fits_32_bits(*shape) else None
    return packed_tile(*shape, facts["bits"], facts["itemsize"], processors, shared)


def packed_tile(
    rows: int, outputs: int, inputs: int, bits: int, itemsize: int, processors: int, shared: int
) -> MatmulTile | None:
    """Return the rule's tile. Units are distributed equally over the programs, unless there are too many tiles for the
    counters."""
    if not 0 < rows <= MOST_ROWS:
        return None
    # 128 rows in one tile decode each weight once. They need more registers than a thread has with the sums of groups
    # that E4M3 keeps apart, with 8-bit codes, and with operands in registers, as GPUs other than Hopper have them.
    wide = itemsize > 1 and bits < 8 and shared >= HOPPER_SHARED
    tokens = min(max(16, 1 << (rows - 1).bit_length()), 128 if wide else 64)
    tile = MatmulTile(tokens, 64, WORDS * 32 // bits, stages=4)
    while packed_shared(tile, bits, itemsize) > shared:
        # A second tile of rows decodes each weight again.
        tile = replace(tile, stages=tile.stages - 1) if tile.stages > 2 else replace(tile, tokens=tile.tokens // 2)
    _, tiles, _, _ = tile.launch(rows, outputs, inputs)
    if tiles <= MOST_SHARED_TILES:
        tile = replace(tile, programs=PROGRAMS * processors)
    return tile if tile.fits_32_bits(rows, outputs, inputs) else None


def packed_shared(tile: MatmulTile, bits: int, itemsize: int) -> int:
    """Upper estimate of a program's shared memory in bytes."""
    return (tile.tokens * itemsize * 8 + tile.outputs * bits) * tile.inputs * tile.stages // 8 + RESERVED


def check_packed(key: Key, rows: int, choice: Choice) -> None:
    """Raise ValueError if an entry of a table cannot be the tile of this product."""
    facts: Mapping[str, Any] = dict(key)
    names = ("format", "bits", "group", "outputs", "inputs", "itemsize")
    if set(facts) != set(names):
        raise ValueError(f"the key of a packed matmul has {', '.join(names)}; this one has {', '.join(facts)}")
    check_fields(choice)
    if other := [name for name in choice if name not in FIELDS]:
        raise ValueError(f"a tile of a packed matmul has no {shown(other[0])}; it has {', '.join(FIELDS)}")
    block = WORDS * 32 // facts["bits"]
    if choice["inputs"] % block:
        raise ValueError(f"inputs is {choice['inputs']}, not a multiple of the {block} codes of {WORDS} words")
    shape = rows, facts["outputs"], facts["inputs"]
    if (counters := tile_of(choice).counters(*shape)) > MOST_SHARED_TILES:
        raise ValueError(f"it needs {counters} counters, and there are {MOST_SHARED_TILES}")
