"""Decode steps as CUDA graphs: one per batch size for the layers, and for drawing one where all rows are greedy and one
where some are not. They are replayed with nothing but the rows' slots as input.

Everything else a step needs (lengths, tokens, page tables) it reads from the device state, so a graph serves any rows
of its number. Spare rows belong to the scratch slot, which is never written. R rows, W tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.core.engine.batch import DECODE, Batch, lay_out, make_batch
from dovetail.core.engine.device_state import DeviceState
from dovetail.core.engine.sampling_step import Sampled
from dovetail.core.interfaces import (
    AttentionBackend,
    ForwardContext,
    Hidden,
    HostBounds,
    KVGroup,
    Model,
    Progress,
    Row,
)
from dovetail.core.ops.step import TokenLayout, accept, draw


@dataclass(slots=True)
class DecodeGraph:
    """The graphs of one batch size."""

    rows_R2: torch.Tensor
    """Input, int64: slot, and drafts to verify at most."""
    forward: torch.cuda.CUDAGraph
    tokens: TokenLayout
    hidden: Hidden
    sample: dict[bool, tuple[torch.cuda.CUDAGraph, Sampled]]
    """By whether some row is random."""

    def section(self, rows: Seq[Row], scratch: int) -> list[int]:
        """The graph's input, to be sent with the plan."""
        found = [n for row in rows for n in (row.slot, row.draft)]
        return found + [scratch, 0] * (len(self.rows_R2) - len(rows))


def batch_sizes(most: int) -> list[int]:
    """Less than two fifths of a graph's rows are spare, and less than a third above 8. Above 128 they are multiples of
    what a product's tiles hold, since one row past a tile costs as much as a whole one."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (64 if sizes[-1] < 512 else 128))
    return [*(size for size in sizes if size < most), most]


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
        self._graphs: dict[int, DecodeGraph] = {}

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Largest first, in one memory pool: the smaller ones reuse its blocks."""
        self._pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self.sizes)):
            progress("capture graphs", done / len(self.sizes))
            rows_R2 = torch.tensor([[self.state.scratch, 0]] * size, device=self.state.device)
            forward, (tokens, hidden) = self._capture(lambda: self._forward(rows_R2))  # noqa: B023
            sample = {
                random: self._capture(lambda: self._sample(rows_R2, tokens, hidden, random))  # noqa: B023
                for random in (False, True)
            }
            self._graphs[size] = DecodeGraph(rows_R2, forward, tokens, hidden, sample)

    def _capture(self, call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()  # Compiles kernels, which capture cannot.
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = call()
        return graph, outputs

    def _forward(self, rows_R2: torch.Tensor) -> tuple[TokenLayout, Hidden]:
        rows, width = len(rows_R2), self.width
        host = HostBounds((width,) * rows, (self.max_len,) * rows, rows)
        row_start = torch.arange(rows + 1, dtype=torch.int32, device=rows_R2.device) * width
        slots_R = rows_R2[:, 0].contiguous()
        tokens, attn = lay_out(slots_R, row_start, host, self.state, self.groups, self.attention)
        embeds_TC = self.model.embed(tokens.ids_T)
        return tokens, self.model.forward(embeds_TC, ForwardContext(tokens.positions_T, attn), self.taps)

    def _sample(self, rows_R2: torch.Tensor, tokens: TokenLayout, hidden: Hidden, random: bool) -> Sampled:
        state = self.state
        slots_R, limit_R = rows_R2.t().contiguous().unbind(0)
        position_N = tokens.positions_T + 1
        temperature_N, key_N = state.temperature_S, state.key_S
        if random:
            temperature_N, key_N = temperature_N[tokens.slots_T], key_N[tokens.slots_T]
        drawn_N = draw(self.model.logits(hidden.states), position_N, temperature_N, key_N, random)
        tokens_RW = drawn_N.view(-1, self.width)
        base_R = position_N[:: self.width].contiguous()
        accepted = accept(tokens_RW, slots_R, base_R, limit_R, state.tokens_SL, state.computed_S, state.drafts_S)
        return Sampled(tokens_RW, accepted.accepted_R, slots_R, accepted.lengths_R)

    def pick(self, rows: Seq[Row]) -> DecodeGraph | None:
        """For decode rows alone. Rows with fewer drafts than the graph's width feed padding."""
        if len(rows) > self.sizes[-1] or not all(row.flags & DECODE for row in rows):
            return None
        return self._graphs[next(size for size in self.sizes if size >= len(rows))]

    def forward(self, graph: DecodeGraph, rows: Seq[Row], section: torch.Tensor) -> tuple[Batch, Hidden]:
        """The outputs stay valid until the next run."""
        graph.rows_R2.copy_(section.view(-1, 2))
        graph.forward.replay()
        return make_batch(rows, graph.tokens, {}), graph.hidden

    def sample(self, graph: DecodeGraph, rows: int, random: bool) -> Sampled:
        """After `forward`, for rows that are all `plain` (SlotInfo)."""
        captured, out = graph.sample[random]
        captured.replay()
        return Sampled(out.tokens_RW[:rows], out.accepted_R[:rows], out.slots_R[:rows], out.lengths_R[:rows])
