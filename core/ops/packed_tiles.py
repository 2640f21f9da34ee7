"""Choice of the tile that multiplies a packed weight, or of the library. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import shown
from dovetail.core.interfaces.tuning import Choice, Key, make_key
from dovetail.core.ops.choices import Choices, far_below, installed
from dovetail.core.ops.tile_choice import check_fields, choice_of, tile_of
from dovetail.core.ops.tiles import HOPPER_SHARED, MOST_SHARED_TILES, RESERVED, SM_SHARED, MatmulTile

OP = "packed_matmul"
"""Name of the operation in tuning tables."""
MOST_ROWS = 128
"""Number of rows up to which the rule picks a tile."""
PROGRAMS = 2
"""Programs per SM."""
WORDS = 32
"""Words of a block, as core.ops.packing.LANES."""
FIELDS = ("tokens", "outputs", "inputs", "warps", "stages", "split", "programs", "tma", "specialized", "residents")
"""Fields of MatmulTile that the kernels use. `tma`: specialized_packed runs, with a consumer warp group for each four
of `warps`. `specialized`: its `programs` compute whole tiles. It and `residents` are for this kernel alone."""
SHAPES = (
    *(
        (tokens, groups, residents)
        for tokens in (8, 16, 32)
        for groups, residents in ((1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (4, 1))
    ),
    *((64, groups, residents) for groups, residents in ((1, 2), (2, 1), (2, 2))),
    *((128, groups, residents) for groups, residents in ((1, 1), (1, 2), (2, 1))),
)
"""Tokens of a tile, consumer warp groups, and programs of an SM for which threads of specialized_packed have enough
registers."""
SPILLING = {(32, 2, 2), (64, 2, 2), (128, 1, 2)}
"""Those where E4M3, which keeps the sums of groups apart, needs more registers, and so do the scales of groups smaller
than a strip. The latter leave room for two programs of an SM at most, two warp groups of a program, and one box of a
block."""
RULED = (1, 2, 4)
"""Programs of an SM in the timings to which the rule was fitted. Searches also try three, for which blocks of 512
inputs leave registers: with four, the matrix instructions of 16 bits wait for each other (ptxas)."""
CYCLES = {8: 0.92, 16: 1.0, 32: 1.1, 64: 1.4, 128: 2.1}
"""Relative time to decode a weight and to multiply it with so many tokens."""
SPLIT, SPLIT_SUM = 32 << 10, 16
"""Cost of splitting a tile, and of each of its sums, in the same unit as a decoded weight."""
MOST_DECODED_ROWS = 512
"""Number of rows up to which the rule decodes weights in the kernel for 16-bit inputs. Above it, the whole weight is
decoded for the library."""
MOST_EXACT_ROWS = 128
"""Number of rows up to which a weight that may be rounded to E4M3 with one scale per output is multiplied as it is.
With more, threads of specialized_packed lack registers for sums of groups in one tile, and no library applies scales of
groups."""
MOST_SUBTRACTED = 32
"""Tokens of a tile up to which matrix instructions of specialized_packed subtract the shifts of codes in E4M3 strip by
strip. With more they take longer than decoding to signed numbers, as they do in 16 bits with any number of tokens, and
sums of x in memory take less."""
SUMMED = 128
"""Products in E4M3 that specialized_packed adds up before it scales them, and columns of a sum of x."""
LIKE = {"int4": "uint4"}
"""Formats that take another one's entries where tables have none of theirs: the same codes, without zeros."""
SCRATCH = 4 << 10
"""Shared memory in which a consumer of specialized_packed rearranges outputs of float32. Those of 16 bits take half."""
ROUNDED_TOKENS, ROUNDED_OUTPUTS = 256, 128
"""Tokens and outputs of a tile of rounded_packed. No other kernel has so many tokens."""
ROUNDED_BLOCK, ROUNDED_END, ROUNDED_SUM, ROUNDED_JOIN = 1.6, 4.5, 2.7, 2.0
"""Microseconds of a block of rounded_packed, of a tile's beginning and end, of reading another program's sums of a
tile, and of everything else that split tiles need, as measured on an H200."""
MORE_BLOCKS = 2
"""Blocks that the first of a tile's parts has more than others in rounded_packed, about as long as these need to write
their sums, which it reads."""
EXACT_LAUNCH, EXACT_UNIT = 3.0, 1.55e-5
"""Microseconds that specialized_packed takes beside its work in E4M3, and those of a cycle as _cycles predicts it."""
LIBRARY_LAUNCH, LIBRARY_WEIGHT, LIBRARY_PRODUCT = 6.0, 5.8e-7, 1.33e-9
"""Microseconds that the library's matmul of a rounded weight takes beside its work, to round a weight to memory and
read it, and of a product."""
ROUNDED_PIECES = 2
"""Pieces of x in a block of rounded_packed, which have places of their own in shared memory."""
MOST_MAPPED = 256
"""Outputs of a box of scales: tensor maps have boxes of so many numbers in each dimension."""
BARRIERS = 128
"""Upper estimate of a consumer's share of the shared memory for what is no block, barrier or output, in bytes."""


