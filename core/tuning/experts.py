"""Products of routed experts as Tunables: tiles of gate and up, and of down. Shapes: T tokens, K experts of a token, E
experts, C hidden channels, F channels of an expert."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, product, zip_longest
from typing import Any

import torch

from dovetail.core.interfaces.activation import PLAIN, ActFormat, Activation
from dovetail.core.interfaces.expert import SWIGLU, Routing
from dovetail.core.interfaces.tuning import Choice, Trials, Tunable
from dovetail.core.ops import rms_norm
from dovetail.core.ops.expert_choice import (
    DOWN,
    KINDS,
    UP,
    check_experts,
    choice_of,
    divides,
    expert_key,
    fits,
    tile_of,
)
from dovetail.core.ops.expert_tiles import (
    LEAST_ROWS,
    ExpertTile,
    direct,
    expert_tile,
    most_tiles,
    rows_of_tile,
    specialized,
    specialized_expert_tile,
    specialized_rows,
)
from dovetail.core.ops.experts import ExpertWeights, gated_experts_reference
from dovetail.core.ops.formats import encode
from dovetail.core.ops.matmul import KINDS as KIND_OF
from dovetail.core.tuning.gpu import Gpu, this_gpu

CALLS = 4
"""Least calls in a graph, each with a routing of its own."""
MOST_SUMS = 160
"""Sums of a thread for which it has registers."""
TUNED_TOKENS = frozenset({1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512})
"""Numbers of tokens that are tuned; those in between use the next one's choice."""
MOST_EXACT = 1 << 29
"""Weights of gate and up that the exact result converts to float32 at a time: those of all experts may not fit."""
CHUNK = 1 << 22
"""Random numbers of which a matrix repeats as many as it needs: only its bytes count."""


class ExpertTunable(Tunable):
    """A product of gated_experts. The time is that of the whole layer, with the rule's tile for the other product."""

    def __init__(
        self,
        weights: ExpertWeights,
        rows: int,
        active: int,
        always: int,
        fmt: ActFormat,
        dtype: torch.dtype,
        *,
        tile_rows: int | None = None,
        gpu: Gpu | None = None,
    ) -> None:
        """`weights`: only shapes, dtypes and blocks count. `rows`, `active`: T and K, of which each token has the last
        `always` experts. `fmt`: format of both inputs. `tile_rows`: rows of a tile of the second product; None = this
        is the first one. `gpu`: None = the current one."""
        self.weights, self.rows, self.active, self.always = weights, rows, active, always
        self.fmt, self.dtype, self.tile_rows, self._gpu = fmt, dtype, tile_rows, gpu
        self.experts, self.hidden, self.channels = weights.down.shape
        kind = "fp8_block" if weights.block else KIND_OF[weights.up.dtype]
        self.op = UP if tile_rows is None else DOWN
        self.key = expert_key(kind, self.experts, active, self.hidden, self.channels, tile_rows)
        touched = min(self.experts, rows * active)
        self.nbytes = touched * 3 * self.hidden * self.channels * weights.up.element_size()

    @cached_property
    def gpu(self) -> Gpu:
        return self._gpu or this_gpu()

    @property
    def sorts(self) -> bool:
        """Whether pairs are sorted by expert."""
        return not direct(self.rows, self.active, self.experts)

    def candidates(self) -> Iterable[Choice]:
        """Yield the rule's tiles, and those that differ least from them; the usual number of rows first, and then twice
        and half as many in turn."""
        rows = self.tile_rows
        near = _tile_rows(self.rows, self.active, self.weights) if rows is None else [rows]
        by_rows = [list(self._of_rows(rows)) for rows in near]
        return (choice for choice in chain.from_iterable(zip_longest(*by_rows)) if choice is not None)

    def _of_rows(self, rows: int) -> Iterator[Choice]:
        ruled = self._ruled(rows)
        others = sorted(self._tiles(rows), key=partial(_differences, ruled))
        return filter(self.admits, map(choice_of, dict.fromkeys((ruled, *others))))

    def _ruled(self, rows: int) -> ExpertTile:
        """Return the rule's tile."""
        gated, size, gpu = self.op == UP, self.weights.up.element_size(), self.gpu
        if gpu.hopper and self.sorts and specialized(rows, self.hidden, self.channels, size, self.weights.block):
            return specialized_expert_tile(rows, size, gpu.shared)
        sides = (self.channels, self.hidden) if gated else (self.hidden, self.channels)
        tiles = most_tiles(self.rows * self.active, self.experts, rows)
        return expert_tile(rows, tiles, *sides, size, gated, gpu.processors, gpu.shared, self._group)

    @property
    def _group(self) -> int:
        """Return the inputs that share a scale of the weight; 0 = all."""
        return 0 if self.weights.block is None else self.weights.block[0 if self.op == UP else 1]

    def _tiles(self, rows: int) -> Iterator[ExpertTile]:
        gated = self.op == UP
        for outputs, columns, warps, stages in product((32, 64, 128, 256), (64, 128, 256), (4, 8), (2, 3, 4, 5)):
            if rows * outputs * (1 + gated) <= MOST_SUMS * 32 * warps:
                yield ExpertTile(rows, outputs, columns, warps, stages)

    def admits(self, choice: Choice) -> bool:
        try:
            check_experts(self.key, self.rows, choice)
        except ValueError:
            return False
        tile = tile_of(choice)
        if tile.residents:
            return tile == self._ruled(tile.rows)
        size = self.weights.up.element_size()
        runs = divides(tile, self._group) and tile.shared_bytes(size, self.op == UP) <= self.gpu.shared
        return runs and fits(tile.rows, self.sorts)

    def kernel(self, choice: Choice) -> Hashable:
        # Triton specializes integers by divisibility.
        sizes = (self.hidden, self.channels)
        facts = [size % number == 0 for size in sizes for number in (16, tile_of(choice).inputs)]
        how = self.weights.up.dtype, self.weights.block, self.dtype, self.active, self.sorts
        return self.op, *how, *facts, tuple(sorted(choice.items()))

    def trials(self, count: int) -> Trials:
        device = torch.device("cuda", torch.cuda.current_device())
        weights = self._random_weights(device)
        norm_C = torch.randn(self.hidden, device=device, dtype=self.dtype)
        plain_TC = torch.randn(self.rows, self.hidden, device=device, dtype=self.dtype)
        x = encode(plain_TC, (self.fmt,))[self.fmt]
        routings = [self._routing(device) for _ in range(max(count, CALLS))]
        options: dict[str, Any] = dict(between=self.fmt, dtype=self.dtype)

        def run(routing: Routing) -> torch.Tensor:
            from dovetail.core.ops.kernels.experts import gated_experts_triton

            return gated_experts_triton(
                x, routing, weights, SWIGLU, None, **options, fast_accum=True, rows=self.tile_rows
            )

        def exact() -> torch.Tensor:
            return exact_sum(x, routings[0], weights, self.fmt)

        return Trials(
            runs=[partial(run, routing) for routing in routings],
            exact=exact,
            before=lambda: rms_norm(plain_TC, plain_TC, norm_C, 1e-5),
            # The second input may round to another number of 8 bits than the reference's does.
            tolerance=1e-2 if self.fmt is PLAIN else 3e-2,
        )

    def _random_weights(self, device: torch.device) -> ExpertWeights:
        def drawn(like: torch.Tensor) -> torch.Tensor:
            size = 40.0 if like.dtype is torch.int8 else like.shape[-1] ** -0.5
            some = (torch.randn(CHUNK, device=device) * size).clamp(-127, 127).to(like.dtype)
            made = torch.empty(like.shape, dtype=like.dtype, device=device)
            for part in made.view(-1).split(CHUNK):
                part.copy_(some[: len(part)])
            return made

        def scales(like: torch.Tensor | None) -> torch.Tensor | None:
            return None if like is None else torch.rand(like.shape, device=device) + 0.5

        given = self.weights
        scaled: dict[str, Any] = {name: scales(getattr(given, name)) for name in ("up_scale", "down_scale")}
        return replace(given, up=drawn(given.up), down=drawn(given.down), **scaled)

    def _routing(self, device: torch.device) -> Routing:
        """Each routed expert is equally likely."""
        routed = self.experts - self.always
        order_TE = torch.rand(self.rows, routed, device=device).argsort(1)[:, : self.active - self.always]
        last = torch.arange(routed, self.experts, device=device).expand(self.rows, -1)
        experts_TK = torch.cat((order_TE, last), 1).int()
        return Routing(experts_TK, torch.rand(experts_TK.shape, device=device))


