"""The layers of a large step as two half-batches, so that the ranks' sums of one run under the products of the other
(as in DeepSeek-V3's prefill and SGLang's two-batch overlap).

The second half may begin within a chunk: in each layer it attends to what the first has just written.

Shapes: T tokens, C channels, B rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from dovetail.core.interfaces import (
    Adapters,
    AttentionBackend,
    AttnCtx,
    BatchMeta,
    ForwardContext,
    Hidden,
    HostBounds,
    Layers,
    Model,
)

TILE = 128
"""Tokens that a product's tile holds: the first half leaves none of its tiles partly empty."""


class OverlappedForward:
    """In place of `Model.forward`, for steps without a graph."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        adapters: Adapters | None,
        device: torch.device,
        *,
        least: int,
    ) -> None:
        """`least`: tokens from which on a step is cut."""
        self.model, self.attention, self.adapters, self.least = model, attention, adapters, least
        self.side: Side = SideStream(device) if device.type == "cuda" else Inline()

    def __call__(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        host = next(iter(ctx.attn.values())).host
        cut = middle(host) if len(embeds_TC) >= self.least else 0
        if not cut:
            return self.model.forward(embeds_TC, ctx, taps)
        halves = halve(ctx, cut, self.attention)
        embeds = embeds_TC.split_with_sizes([cut, len(embeds_TC) - cut])
        lanes = [self.model.layers(*half, taps) for half in zip(embeds, halves, strict=True)]
        adapters, collective = self.adapters, self.model.build.collective
        slots_T = None if adapters is None else adapters.slots_T
        collective.overlapped = True
        try:
            if slots_T is None:
                found = interleave(lanes, self.side)
            else:
                slots = slots_T[:cut], slots_T[cut:].clone()
                found = interleave(lanes, self.side, lambda lane: setattr(adapters, "slots_T", slots[lane]))
                adapters.slots_T = slots_T
        finally:
            collective.overlapped = False
        return Hidden(
            torch.cat([half.states for half in found]),
            {tap: torch.cat([half.taps[tap] for half in found]) for tap in taps},
        )


def why_useless(least: int, budget: int, ranks: int) -> str | None:
    """In words, for who asked for it; None = it may be of use."""
    if least > budget:
        return f"no step has more tokens than engine.token_budget={budget}"
    if ranks == 1:
        return "steps are cut in two on one rank, where there are no sums to hide"
    return None


def middle(host: HostBounds) -> int:
    """Tokens of the first half: a multiple of TILE within a chunk, a whole number of decode rows; 0 = there is none."""
    total = sum(host.counts)
    wanted = total // 2
    if wanted >= 4 * TILE:
        wanted = (wanted + TILE // 2) // TILE * TILE
    row, start, stop = _row_of(wanted, host.counts)
    if start == wanted or row >= host.num_decode:
        return wanted
    ends = [end for end in (start, stop) if 0 < end < total]
    return min(ends, key=lambda end: abs(end - wanted), default=0)


def _row_of(token: int, counts: Sequence[int]) -> tuple[int, int, int]:
    """(row, its first token, the end of it)."""
    start = 0
    for row, count in enumerate(counts):
        if token < start + count:
            return row, start, start + count
        start += count
    raise ValueError(f"the step has {start} tokens; it has no token {token}")


def halve(ctx: ForwardContext, cut: int, attention: AttentionBackend) -> tuple[ForwardContext, ForwardContext]:
    """The contexts of the tokens before and from `cut` on."""
    host = next(iter(ctx.attn.values())).host
    row, start, stop = _row_of(cut, host.counts)
    inside = cut > start
    rows = row + inside
    """Of the first half."""
    rest = stop - cut if inside else 0
    """Tokens that it leaves of its last row."""
    counts, bounds = list(host.counts[:rows]), list(host.bounds[:rows])
    counts[-1] -= rest
    bounds[-1] -= rest
    first = HostBounds(tuple(counts), tuple(bounds), min(host.num_decode, rows))
    second = HostBounds((stop - cut, *host.counts[row + 1 :]), host.bounds[row:], max(host.num_decode - row, 0))
    parts = []
    for half, cut_meta in ((first, _before), (second, _from)):
        planned = attention.plan_host(half)
        attn: dict[int, AttnCtx] = {}
        for group, whole in ctx.attn.items():
            meta = cut_meta(whole.meta, cut, rows if half is first else row)
            attn[group] = attention.plan_device(meta, half, planned)
        parts.append(ForwardContext(next(iter(attn.values())).meta.positions_T, attn))
    return parts[0], parts[1]


def _before(meta: BatchMeta, cut: int, rows: int) -> BatchMeta:
    """Of the first rows, without the last one's tokens from `cut` on."""
    start_B1 = meta.row_start_B1[: rows + 1]
    return replace(
        meta,
        row_start_B1=start_B1.clamp(max=cut),
        kv_len_B=meta.kv_len_B[:rows] - (start_B1[1:] - cut).clamp(min=0),
        slots_B=meta.slots_B[:rows],
        positions_T=meta.positions_T[:cut],
        rows_T=meta.rows_T[:cut],
        page_table_BP=meta.page_table_BP[:rows],
        write_T=meta.write_T[:cut],
        tree_mask_TW=None if meta.tree_mask_TW is None else meta.tree_mask_TW[:cut],
    )


