"""Attention of decode rows of one token as a Tunable: which kernel, its blocks, and over how many programs long rows
are split. Shapes: B rows, H query heads, K kv heads, D head dim."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import asdict, fields, replace
from functools import cache, partial
from itertools import chain, cycle, islice, product, repeat, zip_longest
from typing import Any

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.errors import shown
from dovetail.core.interfaces import PLAIN, AttentionLayer, AttnCtx, BatchMeta, HostBounds, KVGroup, KVPool, Plane, Rope
from dovetail.core.interfaces.tuning import Choice, Key, Trials, Tunable, make_key
from dovetail.core.ops.choices import installed
from dovetail.plugins.attention.triton.tiles import (
    DECODE_HEADS,
    MANY,
    SHARE,
    WARP_KEYS,
    DecodeTile,
    Geometry,
    Shape,
    Tile,
    Tiles,
    decode_tile,
    fit,
)

log = logging.getLogger(__name__)

OP = "dovetail_attend_decode"
LENGTHS = 128, 512, 2048
"""Keys of the rows of a trial, in turn. One choice serves rows of all lengths, since a CUDA graph has one tile."""
EQUAL = 640
"""Keys of each row in every other call of a trial: a choice for rows of unlike lengths may be slow where none waits for
another."""
MOST_BYTES = 1 << 30
"""Bytes of keys and values of a trial, up to which rows have these lengths; shorter ones otherwise."""
RUNS = 16
"""Minimum number of calls of each load in a graph. The first one plans for all of them, as in a step of so many
layers."""
GENERAL = (
    (32, 1, 4, 0), (32, 2, 4, 0), (64, 2, 3, 0), (64, 4, 3, 0), (64, 4, 4, 0), (128, 4, 3, 0), (128, 4, 4, 0),
    (128, 8, 3, 0), (16, 4, 4, 4), (32, 2, 4, 2), (32, 4, 3, 4), (64, 2, 2, 2),
)  # fmt: skip
"""(keys of a block, warps, stages, warps with keys of their own) of the kernel for all GPUs."""
HOPPER = tuple(product((2, 4, 8), (2, 3, 4), (1, 2, 4)))
"""(warps, stages, slabs) of attend_decode."""
MOST_COLUMNS = 16
"""Query heads up to which warps of the kernel for all GPUs may have keys of their own."""
TUNED_ROWS = frozenset({1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512})
"""Numbers of rows that are tuned; those in between use the next one's choice."""
LIMITS = {
    "block_m": (8, 16, 32, 64, 128), "block_n": (16, 32, 64, 128), "warps": (1, 2, 4, 8), "stages": range(1, 9),
    "programs": range(1, 9), "least": range(16, 1 << 20), "root": range(4096), "slabs": (1, 2, 4, 8),
    "key_warps": (0, 1, 2, 4, 8), "pairs": (False, True), "tma": (False,),
}  # fmt: skip
"""Values that a choice may have."""