def packed_key(name: str, bits: int, group: int, outputs: int, inputs: int, itemsize: int) -> Key:
    """`name` and `bits` (stored) are the format's; `itemsize`: bytes of a number of x."""
    return make_key(format=name, bits=bits, group=group, outputs=outputs, inputs=inputs, itemsize=itemsize)


def choose_packed(
    rows: int,
    key: Key,
    device: str,
    processors: int,
    shared: int,
    hopper: bool = False,
    rounds: bool = False,
    by_kernel: bool = False,
) -> MatmulTile | None:
    """Return the kernel's tile for x [rows, inputs], or None if the whole weight is decoded for the library.

    The installed entry with the next higher number of rows applies, that of a format that is alike (LIKE) if this one
    has none at all, and else the rule. `device` and `processors` are the GPU's name and number of SMs. `shared`: shared
    memory of a program in bytes. `hopper`: whether Hopper's kernel can run. `rounds`: whether the weight may be
    rounded. `by_kernel`: whether rounded_packed can do it."""
    return _choose(installed(), rows, key, device, processors, shared, hopper, rounds, by_kernel)


@lru_cache(maxsize=1 << 14)
def _choose(
    choices: Choices,
    rows: int,
    key: Key,
    device: str,
    processors: int,
    shared: int,
    hopper: bool,
    rounds: bool,
    by_kernel: bool,
) -> MatmulTile | None:
    facts: Mapping[str, Any] = dict(key)
    shape = rows, facts["outputs"], facts["inputs"]
    how = facts["bits"], facts["itemsize"], processors, shared
    if not choices.tuned(OP, device, key) and facts["format"] in LIKE:
        alike = make_key(**{**facts, "format": LIKE[facts["format"]]})
        entries = choices.entries.get((OP, device, alike), ())
        # Start-up knows nothing of this shape, so has no choices for rows far below the least entry.
        key = key if entries and far_below(rows, min(entries)) else alike
    rounded = rounds and rows > MOST_EXACT_ROWS
    if choices.serves(OP, device, key, rows):
        choice = choices.find(OP, device, key, rows)
        tile = None if choice is None else tile_of(choice)
        if tile is not None and (tile.tokens == ROUNDED_TOKENS) != rounded:
            # The entry is for a weight in the same format that is rounded while this one is not, or the reverse.
            return ruled_tile(*shape, *how, facts["group"], hopper, rounds, by_kernel)
        if tile is not None and tile.tma and not (by_kernel if rounded else hopper):
            return packed_tile(*shape, *how)
        # Where the library is best for E4M3, it multiplies a rounded weight.
        if tile is not None or rounds or facts["itemsize"] > 1:
            return tile if tile is None or tile.fits_32_bits(*shape) else None
    return ruled_tile(*shape, *how, facts["group"], hopper, rounds, by_kernel)


def ruled_tile(
    rows: int,
    outputs: int,
    inputs: int,
    bits: int,
    itemsize: int,
    processors: int,
    shared: int,
    group: int,
    hopper: bool,
    rounds: bool,
    by_kernel: bool = False,
) -> MatmulTile | None:
    """Return the rule's choice, as choose_packed."""
    if rounds and rows > MOST_EXACT_ROWS:
        shape = rows, outputs, inputs
        return _quickest_tile(shape, bits, itemsize, processors, shared, group, hopper) if by_kernel else None
    if itemsize > 1 and rows > MOST_DECODED_ROWS:
        return None
    how = rows, outputs, inputs, bits, itemsize, processors, shared
    return (specialized_tile(*how, group) if hopper else None) or packed_tile(*how)


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


