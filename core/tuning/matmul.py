"""The matmul of a linear layer as a Tunable. Shapes: T tokens, I input, O output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, islice, zip_longest
from operator import itemgetter
from typing import Any

import torch

from dovetail.core.arithmetic import ceil_div
from dovetail.core.interfaces.tuning import Choice, Trials, Tunable
from dovetail.core.ops import block_scaled_matmul, matmul, rms_norm, scaled_matmul, unscaled_matmul
from dovetail.core.ops.matmul import KINDS, MOST_UNSCALED, block_scaled_reference, int8_matmul, matmul_reference
from dovetail.core.ops.padding import empty_rows, padded
from dovetail.core.ops.tile_choice import (
    BLOCK,
    LIBRARY_ROWS,
    LIKE,
    MOST_ROWS,
    OP,
    by_rule,
    check_matmul,
    choice_of,
    listed_tile,
    matmul_key,
    tile_of,
)
from dovetail.core.ops.tiles import MOST_SHARED_TILES, MatmulTile
from dovetail.core.tuning.candidates import ITEMSIZE, RESERVED, candidates, used_shared
from dovetail.core.tuning.gpu import Gpu, this_gpu
from dovetail.core.tuning.measured import Shape, hopper_corrections, predicted_seconds
from dovetail.core.tuning.model import CONVERTED, DEFERRED
from dovetail.core.tuning.table import TuningTable

MOST_CHANNELS = 8192
"""Channels of the norm that runs before the matmul: as many as the input's, but not those of an MLP."""


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The product with a weight and its counters."""
Exact = Callable[[], torch.Tensor]
VARIETY = 0.03
LIBRARY_MULTIPLE = 64
"""The library is tried with multiples of so many rows."""


class MatmulTunable(Tunable):
    """x @ weight^T as PlainLinear, quant=fp8 and quant=int8 run it: 8-bit weights have scales per output or block."""

    op = OP

    def __init__(
        self,
        weight: torch.Tensor,
        rows: int,
        dtype: torch.dtype,
        *,
        kind: str | None = None,
        defers: bool = False,
        fast_accum: bool = True,
        gpu: Gpu | None = None,
    ) -> None:
        """`weight`: only its shape and dtype count. `dtype`: the output's. `kind`: as in core.ops.tile_choice; None =
        that of the dtype with a scale for each output. `defers`: the layer calls `partial`, and the consumer applies
        the scales that the library omits. `gpu`: None = the current one."""
        self.outputs, self.inputs = weight.shape
        self.weight_dtype, self.dtype, self.rows = weight.dtype, dtype, rows
        self.kind = kind or KINDS[weight.dtype]
        self.key = matmul_key(self.kind, self.outputs, self.inputs)
        self.nbytes = weight.numel() * weight.element_size()
        self._defers, self._fast_accum, self._gpu = defers, fast_accum, gpu
        if self.kind == "fp8" and dtype is not torch.bfloat16:
            self.way = CONVERTED
        elif self.kind == "fp8" and defers and MOST_ROWS < rows <= MOST_UNSCALED:
            self.way = DEFERRED

    @cached_property
    def gpu(self) -> Gpu:
        return self._gpu or this_gpu()

    @property
    def _shape(self) -> Shape:
        return self.rows, self.outputs, self.inputs, self.kind

    @cached_property
    def _corrections(self) -> dict[MatmulTile | None, float]:
        """(measured / predicted) of the tiles that were timed near this shape on a GPU of this architecture."""
        return hopper_corrections().near(self._shape, processors=self.gpu.processors) if self.gpu.hopper else {}

    def candidates(self) -> Iterator[Choice]:
        # Without a measurement the first one is used, so that is a tile, and the few of the library follow.
        tiles = self._tiles()
        yield from islice(tiles, 1)
        yield from self._library()
        yield from tiles

    def _library(self) -> Iterator[Choice]:
        """Yield the library's matmul with more rows, as many as activations have memory for."""
        first = ceil_div(self.rows, LIBRARY_MULTIPLE) * LIBRARY_MULTIPLE
        choices = ({LIBRARY_ROWS: rows} for rows in range(first, padded(self.rows) + 1, LIBRARY_MULTIPLE))
        return filter(self.admits, choices)

    def _tiles(self) -> Iterator[Choice]:
        near = [tile for tile in self._corrections if tile is not None and self._runs(tile)]
        ordered = iter(sorted(near, key=self._seconds))
        # The rules for blocks and for many rows were fitted to timings of their kinds, the corrections to those of fp8.
        if self.kind not in LIKE or (self.kind == "int8" and self.rows <= MOST_ROWS):
            yield from map(choice_of, islice(ordered, 1))
        # What no search has timed takes turns with what one has.
        mixed = chain.from_iterable(zip_longest(self._modelled(), ordered))
        yield from (choice_of(tile) for tile in dict.fromkeys(mixed) if tile is not None)

    def _modelled(self) -> list[MatmulTile]:
        """Return all tiles, those first whose time the model alone predicts to be shortest."""
        shape = self.outputs, self.inputs, self.rows, self.kind, self.gpu
        tiles = [tile for tile in candidates(*shape) if self._runs(tile)]
        ordered = _mixed(
            sorted(((predicted_seconds(tile, self._shape, self.gpu), tile) for tile in tiles), key=itemgetter(0))
        )
        # Where it was timed, the rule for few rows of FP8 was within 3 % of the fastest tile, closer than the model.
        first = [] if self._ruled is None or not self.admits(choice_of(self._ruled)) else [self._ruled]
        return [*first, *ordered]

    @cached_property
    def _ruled(self) -> MatmulTile | None:
        shape, gpu = (self.rows, self.outputs, self.inputs), self.gpu
        return by_rule(*shape, self.kind, gpu.processors, gpu.shared, gpu.hopper)

    def _runs(self, tile: MatmulTile) -> bool:
        # Specialized tiles sum many rows of FP8 in the tensor core's accumulator, as fast_accum allows.
        if tile.specialized and self.kind == "fp8" and not self._fast_accum:
            return False
        fits = used_shared(tile, ITEMSIZE[self.kind]) <= self.gpu.shared - RESERVED
        return fits and self.admits(choice_of(tile))

    def admits(self, choice: Choice) -> bool:
        try:
            check_matmul(self.key, self.rows, choice)
        except ValueError:
            return False
        if (rows := choice.get(LIBRARY_ROWS)) is not None:
            # Its own rows are the default, and further ones would be copied.
            return isinstance(rows, int) and self.rows < rows <= padded(self.rows)
        return tile_of(choice).fits_32_bits(self.rows, self.outputs, self.inputs)

    def kernel(self, choice: Choice) -> Hashable:
        if LIBRARY_ROWS in choice:
            return self.op, LIBRARY_ROWS  # The library comes compiled.
        tile, shape = tile_of(choice), (self.rows, self.outputs, self.inputs)
        _, tiles, _, programs = tile.launch(*shape)
        # Triton specializes integers by divisibility.
        facts = [tile.splits_tiles(*shape), self.outputs % 16 == 0, tile.specialized and self.rows > MOST_ROWS]
        if not tile.needs_hopper:
            facts += [programs % tiles == 0, self.inputs % tile.inputs == 0, self.inputs % 16 == 0]
        launched = replace(tile, split=1, programs=0, prefetch_l2=0, prefetch_cycles=0)
        return self.op, self.kind, self.weight_dtype, self.dtype, launched, tuple(facts)

    def predicted(self, choice: Choice | None) -> float | None:
        # In the model, more rows never take less time.
        if choice is not None and LIBRARY_ROWS in choice:
            return None
        return self._seconds(None if choice is None else tile_of(choice))

    def _seconds(self, tile: MatmulTile | None) -> float:
        if tile is None and self.kind in LIKE:
            tile = self._ruled  # What runs without an entry.
        return predicted_seconds(tile, self._shape, self.gpu, way=self.way) * self._corrections.get(tile, 1.0)

    def trials(self, count: int) -> Trials:
        device = torch.device("cuda", torch.cuda.current_device())

        def random(*shape: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16).to(dtype)

        weights = [random(self.outputs, self.inputs, dtype=self.weight_dtype) for _ in range(count)]
        # As the engine allocates activations.
        x_TI = empty_rows(self.rows, self.inputs, self.weight_dtype, device)
        x_TI.copy_(random(self.rows, self.inputs))
        counts = torch.zeros(count, MOST_SHARED_TILES, dtype=torch.int32, device=device)
        if self.kind == "bf16":
            run: Product = partial(self._plain, x_TI)
            exact: Exact = partial(matmul_reference, x_TI, weights[0], dtype=torch.float32)
        else:
            run, exact = self._with_scales(x_TI, weights[0])
        hidden = min(self.inputs, MOST_CHANNELS)
        states_TC, norm_C = random(self.rows, hidden), random(hidden)
        return Trials(
            runs=[partial(run, weight, counts[i]) for i, weight in enumerate(weights)],
            exact=exact,
            before=lambda: rms_norm(states_TC, states_TC, norm_C, 1e-5),
            reset=counts.zero_,
        )

    def _with_scales(self, x_TI: torch.Tensor, first_OI: torch.Tensor) -> tuple[Product, Exact]:
        """Return the product with a weight and counters, and the exact one with the first weight."""
        device = x_TI.device
        x_scale_T1 = empty_rows(self.rows, 1, torch.float32, device).uniform_(0.5, 1.5)
        blocks = ceil_div(self.outputs, BLOCK), ceil_div(self.inputs, BLOCK)
        scale = torch.rand(blocks if self.kind == "fp8_block" else self.outputs, device=device) + 0.5

        def blocked(weight_OI: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            return block_scaled_matmul(x_TI, weight_OI, x_scale_T1, scale, None, self.dtype, counts)

        def integer(weight_OI: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            return int8_matmul(x_TI, weight_OI, x_scale_T1, scale, None, self.dtype, counts)

        if self.kind == "fp8_block":
            return blocked, partial(block_scaled_reference, x_TI, first_OI, x_scale_T1, scale, dtype=torch.float32)
        exact = partial(matmul_reference, x_TI, first_OI, x_scale_T1, scale, dtype=torch.float32)
        if self.kind == "int8":
            return integer, exact
        return partial(self._scaled, x_TI, x_scale_T1, scale, torch.ones(1, device=device)), exact

    def _plain(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return matmul(x_TI, weight_OI, None, counts)

    def _scaled(
        self,
        x_TI: torch.Tensor,
        x_scale_T1: torch.Tensor,
        weight_scale_O: torch.Tensor,
        one: torch.Tensor,
        weight_OI: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        if self._defers and self.dtype is torch.bfloat16:
            values_TO = unscaled_matmul(x_TI, weight_OI, one, self._fast_accum)
            if values_TO is not None:
                # The consumer applies the scales. So timings, which are of recorded calls, are without them, but the
                # results of others are compared with exact ones.
                recorded = torch.cuda.is_current_stream_capturing()
                return values_TO if recorded else values_TO * x_scale_T1 * weight_scale_O
        return scaled_matmul(x_TI, weight_OI, x_scale_T1, weight_scale_O, None, self.dtype, counts, self._fast_accum)


def _mixed(timed: Sequence[tuple[float, MatmulTile]]) -> list[MatmulTile]:
    """Return tiles by predicted time, longer by VARIETY for each faster tile of the same size and kernel: predictions
    for those err alike."""
    seen: Counter[tuple[int, int, int, bool, bool]] = Counter()
    ranked = []
    for seconds, tile in timed:
        family = tile.tokens, tile.outputs, tile.inputs, tile.specialized, tile.prefetch > 0
        ranked.append((seconds * (1 + VARIETY * seen[family]), tile))
        seen[family] += 1
    return [tile for _, tile in sorted(ranked, key=lambda pair: pair[0])]


Tiles = dict[int, MatmulTile | None]
"""Maximum rows -> tile; None = the library is faster, with as many rows or with more."""


def tiles_of(table: TuningTable) -> dict[tuple[str, str, int, int], Tiles]:
    """Return the tiles of a table's matmuls by (GPU, kind of weight, outputs, inputs)."""
    found = {}
    for subject, rows in table.entries.items():
        if subject.op == OP:
            facts: dict[str, Any] = dict(subject.key)
            tiles = {most: listed_tile(choice) for most, choice in rows.items()}
            found[subject.gpu, facts["weight"], facts["outputs"], facts["inputs"]] = tiles
    return found


def matmul_tunables(
    weight: torch.Tensor,
    rows: int,
    dtype: torch.dtype | None = None,
    *,
    kind: str | None = None,
    defers: bool = False,
    fast_accum: bool = True,
) -> list[MatmulTunable]:
    """Return the product of `rows` rows with this weight, unless its dtype goes to the library in any case.
    `dtype`: the output's; None = the weight's. Others as in MatmulTunable."""
    if weight.dtype not in KINDS:
        return []
    return [MatmulTunable(weight, rows, dtype or weight.dtype, kind=kind, defers=defers, fast_accum=fast_accum)]
