"""The layers of a large step as two half-batches, so that sums over ranks of one half overlap with matmuls of the other
(as in DeepSeek-V3's prefill and SGLang's two-batch overlap).

The second half may begin within a chunk: in each layer it attends to what the first half has just written.

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
    TreeMask,
)

TILE = 128
"""Tokens of a matmul tile. The first half fills whole tiles."""


class OverlappedForward:
    """Replaces `Model.forward` for steps without a graph."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        adapters: Adapters | None,
        device: torch.device,
        *,
        least: int,
    ) -> None:
        """`least`: number of tokens from which a step is cut in two."""
        self.model, self.attention, self.adapters, self.least = model, attention, adapters, least
        self.side: Side = SideStream(device) if device.type == "cuda" else Inline()

    def __call__(self, embeds_TC: torch.Tensor, ctx: ForwardContext, taps: tuple[int, ...] = ()) -> Hidden:
        host = next(iter(ctx.attn.values())).host
        cut = middle(host) if len(embeds_TC) >= self.least else 0
        if not cut:
            return self.model.forward(embeds_TC, ctx, taps)
        halves = halve(ctx, cut, self.attention)
        embeds = embeds_TC.split_with_sizes([cut, len(embeds_TC) - cut])
        layers = [self.model.layers(*half, taps) for half in zip(embeds, halves, strict=True)]
        adapters, collective = self.adapters, self.model.build.collective
        slots_T = None if adapters is None else adapters.slots_T
        collective.overlapped = True
        try:
            if slots_T is None:
                found = interleave(layers, self.side)
            else:
                slots = slots_T[:cut], slots_T[cut:].clone()
                found = interleave(layers, self.side, lambda half: setattr(adapters, "slots_T", slots[half]))
                adapters.slots_T = slots_T
        finally:
            collective.overlapped = False
        return Hidden(
            torch.cat([half.states for half in found]),
            {tap: torch.cat([half.taps[tap] for half in found]) for tap in taps},
        )


def why_useless(least: int, budget: int, ranks: int) -> str | None:
    """Return why overlap gains nothing, in words for a note; None = it may help."""
    if least > budget:
        return f"no step has more tokens than engine.token_budget={budget}"
    if ranks == 1:
        return "steps are cut in two on one rank, where there are no sums to hide"
    return None


def middle(host: HostBounds) -> int:
    """Return the number of tokens of the first half; 0 = the step cannot be cut. In large steps a cut within a chunk
    is at a multiple of TILE. Decode rows are not cut."""
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
    """Return (row, its first token, its end)."""
    start = 0
    for row, count in enumerate(counts):
        if token < start + count:
            return row, start, start + count
        start += count
    raise ValueError(f"the step has {start} tokens; it has no token {token}")


def halve(ctx: ForwardContext, cut: int, attention: AttentionBackend) -> tuple[ForwardContext, ForwardContext]:
    """Return the contexts of the tokens before `cut` and from `cut` on."""
    host = next(iter(ctx.attn.values())).host
    row, start, stop = _row_of(cut, host.counts)
    inside = cut > start
    rows = row + inside
    """Number of rows of the first half."""
    rest = stop - cut if inside else 0
    """Tokens of its last row that belong to the second half."""
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
        live_T = None
        if ctx.live_T is not None:
            # Cloned as positions are: kernels of both halves then find equally aligned tensors.
            live_T = ctx.live_T[:cut] if half is first else ctx.live_T[cut:].clone()
        parts.append(ForwardContext(next(iter(attn.values())).meta.positions_T, attn, live_T))
    return parts[0], parts[1]


def _before(meta: BatchMeta, cut: int, rows: int) -> BatchMeta:
    """Return the metadata of the first `rows` rows, without tokens from `cut` on."""
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
        tree=None if meta.tree is None else TreeMask(meta.tree.root_T[:cut], meta.tree.ancestors_T[:cut]),
    )


def _from(meta: BatchMeta, cut: int, row: int) -> BatchMeta:
    """Metadata of rows from `row` on, without tokens before `cut`. Copies: less aligned views need other kernels."""
    return replace(
        meta,
        row_start_B1=(meta.row_start_B1[row:] - cut).clamp(min=0),
        kv_len_B=meta.kv_len_B[row:].clone(),
        slots_B=meta.slots_B[row:].clone(),
        positions_T=meta.positions_T[cut:].clone(),
        rows_T=meta.rows_T[cut:] - row,
        page_table_BP=meta.page_table_BP[row:].clone(),
        write_T=meta.write_T[cut:].clone(),
        tree=None if meta.tree is None else _tree_from(meta.tree, cut),
    )


def _tree_from(tree: TreeMask, cut: int) -> TreeMask:
    return TreeMask(tree.root_T[cut:].clone(), tree.ancestors_T[cut:].clone())


class Side(Protocol):
    """Runs collective calls."""

    def begin(self) -> None:
        """Take the current stream as the main one. Called before the first call of a step."""

    def start(self, call: Callable[[], Any]) -> Any:
        """Start the call. Return a handle for `finish`."""

    def finish(self, started: Any) -> Any:
        """Return the call's result, for later work on the current stream."""


class Inline:
    """Runs calls at once. For devices without streams."""

    def begin(self) -> None: ...

    def start(self, call: Callable[[], Any]) -> Any:
        return call()

    def finish(self, started: Any) -> Any:
        return started


class SideStream:
    """Runs calls on a stream of higher priority: a sum needs few SMs, but every rank waits until it gets them. Streams
    are looked up once, since with eight ranks the launches of a half's block take as long as its device work."""

    _main: torch.cuda.Stream
    """Current since `begin`."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._given = torch.cuda.Event()
        """Recorded on main. A wait refers to the latest record."""

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
    halves: Sequence[Layers], side: Side, enter: Callable[[int], None] = lambda half: None
) -> tuple[Hidden, ...]:
    """Run the halves alternately and return their results. The first half has the earlier tokens, and is ahead in every
    layer. `enter(half)` is called before a half goes on."""
    found: dict[int, Hidden] = {}
    turns: deque[tuple[int, Any]] = deque()

    def go_on(half: int, given: Any) -> None:
        enter(half)
        try:
            call = halves[half].send(given)
        except StopIteration as end:
            found[half] = end.value
        else:
            turns.append((half, side.start(call)))

    side.begin()
    for half in range(len(halves)):
        go_on(half, None)
    while turns:
        half, started = turns.popleft()
        given = side.finish(started)
        # The last reference to the call's inputs, whose memory can now be reused.
        del started
        go_on(half, given)
    return tuple(found[half] for half in range(len(halves)))