def specialized_tile(
    rows: int, outputs: int, inputs: int, bits: int, itemsize: int, processors: int, shared: int, group: int = 0
) -> MatmulTile | None:
    """Return the rule's tile for specialized_packed: the one that gives the busiest SM the least to decode, in cycles
    as they were measured on an H100 (app=tune measures others)."""
    if rows < 1:
        return None
    tiles = specialized_tiles(rows, outputs, inputs, bits, itemsize, processors, shared, group)
    ruled = (tile for tile in tiles if tile.inputs == WORDS * 32 // bits and tile.residents in RULED)
    return min(ruled, key=partial(_cycles, (rows, outputs, inputs), itemsize, processors), default=None)


def ranked_tiles(
    rows: int, outputs: int, inputs: int, bits: int, itemsize: int, processors: int, shared: int, group: int = 0
) -> list[MatmulTile]:
    """Return specialized_tiles, those with the fewest predicted cycles first."""
    tiles = specialized_tiles(rows, outputs, inputs, bits, itemsize, processors, shared, group)
    return sorted(tiles, key=partial(_cycles, (rows, outputs, inputs), itemsize, processors))


def _cycles(shape: tuple[int, int, int], itemsize: int, processors: int, tile: MatmulTile) -> float:
    """Return the predicted cycles of the busiest SM."""
    _, tiles, blocks, programs = tile.launch(*shape)
    each = ceil_div(programs, processors)
    units = ceil_div(tiles, programs) * blocks if tile.specialized else ceil_div(tiles * blocks, programs)
    # Copies of the input from the L2 cache take some of the time.
    work = each * units * tile.inputs * (tile.outputs * CYCLES[tile.tokens] + 0.2 * tile.tokens * itemsize)
    # Few warps for each of an SM's schedulers do not hide latency.
    factor = {1: 1.3, 2: 1.03}.get(min(each, tile.residents) * (tile.warps // 4), 1.0)
    if programs % tiles and tiles % programs and not tile.specialized:
        # Most programs write partial sums twice.
        factor *= 1.5
    if programs <= tiles:
        return work * factor
    # Partial sums are written, and read again one tile after the other.
    return work * factor + SPLIT + SPLIT_SUM * tile.tokens * tile.outputs * (1 + programs / tiles) / 2


def specialized_tiles(
    rows: int, outputs: int, inputs: int, bits: int, itemsize: int, processors: int, shared: int, group: int = 0
) -> Iterator[MatmulTile]:
    """Yield specialized_packed's tiles with as many blocks in flight as fit, and the ways to distribute their work:
    tiles as a whole or in equal parts, at most as many as run at a time, or equal ranges of all units (Stream-K)."""
    most = max(8, 1 << (rows - 1).bit_length())
    for base in _bases(bits, itemsize, shared, 0 < group < WORDS):
        if base.tokens > most or base.tokens < min(most, 64):
            continue
        if base.outputs > max(64, outputs) or base.inputs > max(WORDS * 32 // bits, inputs):
            continue
        _, tiles, blocks, _ = base.launch(rows, outputs, inputs)
        running = base.residents * processors
        if tiles > running:
            yield replace(base, programs=running, specialized=True)
        yield from _in_parts(base, tiles, blocks, running)


@lru_cache
def _bases(bits: int, itemsize: int, shared: int, fine: bool) -> tuple[MatmulTile, ...]:
    """Return specialized_packed's tiles for any matmul, of which programs compute one each. `fine`: groups are smaller
    than a strip. Start-up asks for thousands of numbers of rows."""
    found = []
    for (tokens, groups, residents), boxes in product(SHAPES, (1, 2)):
        if (itemsize == 1 or fine) and (tokens, groups, residents) in SPILLING:
            continue
        if fine and (boxes > 1 or residents > 2 or groups > 2):
            continue
        base = MatmulTile(*(tokens, 64 * groups, boxes * WORDS * 32 // bits, 4 * groups), tma=True, residents=residents)
        room = (SM_SHARED if shared >= HOPPER_SHARED else shared) // residents - RESERVED
        stages = [n for n in range(2, 9) if packed_shared(replace(base, stages=n), bits, itemsize) <= min(room, shared)]
        if stages:
            found.append(replace(base, stages=stages[-1]))
    return tuple(found)


def _quickest_tile(
    shape: tuple[int, int, int], bits: int, itemsize: int, processors: int, shared: int, group: int, hopper: bool
) -> MatmulTile | None:
    """Return the tile of the kernel that is predicted to be quickest with many rows of x in E4M3: rounded_packed, or
    specialized_packed if it multiplies the weight in E4M3, too. None = the library's matmul is."""
    rows, outputs, inputs = shape
    weights = outputs * inputs
    rounded = rounded_tile(*shape, processors)
    times: dict[MatmulTile | None, float] = {rounded: rounded_microseconds(shape, rounded)}
    times[None] = LIBRARY_LAUNCH + weights * (LIBRARY_WEIGHT + rows * LIBRARY_PRODUCT)
    exact = specialized_tile(*shape, bits, itemsize, processors, shared, group) if hopper and itemsize == 1 else None
    if exact is not None:
        times[exact] = EXACT_LAUNCH + EXACT_UNIT * _cycles(shape, itemsize, processors, exact)
    return min(times, key=times.__getitem__)


def rounded_tile(rows: int, outputs: int, inputs: int, processors: int) -> MatmulTile:
    """Return the rule's tile for rounded_packed."""
    predicted = partial(rounded_microseconds, (rows, outputs, inputs))
    return min(rounded_tiles(rows, outputs, inputs, processors), key=predicted)


def rounded_base() -> MatmulTile:
    """Return rounded_packed's tile, of which programs compute one each."""
    return MatmulTile(ROUNDED_TOKENS, ROUNDED_OUTPUTS, WORDS * 8, 8, tma=True)


def rounded_tiles(rows: int, outputs: int, inputs: int, processors: int) -> Iterator[MatmulTile]:
    """Yield the ways to distribute the tiles of rounded_packed, of which an SM runs one at a time: as a whole, in equal
    parts, or equal ranges of all blocks (Stream-K)."""
    base = rounded_base()
    _, tiles, blocks, _ = base.launch(rows, outputs, inputs)
    yield replace(base, programs=processors, specialized=True)
    yield from _in_parts(base, tiles, blocks, processors, fewest=2)


def rounded_microseconds(shape: tuple[int, int, int], tile: MatmulTile) -> float:
    """Return the predicted time of the busiest SM, on an H200."""
    _, tiles, blocks, programs = tile.launch(*shape)
    whole = ceil_div(tiles, programs)
    if tile.specialized or programs == tiles:
        return whole * (blocks * ROUNDED_BLOCK + ROUNDED_END)
    parts = programs // tiles if programs % tiles == 0 else 0
    if parts:
        more = min(MORE_BLOCKS, blocks - parts)
        longest = more + ceil_div(blocks - more, parts)
    else:
        longest = ceil_div(tiles * blocks, programs)
    # The beginning of a tile reads all other sums of it.
    sums = parts - 1 if parts else ceil_div(programs, tiles)
    return longest * ROUNDED_BLOCK + whole * ROUNDED_END + ROUNDED_JOIN + sums * ROUNDED_SUM


def _in_parts(base: MatmulTile, tiles: int, blocks: int, running: int, fewest: int = 1) -> Iterator[MatmulTile]:
    """Yield the least and the largest number of equal parts of which `running` programs compute one each, and equal
    ranges of all blocks."""
    parts = [n for n in range(fewest, 17) if tiles * n <= running and n <= blocks]
    for n in sorted({*parts[:1], *parts[-1:]}):
        yield from _countable(replace(base, split=n), tiles)
    if tiles * blocks >= running and running % tiles:
        yield from _countable(replace(base, programs=running), tiles)


def _countable(tile: MatmulTile, tiles: int) -> Iterator[MatmulTile]:
    if packed_counters(tile, tiles) <= MOST_SHARED_TILES:
        yield tile


def packed_counters(tile: MatmulTile, tiles: int) -> int:
    """Number of counters that the kernel needs where tiles are split."""
    return tiles * (tile.warps // 4 if tile.tma else 1)


def packed_shared(tile: MatmulTile, bits: int, itemsize: int) -> int:
    """Upper estimate of a program's shared memory in bytes."""
    scratch = SCRATCH * (tile.warps // 4) if tile.tma else 0
    return (tile.tokens * itemsize * 8 + tile.outputs * bits) * tile.inputs * tile.stages // 8 + RESERVED + scratch


def packed_beside(tile: MatmulTile, itemsize: int) -> int:
    """Upper estimate of the shared memory that a program of specialized_packed needs beside its blocks, in bytes.
    `itemsize`: bytes of an output."""
    groups = tile.warps // 4
    scratch = min(SCRATCH // 4, tile.outputs // groups * tile.tokens) * itemsize
    return groups * (scratch + BARRIERS) + 16 * tile.stages


def places_that_fit(tile: MatmulTile, block: int, operand: int, itemsize: int) -> int:
    """Return how many of specialized_packed's blocks a program has room for: at most those of the tile, which was
    chosen without knowing the size of scales. `block`: bytes of a block. `operand`: bytes of an operand that is no
    block. `itemsize`: bytes of an output."""
    room = min(HOPPER_SHARED, SM_SHARED // tile.residents - RESERVED) - operand - packed_beside(tile, itemsize)
    return min(tile.stages, max(1, room // block))


def pieces_that_fit(tile: MatmulTile, scales: int, itemsize: int) -> tuple[int, int]:
    """Return how many blocks of codes of 4 bits, and pieces of x in E4M3, rounded_packed has room for. `scales`: bytes
    of a block's scales and zeros. `itemsize`: bytes of an output."""
    block = tile.outputs * tile.inputs // 2 + scales
    room = HOPPER_SHARED - packed_beside(replace(tile, stages=16), itemsize)
    piece = tile.tokens * tile.inputs // ROUNDED_PIECES
    blocks = 3 if room >= 3 * block + 4 * piece else 2
    return blocks, (room - blocks * block) // piece


def check_packed(key: Key, rows: int, choice: Choice) -> None:
    """Raise ValueError if an entry of a table cannot be the tile of this product."""
    facts: Mapping[str, Any] = dict(key)
    names = ("format", "bits", "group", "outputs", "inputs", "itemsize")
    if set(facts) != set(names):
        raise ValueError(f"the key of a packed matmul has {', '.join(names)}; this one has {', '.join(facts)}")
    check_fields(choice, 8 if choice.get("tma") else 16)
    if other := [name for name in choice if name not in FIELDS]:
        raise ValueError(f"a tile of a packed matmul has no {shown(other[0])}; it has {', '.join(FIELDS)}")
    block = WORDS * 32 // facts["bits"]
    if choice["inputs"] % block:
        raise ValueError(f"inputs is {choice['inputs']}, not a multiple of the {block} codes of {WORDS} words")
    tile = tile_of(choice)
    if tile.tma and (tile.warps % 4 or tile.outputs % (16 * tile.warps) or tile.inputs * facts["itemsize"] % 128):
        raise ValueError(f"warps={tile.warps} are not whole warp groups of 64 or 128 of {tile.outputs} outputs")
    if tile.tma and tile.outputs > MOST_MAPPED:
        raise ValueError(f"outputs is {tile.outputs}; a tensor map copies the scales of {MOST_MAPPED} at most")
    if tile.tokens == ROUNDED_TOKENS:
        expected = replace(rounded_base(), programs=tile.programs, split=tile.split, specialized=tile.specialized)
        if tile != expected or facts["bits"] != 4:
            raise ValueError(f"a tile of {ROUNDED_TOKENS} tokens is of rounded_packed: {dict(choice_of(expected))}")
    if tile.specialized and not tile.tma:
        raise ValueError("specialized is true and tma is not; only the kernel for Hopper computes whole tiles")
    if tile.tma and facts["inputs"] * facts["itemsize"] % 16:
        raise ValueError(f"a tensor map cannot read rows of {facts['inputs']} inputs, not a multiple of 16 bytes")
    shape = rows, facts["outputs"], facts["inputs"]
    _, tiles, _, _ = tile.launch(*shape)
    if tile.splits_tiles(*shape) and (counters := packed_counters(tile, tiles)) > MOST_SHARED_TILES:
        raise ValueError(f"it needs {counters} counters, and there are {MOST_SHARED_TILES}")