def _from(meta: BatchMeta, cut: int, row: int) -> BatchMeta:
    """Of the rows from `row` on, without that one's tokens before `cut`. Copies: kernels are compiled anew for
    addresses that are less aligned."""
    return replace(
        meta,
        row_start_B1=(meta.row_start_B1[row:] - cut).clamp(min=0),
        kv_len_B=meta.kv_len_B[row:].clone(),
        slots_B=meta.slots_B[row:].clone(),
        positions_T=meta.positions_T[cut:].clone(),
        rows_T=meta.rows_T[cut:] - row,
        page_table_BP=meta.page_table_BP[row:].clone(),
        write_T=meta.write_T[cut:].clone(),
        tree_mask_TW=None if meta.tree_mask_TW is None else meta.tree_mask_TW[cut:].clone(),
    )


class Side(Protocol):
    """Where collective calls run."""

    def begin(self) -> None:
        """From here on the current stream is main; before the first call of a step."""

    def start(self, call: Callable[[], Any]) -> Any:
        """The call under way, for `finish`."""

    def finish(self, started: Any) -> Any:
        """What the call returned, for later work on the current stream."""


class Inline:
    """Calls run at once, as part of the current stream: for devices without streams."""

    def begin(self) -> None: ...

    def start(self, call: Callable[[], Any]) -> Any:
        return call()

    def finish(self, started: Any) -> Any:
        return started


class SideStream:
    """A stream of higher priority: a sum needs few multiprocessors, but every rank waits until it has them.

    With eight ranks the device does a half's share of a block in as little time as the host takes to launch it, so
    streams are looked up once, and not switched by context managers, which look them up again."""

    _main: torch.cuda.Stream
    """Current since `begin`."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._given = torch.cuda.Event()
        """Of main; a wait takes what was recorded last."""

    def begin(self) -> None:
        self._main = torch.cuda.current_stream(self.stream.device)

    def start(self, call: Callable[[], Any]) -> Any:
        self._given.record(self._main)
        self.stream.wait_event(self._given)
        torch.cuda.set_stream(self.stream)
        try:
            result = call()
        finally:
            torch.cuda.set_stream(self._main)
        done = torch.cuda.Event()
        done.record(self.stream)
        return call, result, done

    def finish(self, started: Any) -> Any:
        call, result, done = started
        self._main.wait_event(done)
        return result


def interleave(
    lanes: Sequence[Layers], side: Side, enter: Callable[[int], None] = lambda lane: None
) -> tuple[Hidden, ...]:
    """What each lane returns; the first was given the earlier tokens, and is ahead in every layer. `enter` is called
    before a lane goes on."""
    found: dict[int, Hidden] = {}
    turns: deque[tuple[int, Any]] = deque()

    def go_on(lane: int, given: Any) -> None:
        enter(lane)
        try:
            call = lanes[lane].send(given)
        except StopIteration as end:
            found[lane] = end.value
        else:
            turns.append((lane, side.start(call)))

    side.begin()
    for lane in range(len(lanes)):
        go_on(lane, None)
    while turns:
        lane, started = turns.popleft()
        given = side.finish(started)
        # With this the last of what the call read may go.
        del started
        go_on(lane, given)
    return tuple(found[lane] for lane in range(len(lanes)))
