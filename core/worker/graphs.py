"""Steps as CUDA graphs. There are three kinds: the layers of decode steps, one graph per number of rows; the layers of
mixed steps, which also feed prompts, one per number of tokens; and drawing, one per entry of DRAWS and number of
rows that sample, after any layers. With adapters, layers have a second set of graphs for steps in which some row has an
adapter, so that other steps do not pay for adapters. With drafts, decode steps and drawing have two more sets: for
steps in which each row verifies all drafts, one graph per number of rows, and for steps whose rows verify unlike
numbers of drafts, one per number of tokens. The former begin with the drafter's work, for all drafts; before other
steps it is a graph by itself, one per number of decode rows and of drafts. If the drafter has pages of its own, mixed
steps have a second set, for prompts that it does not follow.

The rows are the only input of a replay. A graph reads the rest (lengths, tokens, page tables) from the device state.
Unused capacity is padding: rows of the scratch slot, which is never written, rows without tokens, and tokens without a
row.

R rows that sample, W tokens of a decode row: 1, or 1 + the lookahead of the drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
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
    LogitsContext,
    LogitsProcessor,
    Model,
    Progress,
    StepShape,
)
from dovetail.core.interfaces.records import MOST_LOGPROBS
from dovetail.core.ops.logprobs import best_logprobs
from dovetail.core.ops.samples import SampleInputs, gather_samples, take_tokens
from dovetail.core.ops.step import TokenLayout
from dovetail.core.worker.batch import Batch, Rows, adapting, lay_out
from dovetail.core.worker.device_state import DeviceState
from dovetail.core.worker.drafts import Drafts
from dovetail.core.worker.graph_sizes import Capacity, DrawSize, PairLimit, batch_sizes, ragged_sizes, token_sizes
from dovetail.core.worker.row_sections import (
    GraphSections,
    advance_chunks,
    draft_padding,
    pack_samples,
    sample_padding,
    view_samples,
)
from dovetail.core.worker.sampler import SampleParams, sample, sample_over_ranks
from dovetail.core.worker.sampling import SampledRows, apply_all, process, sampled_rows, token_logprobs
from dovetail.core.worker.simulated_acceptance import simulate
from dovetail.core.worker.slots import DRAWS, Draw
from dovetail.core.worker.verification import process_trees, verify_draws

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dovetail.core.worker.upload import Section

Replay = Callable[[], None]
Record = Callable[[Callable[[], Any]], tuple[Replay, Any]]
"""Runs a call. Returns a function that repeats it, and its output tensors, which each repetition overwrites."""


class Recorder:
    """Records CUDA graphs in one memory pool; `torch.cuda.graph` would first return free memory to the driver."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stream.wait_stream(torch.cuda.current_stream())

    def __call__(self, call: Callable[[], Any]) -> tuple[Replay, Any]:
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        with torch.cuda.stream(self._stream):
            call()  # Compiles kernels, which is impossible during capture.
            graph.capture_begin(pool=self._pool)
            try:
                outputs = call()
            finally:
                graph.capture_end()
        return graph.replay, outputs

    def close(self) -> None:
        """End recording; replays may begin."""
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def forget(self) -> None:
        """Release every graph, even if still referenced: NCCL shuts down only after all graphs that call it."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


_ANY_MODEL = PairLimit()


@dataclass(slots=True)
class ForwardGraph:
    """Graph of the layers, for steps of one kind."""

    capacity: Capacity
    sections: GraphSections
    """Layout of input_N."""
    input_N: torch.Tensor
    """int64"""
    padding_N: torch.Tensor
    """Input of a step that has padding only."""
    replay: Replay
    tokens: TokenLayout
    hidden: Hidden


class StepGraphs:
    def __init__(
        self,
        model: Model,
        state: DeviceState,
        groups: Seq[KVGroup],
        attention: AttentionBackend,
        drafts: Drafts,
        *,
        most_rows: int,
        most_tokens: int,
        max_len: int,
        adapters: Adapters | None = None,
        processors: Seq[LogitsProcessor] = (),
        skips: bool = False,
        too_many_pairs: PairLimit = _ANY_MODEL,
    ) -> None:
        """`most_tokens`: tokens of the largest mixed step that gets a graph; 0 = none does. `processors`: those that
        draws apply, in this order. `skips`: whether there may be prompts that the drafter does not follow."""
        self.model, self.state, self.groups, self.attention = model, state, groups, attention
        self.drafts, self.max_len = drafts, max_len
        self.widths = (1, 1 + drafts.lookahead) if drafts.lookahead else (1,)
        self.sizes, self._most_tokens = batch_sizes(most_rows), most_tokens
        self._too_many_pairs = too_many_pairs
        # Of graphs with equally many tokens, those of ragged rows are picked last.
        self.capacities = [self._ragged(tokens) for tokens in self._ragged_sizes]
        self.capacities += [Capacity(size * w, size, 0, size, w) for w in self.widths for size in self.sizes]
        mixed = [self._mixed(tokens) for tokens in token_sizes(most_tokens)]
        self._skips = skips and bool(drafts.groups)
        self.capacities += mixed
        self.capacities += [replace(capacity, follows=False) for capacity in mixed if self._skips]
        self._adapters, self._processors = adapters, processors
        self.draws = [draw for draw in DRAWS if processors or Draw.PROCESSED not in draw]
        if adapters is not None:
            self.capacities += [replace(capacity, adapted=True) for capacity in self.capacities]
        self._padding_R3 = sample_padding(most_rows, state.scratch)
        build = model.build
        self.inputs = {  # By width.
            width: SampleInputs.empty(most_rows, width, build.spec.hidden, build.dtype, state.device)
            for width in self.widths
        }
        self._ragged_inputs: SampleInputs | None = None
        if self._ragged_sizes:
            most = self._ragged(self._ragged_sizes[-1])
            self._ragged_inputs = SampleInputs.empty_ragged(
                most.tokens, most.samples, most.width, build.spec.hidden, build.dtype, state.device
            )
        self.draw_sizes = [DrawSize(width, size) for width in self.widths for size in self.sizes]
        self.draw_sizes += [self._drawn(self._ragged(tokens)) for tokens in self._ragged_sizes]
        self._forward: list[ForwardGraph] = []
        """Smallest first."""
        self._draws: dict[tuple[DrawSize, Draw], tuple[Replay, SampledRows]] = {}
        self._drafting: dict[tuple[int, int], tuple[Replay, torch.Tensor]] = {}
        """Drafting before steps whose graph does not draft, and its draft rows, by numbers of rows and of drafts."""

    def _mixed(self, tokens: int) -> Capacity:
        """Return the capacity of a mixed step. Padding rows cost a little in every layer, so a graph has only the rows
        that its size is likely to need; larger graphs serve more rows, the largest any number of decode rows."""
        most = self.sizes[-1]
        likely = tokens if tokens == self._most_tokens else tokens // 2
        decodes, chunks = min(most, likely), min(most, max(4, tokens // 32))
        return Capacity(tokens, decodes, chunks, self._size(min(most, decodes + chunks)), self.widths[-1])

    @property
    def _ragged_sizes(self) -> Seq[int]:
        """Backends that serve no mixed steps need rows of equal lengths."""
        few = self.drafts.makes_fewer
        return ragged_sizes(self.sizes[-1], self.drafts.lookahead, few=few) if self._most_tokens else ()

    def _ragged(self, tokens: int) -> Capacity:
        rows = min(self.sizes[-1], tokens * 2 // 3)
        return Capacity(tokens, rows, 0, rows, self.widths[-1], ragged=True)

    @staticmethod
    def _drawn(ragged: Capacity) -> DrawSize:
        return DrawSize(ragged.width, ragged.samples, ragged.tokens)

    def _size(self, rows: int) -> int:
        return next(size for size in self.sizes if size >= rows)

    def width(self, rows: Rows) -> int:
        """Return W of the graphs that serve these rows' drafts."""
        return self._width(rows.width)

    def _width(self, least: int) -> int:
        return next(width for width in self.widths if width >= least)

    @torch.inference_mode()
    def capture(self, record: Record, progress: Progress) -> None:
        """Record all graphs, the largest first, so that smaller ones reuse its memory."""
        ordered = sorted(self.capacities, key=lambda capacity: -capacity.tokens)
        drawn = sorted(self.draw_sizes, key=lambda size: -(size.tokens or size.rows * size.width))
        share = 1 / (len(ordered) + len(drawn))
        for rows in reversed(self._draft_sizes):
            draft_rows_2D = draft_padding(rows, self.state.scratch, self.state.device).view(2, -1)
            for count in reversed(self.drafts.counts):
                replay, _ = record(partial(self._draft, draft_rows_2D, count))
                self._drafting[rows, count] = replay, draft_rows_2D
        for done, capacity in enumerate(ordered):
            progress("capture graphs", done * share)
            sections, input_N = capacity.sections, self._padding(capacity)
            replay, (tokens, hidden) = record(partial(self._run, capacity, input_N))
            self._forward.insert(0, ForwardGraph(capacity, sections, input_N, input_N.clone(), replay, tokens, hidden))
        for done, size in enumerate(drawn, len(ordered)):
            progress("capture graphs", done * share)
            for draw in self.draws:
                self._draws[size, draw] = record(partial(self.launch_draw, size, draw))

    @torch.inference_mode()
    def capture_smallest(self, record: Record) -> None:
        """Record the layers of the smallest step of each kind, and drop them."""
        for chunks in (False, True):
            found = [capacity for capacity in self.capacities if bool(capacity.chunks) is chunks]
            if found:
                smallest = min(found, key=lambda capacity: capacity.tokens)
                record(partial(self._run, smallest, self._padding(smallest)))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run what `capture` records. Draws come first, since they launch little and compile long. Then come sizes that
        are powers of two: most kernels differ from one of them to the next, and the sizes in between then run while
        these compile."""

        def between(size: int) -> bool:
            return size.bit_count() > 1

        for size in sorted(self.draw_sizes, key=lambda size: between(size.tokens or size.rows)):
            for draw in self.draws:
                self.launch_draw(size, draw)
        for rows in self._draft_sizes:
            for count in self.drafts.counts:
                self._draft(draft_padding(rows, self.state.scratch, self.state.device).view(2, -1), count)
        for capacity in sorted(self.capacities, key=lambda c: between(c.tokens if c.chunks or c.ragged else c.decodes)):
            self._run(capacity, self._padding(capacity))

    def _padding(self, capacity: Capacity) -> torch.Tensor:
        """Return the input of a step that has padding only."""
        return capacity.sections.padding(self.state.scratch, self.state.device)

    @property
    def _draft_sizes(self) -> Seq[int]:
        """Numbers of decode rows for which drafting before a mixed step has a graph."""
        return self.sizes if self.drafts.on_device and self._most_tokens else ()

    def _draft(self, draft_rows_2D: torch.Tensor, count: int) -> None:
        slots_D, most_D = draft_rows_2D.unbind(0)
        self.drafts.propose(slots_D, most_D, count, bound=self.max_len)

    def draft_size(self, decodes: int) -> int:
        """Return the number of draft rows of a step whose graph does not draft, padding included."""
        return self._size(decodes)

    def draft(self, draft_rows_N: torch.Tensor, most: int) -> None:
        """Draft before a step whose graph does not. `draft_rows_N`: `draft_size` rows, as
        row_sections.pack_draft_rows packs them. `most`: most drafts of a row."""
        replay, draft_rows_2D = self._drafting[len(draft_rows_N) // 2, self.drafts.count(most)]
        draft_rows_2D.copy_(draft_rows_N.view(2, -1))
        replay()

    def _run(self, capacity: Capacity, input_N: torch.Tensor) -> tuple[TokenLayout, Hidden]:
        state, rows = self.state, capacity.rows
        slots_B, row_start_B1, chunks_N, samples_R3 = capacity.sections.unpack(input_N, capacity.width)
        if self.drafts.on_device and capacity.drafts:
            most_B = samples_R3[:, 2].contiguous()
            self.drafts.propose(slots_B, most_B, capacity.width - 1, bound=self.max_len, adapted=capacity.adapted)
        counts = (capacity.width,) * capacity.decodes + (capacity.tokens,) * capacity.chunks
        host = HostBounds(counts, (self.max_len,) * rows, capacity.decodes)
        groups = self.drafts.groups_to_lay_out(self.groups, follow=capacity.follow)
        tokens, attn = lay_out(slots_B, row_start_B1, capacity.tokens, host, state, groups, self.attention)
        ctx = ForwardContext(tokens.positions_T, attn, tokens.live_T)
        with adapting(self._adapters if capacity.adapted else None, state.adapter_S, tokens.slots_T):
            hidden = self.model.forward(self.model.embed(tokens.ids_T), ctx, self.drafts.taps)
        observed = slots_B, row_start_B1, capacity.decodes, tokens, attn, hidden
        self.drafts.observe(*observed, follow=capacity.follow)
        if chunks_N is not None:
            advance_chunks(chunks_N, state.computed_S)
        if capacity.ragged:
            # All tokens are sampled, so they need no gathering.
            inputs = self._inputs(self._drawn(capacity))
            take_tokens(hidden.states, tokens.positions_T, tokens.slots_T, samples_R3, inputs)
        else:
            inputs = self._inputs(DrawSize(capacity.width, capacity.samples))
            gather_samples(hidden.states, tokens.positions_T, samples_R3, inputs)
        return tokens, hidden

    def _inputs(self, size: DrawSize) -> SampleInputs:
        """Return the inputs of a graph that draws."""
        if size.tokens:
            assert self._ragged_inputs is not None
            return self._ragged_inputs.first(size.rows, size.tokens)
        return self.inputs[size.width].first(size.rows)

    def pick(
        self, shape: StepShape, adapted: bool = False, *, drafts: bool = True, follows: bool = True
    ) -> ForwardGraph | None:
        """Return the smallest graph that serves a step, if any. `adapted`: some row has an adapter. `drafts`: whether
        the graph may begin with the drafter's work. `follows`: StepPlan.follows."""
        tokens, decodes, chunks = shape.tokens, shape.decodes, shape.chunks
        if self._too_many_pairs(shape):
            return None
        width = self.widths[-1] if chunks else self._width(shape.width)
        follows |= not chunks or not self._skips
        fewer = width > 1 and self.drafts.makes_fewer and self.drafts.count(shape.width - 1) < width - 1
        found = None
        for graph in self._forward:
            capacity = graph.capacity
            if (
                capacity.adapted is adapted
                and capacity.follows is follows
                and (drafts or not capacity.drafts)
                and bool(capacity.chunks) is bool(chunks)
                and capacity.width == width
                and tokens <= capacity.tokens
                and decodes <= capacity.decodes
                and chunks <= capacity.chunks
            ):
                if not (fewer and capacity.drafts):
                    return graph
                # It begins with more passes of the drafter than the step needs: the last resort.
                found = found or graph
        return found

    def starts(self, graph: ForwardGraph, rows: Rows) -> Seq[int]:
        """Return the index of each row's first token."""
        capacity = graph.capacity
        if capacity.chunks or capacity.ragged:
            return rows.starts
        # Rows with fewer drafts than W - 1 feed padding.
        return range(0, len(rows) * capacity.width, capacity.width)

    def section(self, graph: ForwardGraph, rows: Rows, starts: Seq[int]) -> Section:
        """Pack the graph's input."""
        return graph.sections.pack(rows, starts, self.samples(rows, starts, graph), self.state.scratch)

    def samples(self, rows: Rows, starts: Seq[int], graph: ForwardGraph | None = None) -> NDArray[np.int64]:
        """Pack the sample rows, flat, with padding up to the size of the graph that draws. `graph`: that of the layers;
        None = they run without one."""
        sampled, size = len(rows.sampled), self.draw_size(rows, graph).rows
        if graph is not None and not (graph.capacity.chunks or graph.capacity.ragged):
            # These are all rows of the graph, which may have more than this lane needs.
            size = graph.capacity.samples
        padding = size - sampled if sampled else 0
        return np.concatenate((pack_samples(rows, starts), self._padding_R3[:padding])).reshape(-1)

    def forward(self, graph: ForwardGraph, rows: Rows, section: torch.Tensor) -> tuple[Batch, Hidden]:
        """Run the layers. The outputs stay valid until the next run."""
        graph.input_N[: len(section)].copy_(section)
        graph.replay()
        return Batch(rows, graph.tokens, {}), graph.hidden

    def forward_padding(self, graph: ForwardGraph) -> None:
        """Run the layers for a lane without rows."""
        graph.input_N.copy_(graph.padding_N)
        graph.replay()

    def gather(self, step: Batch, hidden: Hidden, section: torch.Tensor) -> None:
        """Write `draw`'s inputs after layers with no graph or a wider one. `section`: as `samples` packs it."""
        samples_R3 = view_samples(section)
        inputs = self.inputs[self.width(step.rows)].first(len(samples_R3))
        gather_samples(hidden.states, step.tokens.positions_T, samples_R3, inputs)

    def draw_size(self, rows: Rows, graph: ForwardGraph | None) -> DrawSize:
        """Return the size of the graph that draws for these rows. `graph`: that of the layers; None = none."""
        if graph is not None and graph.capacity.ragged:
            return self._drawn(graph.capacity)
        return DrawSize(self.width(rows), self._size(len(rows.sampled)))

    def draw(self, size: DrawSize, rows: int, draw: Draw, logprobs: int | None) -> SampledRows:
        """Draw and verify for `rows` rows that `draw` serves. `logprobs`: number of most likely tokens that some row
        reports; None = no row reports log-probabilities."""
        replay, out = self._draws[size, draw]
        replay()
        found = None
        if out.logprobs is not None and logprobs is not None:
            chosen_RW, values_RWn, ids_RWn = (values[:rows] for values in out.logprobs)
            found = chosen_RW, values_RWn[..., : max(logprobs, 1)], ids_RWn[..., : max(logprobs, 1)]
        return SampledRows(
            out.tokens_RW[:rows],
            out.accepted_R[:rows],
            out.slots_R[:rows],
            out.lengths_R[:rows],
            out.drafted_R[:rows],
            found,
        )

    def launch_draw(self, size: DrawSize, draw: Draw) -> SampledRows:
        """Launch what `draw` replays, for the first rows of the inputs."""
        state, at, top = self.state, self._inputs(size), None
        params = SampleParams.of(state, at.slots_N, random=Draw.RANDOM in draw, filtered=Draw.FILTERED in draw)
        if Draw.FILTERED not in draw:
            drawn_N = sample_over_ranks(self.model, at.states_NC, at.position_N, params)
        else:
            raw_NV = logits_NV = self.model.logits(at.states_NC)
            if Draw.LOGPROBS in draw:
                top = best_logprobs(raw_NV, min(MOST_LOGPROBS, raw_NV.shape[1]), state.logprobs_S[at.slots_N])
            if Draw.PROCESSED in draw:
                logits_NV = self._process(raw_NV, at)
            drawn_N = sample(logits_NV, at.position_N, params)
        tokens_RW = simulate(at.by_row(drawn_N), at.slots_R, at.base_R, state, self.drafts.vocab)
        verified = verify_draws(tokens_RW, at, state, self.drafts.keep)
        logprobs = None
        if top is not None:
            by_row = (at.by_row(values_N) for values_N in token_logprobs(raw_NV, drawn_N, top))
            chosen, values, ids = map(verified.along, by_row)
            logprobs = chosen, values, ids
        return sampled_rows(verified, at.slots_R, logprobs)

    def _process(self, raw_NV: torch.Tensor, at: SampleInputs) -> torch.Tensor:
        """Return what the logits processors make of a copy of the logits."""
        state, longest = self.state, self.state.tokens_SL.shape[1]
        if len(at.slots_N) == len(at.slots_R) or state.trees is None:
            ctx = LogitsContext(at.slots_N, at.position_N, state.tokens_SL, state.prompt_len_S, longest)
            return process(raw_NV, self._processors, ctx, keep=True)
        token_RW = at.by_row(torch.arange(len(raw_NV), device=state.device))
        apply = partial(apply_all, self._processors)
        return process_trees(raw_NV, token_RW, at.position_N, at, state, longest, apply)
