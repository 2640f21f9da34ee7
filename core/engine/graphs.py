"""Decode steps as CUDA graphs: one per batch size, replayed with nothing but the rows' slots as input.

Everything else a step needs (lengths, tokens, page tables) it reads from the device state, so a graph serves any rows
of its number. Spare rows belong to the scratch slot and write to the scratch page. B rows, W tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from dovetail.core.engine.batch import Batch, Tokens, contexts, locate_tokens, make_batch
from dovetail.core.engine.device_state import DeviceState
from dovetail.core.interfaces import (
    AttentionBackend,
    ForwardContext,
    Hidden,
    HostBounds,
    KVGroup,
    Model,
    Progress,
    Row,
    RowFlag,
)


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    slots_B: torch.Tensor
    tokens: Tokens
    hidden: Hidden


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then steps that waste at most a quarter of the rows."""
    sizes = [n for n in (1, 2, 4, 8, 12, 16, 20, 24, 28, 32) if n < most]
    step, n = 8, 40
    while n < most:
        sizes.append(n)
        step = max(8, n // 8 // 8 * 8)
        n += step
    return [*sizes, most]


class DecodeGraphs:
    def __init__(
        self,
        model: Model,
        state: DeviceState,
        groups: Seq[KVGroup],
        attention: AttentionBackend,
        *,
        taps: tuple[int, ...],
        lookahead: int,
        most_rows: int,
        max_len: int,
    ) -> None:
        self.model, self.state, self.groups, self.attention = model, state, groups, attention
        self.taps, self.width, self.max_len = taps, 1 + lookahead, max_len
        self.sizes = batch_sizes(most_rows)
        self._captured: dict[int, _Captured] = {}

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Largest first, in one memory pool: the smaller ones reuse its blocks."""
        pool = None
        for done, size in enumerate(reversed(self.sizes)):
            progress("capture graphs", done / len(self.sizes))
            slots_B = torch.full((size,), self.state.scratch, dtype=torch.int64, device=self.state.device)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._forward(slots_B)  # Compiles kernels, which capture cannot.
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                tokens, hidden = self._forward(slots_B)
            pool = pool or graph.pool()
            self._captured[size] = _Captured(graph, slots_B, tokens, hidden)

    def _forward(self, slots_B: torch.Tensor) -> tuple[Tokens, Hidden]:
        rows, width, device = len(slots_B), self.width, slots_B.device
        count_B = torch.full((rows,), width, dtype=torch.int64, device=device)
        ends_B = torch.arange(1, rows + 1, device=device) * width
        rows_T = torch.arange(rows * width, device=device) // width
        tokens = locate_tokens(slots_B, count_B, ends_B, rows_T, self.state)
        host = HostBounds((width,) * rows, (self.max_len,) * rows, rows)
        ctx = ForwardContext(tokens.positions_T, contexts(tokens, host, self.state, self.groups, self.attention))
        return tokens, self.model.forward(self.model.embed(tokens.ids_T), ctx, self.taps)

    def serves(self, rows: Seq[Row]) -> bool:
        """Decode rows alone. Rows with fewer drafts than the graph's width feed padding."""
        return len(rows) <= self.sizes[-1] and all(row.flags & RowFlag.DECODE for row in rows)

    def run(self, rows: Seq[Row]) -> tuple[Batch, Hidden]:
        """The outputs stay valid until the next run."""
        captured = self._captured[next(size for size in self.sizes if size >= len(rows))]
        spare = len(captured.slots_B) - len(rows)
        slots = [row.slot for row in rows] + [self.state.scratch] * spare
        captured.slots_B.copy_(self.state.upload(slots, torch.int64), non_blocking=True)
        captured.graph.replay()
        return make_batch(rows, captured.tokens, {}), captured.hidden
