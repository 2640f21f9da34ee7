"""Steps as CUDA graphs: the layers of decode steps, one graph per number of rows; those of mixed steps, which feed
prompts too, one per number of tokens; and drawing, one per number of rows that sample, whatever ran the layers. Where
there are adapters, layers have a second set for steps of which some row has one: the others do not pay for them. Where
there are drafts, decode steps and drawing have a second set for steps that verify none.

They are replayed with nothing but the rows as input: everything else a step needs (lengths, tokens, page tables) they
read from the device state. What a graph has to spare is padding: rows of the scratch slot, which is never written, rows
without tokens, and tokens without a row.

R rows that sample, W tokens of a decode row: 1, or as many as it may have with its drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dovetail.core.interfaces import (
    Adapters,
    AttentionBackend,
    ForwardContext,
    Hidden,
    HostBounds,
    KVGroup,
    Model,
    Progress,
)
from dovetail.core.ops.step import SampleInputs, TokenLayout, accept, gather_samples
from dovetail.core.worker.batch import Batch, Rows, adapting, lay_out
from dovetail.core.worker.device_state import DeviceState
from dovetail.core.worker.sampler import DRAWS, SampleParams, sample, sample_over_ranks
from dovetail.core.worker.sampling import Sampled, advance_chunks, chunk_section, sampling_section

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.worker.upload import Section

Replay = Callable[[], None]
Record = Callable[[Callable[[], Any]], tuple[Replay, Any]]
"""Runs a call and says how to run it again, and what it returned: tensors that each repetition writes anew."""


class Recorder:
    """By CUDA graphs that share one memory pool. Before each, `torch.cuda.graph` would give all free memory back, and
    then ask for it again."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream.wait_stream(torch.cuda.current_stream())

    def __call__(self, call: Callable[[], Any]) -> tuple[Replay, Any]:
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        with torch.cuda.stream(self._stream):
            call()  # Compiles kernels, which capture cannot.
            graph.capture_begin(pool=self._pool)
            try:
                outputs = call()
            finally:
                graph.capture_end()
        return graph.replay, outputs

    def close(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def forget(self) -> None:
        """No graph can be replayed any more, whoever still holds one: NCCL waits for the last that calls it."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


MOST_PAIRS = 1 << 24
"""Tokens of chunks times the keys of their rows, in a step that runs as a graph. Beyond that attention is much of it,
and a backend reads prompts better whose lengths it knows; the device is then busy for longer than launches take."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one graph of the layers serves."""

    tokens: int
    decodes: int
    """Decode rows."""
    chunks: int
    """Rows that feed prompts; 0 = the graph is for decode steps, whose rows feed W tokens each."""
    samples: int
    """Rows that sample."""
    width: int
    """W."""
    adapted: bool = False
    """Rows may have adapters."""

    @property
    def rows(self) -> int:
        return self.decodes + self.chunks

    @property
    def layout(self) -> int:
        """Integers of a mixed step's input that say which rows run."""
        return 2 * self.rows + 1 + 2 * self.chunks if self.chunks else 0


@dataclass(slots=True)
class ForwardGraph:
    """The layers of one kind of step."""

    capacity: Capacity
    input_N: torch.Tensor
    """int64. Of mixed steps first each row's slot, its first token and the end of all, and `chunk_section`; then, of
    all steps, `sampling_section`."""
    replay: Replay
    tokens: TokenLayout
    hidden: Hidden


def batch_sizes(most: int) -> list[int]:
    """Less than two fifths of a graph's rows are spare, and less than a third above 8. Above 128 they are multiples of
    what a product's tiles hold, since one row past a tile costs as much as a whole one."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (64 if sizes[-1] < 512 else 128))
    return [*(size for size in sizes if size < most), most]


def token_sizes(most: int) -> list[int]:
    """Tokens of mixed steps: multiples of what a product's tiles hold, but for the few that cost no more than their
    weights."""
    sizes = [16, 32, 64]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (64 if sizes[-1] < 512 else 128))
    return [*(size for size in sizes if size < most), most] if most else []


class StepGraphs:
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
        most_tokens: int,
        max_len: int,
        adapters: Adapters | None = None,
    ) -> None:
        """`most_tokens`: of a mixed step that gets a graph; 0 = none does."""
        self.model, self.state, self.groups, self.attention = model, state, groups, attention
        self.taps, self.max_len = taps, max_len
        self.widths = (1, 1 + lookahead) if lookahead else (1,)
        self.sizes, self._most_tokens = batch_sizes(most_rows), most_tokens
        self.capacities = [Capacity(size * w, size, 0, size, w) for w in self.widths for size in self.sizes]
        self.capacities += [self._mixed(tokens) for tokens in token_sizes(most_tokens)]
        self._adapters = adapters
        if adapters is not None:
            self.capacities += [replace(capacity, adapted=True) for capacity in self.capacities]
        self._spare_R3 = np.array([(0, state.scratch, 0)] * most_rows)
        """Rows of `sampling_section` that are padding."""
        build = model.build
        self._inputs = {
            width: SampleInputs.empty(most_rows, width, build.spec.hidden, build.dtype, state.device)
            for width in self.widths
        }
        self._forward: list[ForwardGraph] = []
        """Smallest first, within decode steps of a width and mixed steps each, with adapters and without."""
        self._draws: dict[tuple[int, int, bool, bool], tuple[Replay, Sampled]] = {}
        """By width, rows and kind."""

    def _mixed(self, tokens: int) -> Capacity:
        """Each row to spare costs a little in every layer, so there are no more than so many tokens are likely to have;
        a larger graph serves those with more, and the largest as many decode rows as there can be."""
        most = self.sizes[-1]
        likely = tokens if tokens == self._most_tokens else tokens // 2
        decodes, chunks = min(most, likely), min(most, max(4, tokens // 32))
        return Capacity(tokens, decodes, chunks, self._size(min(most, decodes + chunks)), self.widths[-1])

    def _size(self, rows: int) -> int:
        return next(size for size in self.sizes if size >= rows)

    def width(self, rows: Rows) -> int:
        """W of a step that verifies as many drafts."""
        return next(width for width in self.widths if width >= rows.width)

    @torch.inference_mode()
    def capture(self, record: Record, progress: Progress) -> None:
        """Largest first, so that the smaller ones reuse its memory."""
        ordered = sorted(self.capacities, key=lambda capacity: -capacity.tokens)
        drawn = [(width, size) for width in reversed(self.widths) for size in reversed(self.sizes)]
        share = 1 / (len(ordered) + len(drawn))
        for done, capacity in enumerate(ordered):
            progress("capture graphs", done * share)
            input_N = self._padding(capacity)
            replay, (tokens, hidden) = record(partial(self._run, capacity, input_N))
            self._forward.insert(0, ForwardGraph(capacity, input_N, replay, tokens, hidden))
        for done, (width, size) in enumerate(drawn, len(ordered)):
            progress("capture graphs", done * share)
            for kind in DRAWS:
                self._draws[width, size, *kind] = record(partial(self._draw, width, size, *kind))

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run what `capture` records. Sizes that are powers of two first: most kernels differ from one to the next, and
        those in between are then run while these compile."""

        def between(size: int) -> bool:
            return size.bit_count() > 1

        for capacity in sorted(self.capacities, key=lambda c: between(c.tokens if c.chunks else c.decodes)):
            self._run(capacity, self._padding(capacity))
        for size in sorted(self.sizes, key=between):
            for width in self.widths:
                for kind in DRAWS:
                    self._draw(width, size, *kind)

    # Layers.

    def _padding(self, capacity: Capacity) -> torch.Tensor:
        """The input of a step without rows."""
        scratch = self.state.scratch
        rows = [scratch] * capacity.rows + [0] * (capacity.rows + 1) + [scratch, 0] * capacity.chunks
        samples = [0, scratch, 0] * capacity.samples
        return torch.tensor(rows[: capacity.layout] + samples, device=self.state.device)

    def _run(self, capacity: Capacity, input_N: torch.Tensor) -> tuple[TokenLayout, Hidden]:
        state, rows = self.state, capacity.rows
        samples_R3 = input_N[capacity.layout :].view(-1, 3)
        if capacity.chunks:
            slots_B, row_start_B1, chunks_N = input_N[: capacity.layout].split((rows, rows + 1, 2 * capacity.chunks))
            row_start_B1 = row_start_B1.int()
        else:
            slots_B = samples_R3[:, 1].contiguous()
            row_start_B1 = torch.arange(rows + 1, dtype=torch.int32, device=state.device) * capacity.width
        counts = (capacity.width,) * capacity.decodes + (capacity.tokens,) * capacity.chunks
        host = HostBounds(counts, (self.max_len,) * rows, capacity.decodes)
        tokens, attn = lay_out(slots_B, row_start_B1, capacity.tokens, host, state, self.groups, self.attention)
        ctx = ForwardContext(tokens.positions_T, attn)
        with adapting(self._adapters if capacity.adapted else None, state.adapter_S, tokens.slots_T):
            hidden = self.model.forward(self.model.embed(tokens.ids_T), ctx, self.taps)
        if capacity.chunks:
            advance_chunks(chunks_N, state)
        inputs = self._inputs[capacity.width].first(capacity.samples)
        gather_samples(hidden.states, tokens.positions_T, samples_R3, inputs)
        return tokens, hidden

    def pick(self, rows: Rows, adapted: bool = False) -> ForwardGraph | None:
        """The smallest that serves such a step; `adapted`: some row has an adapter."""
        decodes, moved = rows.decodes, len(rows) - len(rows.sampled)
        chunks = max(len(rows) - decodes, moved)
        tokens, width = (sum(rows.counts), self.widths[-1]) if chunks else (0, self.width(rows))
        if sum(map(mul, rows.counts[decodes:], rows.bounds[decodes:])) > MOST_PAIRS:
            return None
        for graph in self._forward:
            capacity = graph.capacity
            if (
                capacity.adapted is adapted
                and bool(capacity.chunks) is bool(chunks)
                and capacity.width == width
                and tokens <= capacity.tokens
                and decodes <= capacity.decodes
                and chunks <= capacity.chunks
            ):
                return graph
        return None

    def starts(self, graph: ForwardGraph, rows: Rows) -> Seq[int]:
        """Index of each row's first token."""
        # In decode steps rows with fewer drafts than W - 1 feed padding.
        width = graph.capacity.width
        return rows.starts if graph.capacity.chunks else range(0, len(rows) * width, width)

    def section(self, graph: ForwardGraph, rows: Rows, starts: Seq[int]) -> Section:
        """The graph's input, to be sent with the plan."""
        capacity, scratch = graph.capacity, self.state.scratch
        if not capacity.chunks:
            return self.samples(rows, starts)
        slots, decodes, moved = rows.slots, rows.decodes, chunk_section(rows)
        spare, idle = capacity.decodes - decodes, capacity.chunks - (len(rows) - decodes)
        return [
            *(*slots[:decodes], *[scratch] * spare, *slots[decodes:], *[scratch] * idle),
            *(*starts[:decodes], *[starts[decodes]] * spare, *starts[decodes:], *[starts[-1]] * idle),
            *(*moved, *[scratch, 0] * (capacity.chunks - len(moved) // 2)),
            *self.samples(rows, starts),
        ]

    def samples(self, rows: Rows, starts: Seq[int]) -> NDArray[np.int64]:
        """`sampling_section`, with as many spare rows as a graph has that draws."""
        sampled = len(rows.sampled)
        spare = self._size(sampled) - sampled if sampled else 0
        return np.concatenate((sampling_section(rows, starts), self._spare_R3[:spare])).reshape(-1)

    def forward(self, graph: ForwardGraph, rows: Rows, section: torch.Tensor) -> tuple[Batch, Hidden]:
        """The outputs stay valid until the next run."""
        graph.input_N[: len(section)].copy_(section)
        graph.replay()
        return Batch(rows, graph.tokens, {}), graph.hidden

    # Drawing.

    def gather(self, step: Batch, hidden: Hidden, section: torch.Tensor) -> None:
        """After layers that ran without a graph, or with a wider one: what `draw` reads, for `samples`."""
        samples_R3 = section.view(-1, 3)
        inputs = self._inputs[self.width(step.rows)].first(len(samples_R3))
        gather_samples(hidden.states, step.tokens.positions_T, samples_R3, inputs)

    def draw(self, width: int, rows: int, random: bool, filtered: bool) -> Sampled:
        """For rows that are all `plain` (SlotInfo), of which some are random, and some filtered."""
        replay, out = self._draws[width, self._size(rows), random, filtered]
        replay()
        return Sampled(out.tokens_RW[:rows], out.accepted_R[:rows], out.slots_R[:rows], out.lengths_R[:rows])

    def _draw(self, width: int, rows: int, random: bool, filtered: bool) -> Sampled:
        state, at = self.state, self._inputs[width].first(rows)
        params = SampleParams.of(state, at.slots_N, random=random, filtered=filtered)
        if filtered:
            drawn_N = sample(self.model.logits(at.states_NC), at.position_N, params)
        else:
            drawn_N = sample_over_ranks(self.model, at.states_NC, at.position_N, params)
        tokens_RW = drawn_N.view(rows, width)
        lengths = state.tokens_SL, state.computed_S, state.drafts_S
        accepted = accept(tokens_RW, at.slots_R, at.base_R, at.limit_R, *lengths)
        return Sampled(tokens_RW, accepted.accepted_R, at.slots_R, accepted.lengths_R)