@cache
def key_of(geometry: Geometry) -> Key:
    facts = {name: value for name, value in asdict(geometry).items() if isinstance(value, int)}
    return make_key(**facts, dtype=_name(geometry.dtype), kv_dtype=_name(geometry.kv_dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class TunedTiles(Tiles):
    """Tiles of a layer in a step of so many decode rows: measured ones, or else those of the table."""

    def __init__(self, geometry: Geometry, rows: int, gpu: str) -> None:
        self._key, self._rows, self._gpu = key_of(geometry), rows, gpu

    def decode(self, shape: Shape, tokens: int, programs: float) -> Tile:
        choice = installed().find(OP, self._gpu, self._key, self._rows) if tokens == 1 else None
        if choice is None or (choice.get("kernel") == "hopper" and not shape.hopper):
            return super().decode(shape, tokens, programs)
        try:
            return tile_of(choice, shape)
        except ValueError as error:
            _warn(f"a tuning table's choice of {OP} for {self._rows} rows is not used: {error}")
            return super().decode(shape, tokens, programs)


@cache
def _warn(text: str) -> None:
    """Log a warning once: every layer of every step meets the same choice."""
    log.warning("%s", text)


def choice_of(tile: Tile) -> Choice:
    """Return the fields that differ from their defaults, and the kernel."""
    names = {field.name: field.default for field in fields(tile)}
    chosen = {name: value for name, value in asdict(tile).items() if value != names[name]}
    return {"kernel": "hopper" if isinstance(tile, DecodeTile) else "general", **chosen}


def tile_of(choice: Choice, shape: Shape) -> Tile:
    """Return the tile, or raise ValueError if this shape cannot run it."""
    values: dict[str, Any] = dict(choice)
    kernel = values.pop("kernel", None)
    made = {"hopper": DecodeTile, "general": Tile}.get(kernel)
    if made is None:
        raise ValueError(f"kernel is {shown(kernel)}, not hopper or general")
    known = {field.name for field in fields(made)}
    for name, value in values.items():
        if name not in known:
            raise ValueError(f"a tile of kernel {kernel} has no {shown(name)}; it has {', '.join(sorted(known))}")
        if value not in LIMITS[name] or isinstance(value, bool) is not (name in ("pairs", "tma")):
            raise ValueError(f"{name} is {shown(value)}, which no tile has")
    try:
        tile = made(**values)
    except TypeError as error:
        raise ValueError(f"a tile of kernel {kernel} is not complete: {shown(error)}") from None
    if isinstance(tile, DecodeTile):
        if not shape.decodes:
            raise ValueError("the kernel for Hopper does not run this head dim or number format")
        if tile.block_n != WARP_KEYS or tile.block_m > 2 * DECODE_HEADS or shared(tile, shape) > shape.shared_bytes:
            raise ValueError(f"the kernel for Hopper has no {tile}")
        return tile
    if tile.block_m < 16 and not tile.key_warps:
        raise ValueError(f"block_m is {tile.block_m}; a matrix instruction has 16 rows at least")
    if tile.key_warps not in (0, tile.warps) or tile.block_m < shape.group:
        raise ValueError(f"the kernel for all GPUs has no {tile} for {shape.group} query heads of a KV head")
    return fit(tile, shape)


def shared(tile: DecodeTile, shape: Shape) -> int:
    """Return the bytes of the blocks in flight of a program."""
    return 2 * tile.stages * tile.span * shape.padded_dim * shape.kv_dtype.itemsize


class DecodeTunable(Tunable):
    """write_and_attend of a step whose rows all have one token, with rotary embedding."""

    op = OP

    def __init__(
        self, make: Callable[[], Any], geometry: Geometry, rows: int, max_len: int, shape: Shape, processors: int
    ) -> None:
        """`make`: returns a backend. `processors`: SMs of the GPU."""
        self.geometry, self.rows, self.key = geometry, rows, key_of(geometry)
        self._make, self._shape, self._processors = make, shape, processors
        each = 2 * geometry.kv_heads * geometry.head_dim * geometry.kv_dtype.itemsize

        def bounded(lengths: Iterable[int]) -> list[int]:
            within = [min(length, max_len) for length in islice(lengths, rows)]
            return [max(1, int(n * min(1.0, MOST_BYTES / (each * sum(within))))) for n in within]

        # One row has no others of unlike length: it is long in some calls.
        self.loads = bounded(cycle(LENGTHS) if rows > 1 else repeat(max(LENGTHS))), bounded(repeat(EQUAL))
        self.nbytes = each * max(map(sum, self.loads))

    def candidates(self) -> Iterable[Choice]:
        """Yield the choices nearest to the rules' first, of both kernels in turn."""
        programs = self.rows * self.geometry.kv_heads / self._processors
        # With many programs no row of these lengths is split.
        targets = (2,) if programs > MANY else (1, 2, 3, 4)
        kinds = [list(self._general(programs, targets))]
        if self._shape.decodes:
            kinds.insert(0, list(self._hopper(targets)))
        usual: list[Tile] = [decode_tile(self._shape, programs)] if self._shape.decodes else []
        usual.append(Tiles().decode(replace(self._shape, hopper=False), 1, programs))
        for tiles, tile in zip(kinds, usual, strict=True):
            tiles.sort(key=partial(_differences, tile))
        mixed = chain.from_iterable(zip_longest(*kinds))
        return (choice_of(tile) for tile in dict.fromkeys(mixed) if tile is not None)

    def _hopper(self, targets: Iterable[int]) -> Iterator[Tile]:
        heads = 8 if self.geometry.group <= 8 else DECODE_HEADS
        for (warps, stages, slabs), target in product(HOPPER, targets):
            tile = DecodeTile(heads, WARP_KEYS, warps, stages, target, least=128, slabs=slabs, root=16)
            if shared(tile, self._shape) <= SHARE * self._shape.shared_bytes:
                yield tile

    def _general(self, programs: float, targets: Iterable[int]) -> Iterator[Tile]:
        group, pairs, least = self.geometry.group, self._shape.reads_pairs, 128 if programs < 1 else 256
        for (keys, warps, stages, own), target in product(GENERAL, targets):
            rows = 1 << max(3 if own else 4, (group - 1).bit_length())
            if not own or rows <= MOST_COLUMNS:
                yield Tile(rows, keys, warps, stages, target, least, pairs=pairs, key_warps=own)

    def admits(self, choice: Choice) -> bool:
        try:
            tile_of(choice, self._shape)
        except ValueError:
            return False
        return True

    def kernel(self, choice: Choice) -> Hashable:
        # Nothing else of a choice is compiled into the kernel.
        return self.op, self.key, replace(tile_of(choice, self._shape), programs=1, least=256, root=0)

    def trials(self, count: int) -> Trials:
        geometry, device = self.geometry, torch.device("cuda", torch.cuda.current_device())
        runs = [
            Runs(self._make(), geometry, lengths, ceil_div(count, len(self.loads)), device) for lengths in self.loads
        ]
        calls = [
            partial(run.attend, i % len(run.layers), i == 0) for run in runs for i in range(max(len(run.layers), RUNS))
        ]
        hidden = geometry.heads * geometry.head_dim
        x_BI = torch.randn(self.rows, hidden, dtype=geometry.dtype, device=device)
        weight_II = torch.randn(hidden, min(hidden, 4096), dtype=geometry.dtype, device=device)
        return Trials(calls, runs[0].exact, lambda: x_BI @ weight_II, tolerance=2e-2 if runs[0].narrow else 1e-2)


def _differences(usual: Tile, tile: Tile) -> int:
    return sum(getattr(usual, field.name) != getattr(tile, field.name) for field in fields(tile))


class Runs:
    """Rows of random keys in several layers."""

    def __init__(self, backend: Any, geometry: Geometry, lengths: list[int], layers: int, device: torch.device) -> None:
        self.backend, self.geometry, self.lengths = backend, geometry, lengths
        self.narrow = geometry.kv_dtype.itemsize == 1
        page, rows = geometry.page_tokens, len(lengths)
        pages = [ceil_div(length, page) for length in lengths]
        columns = torch.arange(max(pages), device=device)
        count_B1 = torch.tensor(pages, device=device)[:, None]
        first_B1 = count_B1.cumsum(0) - count_B1
        order = torch.randperm(sum(pages), device=device) + 1
        at_BP = (first_B1 + columns).clamp(max=sum(pages) - 1)
        self.table_BP = torch.where(columns < count_B1, order[at_BP], 0).int()
        plane = geometry.kv_heads, geometry.head_dim
        planes = tuple(Plane(name, plane, geometry.kv_dtype) for name in ("k", "v"))
        group = KVGroup(0, tuple(range(layers)), planes, page_tokens=page, window=geometry.window)
        self.planes = {
            name: _random(layers, sum(pages) + 1, page, *plane, dtype=geometry.kv_dtype, device=device)
            for name in ("k", "v")
        }
        backend.bind({0: KVPool(group, self.planes)})
        heads = geometry.heads, geometry.kv_heads, geometry.head_dim
        self.layers = [AttentionLayer(i, 0, i, *heads, geometry.head_dim**-0.5, geometry.window) for i in range(layers)]
        last_B = torch.tensor(lengths, device=device) - 1
        write_B = self.table_BP.gather(1, (last_B // page)[:, None])[:, 0].long() * page + last_B % page
        each_B = torch.arange(rows, device=device)
        starts_B1 = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._meta = BatchMeta(starts_B1, last_B.int() + 1, each_B, last_B, each_B, self.table_BP, write_B, page)
        self._host = HostBounds((1,) * rows, tuple(lengths), rows)
        wide = (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim
        self.qkv = torch.randn(rows, wide, device=device).to(geometry.dtype)
        half = geometry.head_dim // 2
        # The angle is 0, so that the exact result needs no rotation.
        self._rope = Rope(
            torch.ones(max(lengths), 2 * half, device=device).index_fill_(
                1, torch.arange(half, 2 * half, device=device), 0.0
            )
        )
        self._ctx: AttnCtx | None = None

    def attend(self, layer: int, plans: bool) -> torch.Tensor:
        if plans or self._ctx is None:
            host = self._host
            self._ctx = self.backend.plan_device(self._meta, host, self.backend.plan_host(host))
        found: torch.Tensor = self.backend.write_and_attend(self.layers[layer], self._ctx, self.qkv, self._rope)[
            PLAIN
        ].values
        return found

    def exact(self) -> torch.Tensor:
        geometry, page = self.geometry, self.geometry.page_tokens
        heads, kv_heads, dim = geometry.heads, geometry.kv_heads, geometry.head_dim
        q_BHD, k_BKD, v_BKD = self.qkv.view(len(self.lengths), -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        rows = []
        for row, length in enumerate(self.lengths):
            pages = self.table_BP[row, : ceil_div(length, page)].long()
            k_LKD, v_LKD = (self.planes[name][0][pages].flatten(0, 1)[:length].float() for name in ("k", "v"))
            k_LKD[-1], v_LKD[-1] = (x[row].to(geometry.kv_dtype).float() for x in (k_BKD, v_BKD))
            seen = slice(max(0, length - geometry.window) if geometry.window else 0, length)
            k_HLD, v_HLD = (x[seen].repeat_interleave(geometry.group, 1).transpose(0, 1) for x in (k_LKD, v_LKD))
            scores_HL = (k_HLD @ q_BHD[row].float()[:, :, None])[:, :, 0] * dim**-0.5
            rows.append((scores_HL.softmax(-1)[:, None] @ v_HLD).flatten())
        return torch.stack(rows)


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal numbers. One chunk is repeated: only its bytes count."""
    plane = torch.empty(shape, dtype=dtype, device=device)
    flat = plane.view(torch.uint8).flatten()
    data = torch.randn(min(1 << 22, plane.numel()), device=device).to(dtype).view(torch.uint8)
    for start in range(0, flat.numel(), data.numel()):
        part = flat[start : start + data.numel()]
        part.copy_(data[: part.numel()])
    return plane
