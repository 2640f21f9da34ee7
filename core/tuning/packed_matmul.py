"""The matmul with a packed weight as a Tunable. Shapes: T tokens, I input, O output, G groups."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch

from dovetail.core.interfaces.tuning import Choice, Trials, Tunable
from dovetail.core.interfaces.weight import PackedWeight
from dovetail.core.ops import rms_norm
from dovetail.core.ops.formats import sums_of
from dovetail.core.ops.packed_matmul import (
    key_of,
    multiplied_dtype,
    packed_matmul,
    packed_matmul_reference,
    rounds_by_kernel,
    specializes,
    sums_for,
)
from dovetail.core.ops.packed_tiles import (
    MOST_EXACT_ROWS,
    OP,
    WORDS,
    check_packed,
    choose_packed,
    packed_shared,
    packed_tile,
    ranked_tiles,
    rounded_microseconds,
    rounded_tiles,
    specialized_tile,
)
from dovetail.core.ops.packing import empty_alike, pack_scales, scales_to_round
from dovetail.core.ops.padding import empty_rows
from dovetail.core.ops.tile_choice import choice_of, tile_of
from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile
from dovetail.core.tuning.gpu import Gpu, this_gpu
from dovetail.core.tuning.matmul import MOST_CHANNELS, MatmulTunable


class PackedMatmulTunable(Tunable):
    """x @ weight^T as PackedLinear runs it."""

    op = OP

    def __init__(
        self, packed: PackedWeight, rows: int, dtype: torch.dtype, *, e4m3: bool = False, gpu: Gpu | None = None
    ) -> None:
        """`packed`: only shapes, dtypes and format count. `dtype`: the output's. `e4m3`: whether x is in E4M3. `gpu`:
        None = the current one."""
        self.packed, self.rows, self.dtype = packed, rows, dtype
        self.x_dtype = torch.float8_e4m3fn if e4m3 else dtype
        self.itemsize = multiplied_dtype(self.x_dtype, packed).itemsize
        self.key = key_of(packed, self.itemsize)
        self.nbytes = sum(one.numel() * one.element_size() for one in (packed.codes, packed.scale))
        self._gpu = gpu

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.rows, len(self.packed.codes), self.packed.inputs

    @cached_property
    def gpu(self) -> Gpu:
        return self._gpu or this_gpu()

    @property
    def _facts(self) -> tuple[int, int, int, int]:
        return self.packed.format.stored_bits, self.itemsize, self.gpu.processors, self.gpu.shared

    @property
    def _hopper(self) -> bool:
        return self.gpu.hopper and specializes(self.packed, multiplied_dtype(self.x_dtype, self.packed))

    @property
    def _by_kernel(self) -> bool:
        """Whether Hopper's kernel can round the weight, if any does."""
        return self.gpu.hopper and rounds_by_kernel(self.packed)

    @property
    def _rounds(self) -> bool:
        many = self.rows > MOST_EXACT_ROWS and self.x_dtype is torch.float8_e4m3fn
        return many and self.packed.rounded_scale is not None

    def candidates(self) -> Iterable[Choice]:
        shape, group = self.shape, self.packed.group
        if self._rounds:
            # Tables do not choose between a weight that is rounded and one that is not.
            rounded = rounded_tiles(*shape, self.gpu.processors) if self._by_kernel else ()
            return map(choice_of, sorted(rounded, key=partial(rounded_microseconds, shape)))
        tiles = [*(ranked_tiles(*shape, *self._facts, group) if self._hopper else self._tiles())]
        ruled = [*self._ruled(), *tiles]
        return map(choice_of, dict.fromkeys(tile for tile in ruled if self.admits(choice_of(tile))))

    def unlisted(self) -> Choice | None:
        # The rule's, or that of an installed entry of a format that is alike.
        gpu, how = self.gpu, (self._hopper, self.packed.rounded_scale is not None, self._by_kernel)
        tile = choose_packed(self.rows, self.key, gpu.name, gpu.processors, gpu.shared, *how)
        return None if tile is None else choice_of(tile)

    def _ruled(self) -> Iterator[MatmulTile]:
        """Yield what the rule picks, the kernel for Hopper first."""
        special = specialized_tile(*self.shape, *self._facts, self.packed.group) if self._hopper else None
        yield from (tile for tile in (special, packed_tile(*self.shape, *self._facts)) if tile)

    def _tiles(self) -> Iterator[MatmulTile]:
        """Yield tiles of this shape with as many blocks in flight as fit with the other programs of an SM."""
        bits = self.packed.format.stored_bits
        tokens = min(max(16, 1 << (self.rows - 1).bit_length()), 128)
        for each, outputs, blocks, half in product((2, 1, 3, 4), (64, 128, 32), (1, 2), (False, True)):
            inputs = WORDS * 32 // bits * blocks
            base = MatmulTile(max(16, tokens // 2) if half else tokens, outputs, inputs, warps=8 if outputs > 64 else 4)
            room = self.gpu.shared // each
            fitting = (replace(base, stages=n) for n in (8, 6, 5, 4, 3, 2))
            tile = next((one for one in fitting if packed_shared(one, bits, self.itemsize) <= room), None)
            if tile is not None:
                yield tile
                yield replace(tile, programs=each * self.gpu.processors)

    def admits(self, choice: Choice) -> bool:
        try:
            check_packed(self.key, self.rows, choice)
        except ValueError:
            return False
        tile = tile_of(choice)
        _, tiles, blocks, programs = tile.launch(*self.shape)
        return tile.fits_32_bits(*self.shape) and programs <= tiles * blocks

    def kernel(self, choice: Choice) -> Hashable:
        tile, (_, outputs, inputs) = tile_of(choice), self.shape
        # Triton specializes integers by divisibility.
        facts = [tile.splits_tiles(*self.shape), outputs % 16 == 0, inputs % 16 == 0, inputs % tile.inputs == 0]
        for number in (self.packed.scale.shape[1], *self.packed.scale.stride()):
            facts += [number % 16 == 0, number == 1]
        launched = replace(tile, split=1, programs=0)
        packed = self.packed
        weight = packed.format, packed.group, packed.scale.dtype, None if packed.zero is None else packed.zero.dtype
        return self.op, *weight, self.x_dtype, self.dtype, launched, tuple(facts)

    def trials(self, count: int) -> Trials:
        device = torch.device("cuda", torch.cuda.current_device())
        weights = [self._random_weight(device) for _ in range(count)]
        # As the engine allocates activations.
        x_TI = empty_rows(self.rows, self.packed.inputs, self.x_dtype, device)
        x_TI.copy_(torch.randn(x_TI.shape, device=device).to(self.x_dtype))
        e4m3 = self.x_dtype is torch.float8_e4m3fn
        x_scale_T1 = torch.rand(self.rows, 1, device=device) + 0.5 if e4m3 else None
        sums = sums_for(self.packed) if e4m3 and self._hopper else None
        sums_TS = sums_of(x_TI, sums.columns) if sums and sums.of(self.rows) else None
        counts = torch.zeros(count, MOST_SHARED_TILES, dtype=torch.int32, device=device)
        hidden = min(self.packed.inputs, MOST_CHANNELS)
        states_TC = torch.randn(self.rows, hidden, device=device, dtype=self.dtype)
        norm_C = torch.randn(hidden, device=device, dtype=self.dtype)
        return Trials(
            runs=[
                partial(packed_matmul, x_TI, weight, None, self.dtype, x_scale_T1, counts[n], sums_TS)
                for n, weight in enumerate(weights)
            ],
            exact=partial(packed_matmul_reference, x_TI, weights[0], None, torch.float32, x_scale_T1),
            before=lambda: rms_norm(states_TC, states_TC, norm_C, 1e-5),
            reset=counts.zero_,
        )

    def _random_weight(self, device: torch.device) -> PackedWeight:
        """Return random codes. One bit of each is cleared in 8 bits, so that none is the NaN of E4M3."""
        packed = self.packed
        codes = torch.randint(-(2**31), 2**31, packed.codes.shape, dtype=torch.int32, device=device)
        if packed.format.stored_bits == 8:
            codes &= -0x40404041
        # In the same order in memory.
        scale = empty_alike(packed.scale, device)
        scale_OG = torch.rand(len(scale), packed.groups, device=device) + 0.5
        scale.copy_(pack_scales(scale_OG.to(torch.float8_e4m3fn)) if scale.dtype is torch.int32 else scale_OG)
        zero, row_scale = packed.zero, packed.row_scale
        if zero is not None:
            zero = empty_alike(zero, device)
            zero.copy_(torch.randint(2**packed.format.bits, zero.shape, device=device))
        if row_scale is not None:
            row_scale = torch.rand(row_scale.shape, device=device) + 0.5
        found = PackedWeight(packed.format, packed.inputs, packed.group, codes, scale, zero, row_scale)
        return found if packed.rounded_scale is None else replace(found, rounded_scale=scales_to_round(found))


def packed_tunables(packed: PackedWeight, rows: int, dtype: torch.dtype, *, e4m3: bool = False) -> Sequence[Tunable]:
    """Return the product of `rows` rows with this weight, unless the model's dtype goes to the library in any case."""
    if dtype is torch.float32:
        return []
    if e4m3 and packed.rounded is not None and rows > MOST_EXACT_ROWS:
        return [MatmulTunable(torch.empty_like(packed.rounded, device="meta"), rows, dtype)]
    # Values would be sent to the processes that compile.
    names = ("codes", "scale", "zero", "row_scale", "rounded_scale")
    meta = torch.device("meta")
    shapes: dict[str, Any] = {name: empty_alike(x, meta) for name in names if (x := getattr(packed, name)) is not None}
    return [PackedMatmulTunable(replace(packed, **shapes, rounded=None), rows, dtype, e4m3=e4m3)]