def exact_sum(
    x: Activation, routing: Routing, weights: ExpertWeights, fmt: ActFormat, most: int = MOST_EXACT
) -> torch.Tensor:
    """Return the result of gated_experts in float32. `most`: as MOST_EXACT."""
    experts, hidden, channels = weights.down.shape
    experts_TK, step = routing.experts_TK, max(1, most // (2 * hidden * channels))
    names = ("up", "down", "up_scale", "down_scale")
    total_TC = torch.zeros(len(experts_TK), hidden, device=experts_TK.device)
    for first in range(0, experts, step):
        end = first + step
        some: dict[str, Any] = {name: x_E[first:end] for name in names if (x_E := getattr(weights, name)) is not None}
        at_TK = torch.where((experts_TK >= first) & (experts_TK < end), experts_TK - first, -1)
        own = x, Routing(at_TK, routing.weights_TK), replace(weights, **some)
        total_TC += gated_experts_reference(*own, SWIGLU, None, fmt, torch.float32)
    return total_TC


def _differences(usual: ExpertTile, tile: ExpertTile) -> int:
    names = ("outputs", "inputs", "warps", "stages")
    return sum(getattr(usual, name) != getattr(tile, name) for name in names)


def expert_tunables(
    weights: ExpertWeights, rows: int, active: int, always: int, fmt: ActFormat, dtype: torch.dtype
) -> Sequence[Tunable]:
    """Return both products for `rows` tokens, the second one for each number of rows that tiles may have."""
    kind = KIND_OF.get(weights.up.dtype)
    if kind not in KINDS or rows not in TUNED_TOKENS:
        return ()
    # Values would be sent to the processes that compile.
    names = ("up", "down", "up_scale", "down_scale")
    shapes: dict[str, Any] = {name: x.to("meta") for name in names if (x := getattr(weights, name)) is not None}
    make = partial(ExpertTunable, replace(weights, **shapes), rows, active, always, fmt, dtype)
    return [make(), *(make(tile_rows=each) for each in _tile_rows(rows, active, weights))]


def _tile_rows(tokens: int, active: int, weights: ExpertWeights) -> list[int]:
    """Return the numbers of rows that tiles may have: those of the rules first, and then twice and half as many."""
    experts, _, channels = weights.down.shape
    if direct(tokens, active, experts):
        return [LEAST_ROWS]
    pairs = tokens * active
    usual = rows_of_tile(pairs, experts)
    near = dict.fromkeys((usual, specialized_rows(pairs, experts, channels), 2 * usual, usual // 2))
    return [rows for rows in near if fits(rows, sorts=True)]
