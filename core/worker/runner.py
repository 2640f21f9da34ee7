"""One rank: holds model, KV pools and device state, and runs plans in order. A step has two halves: forward applies the
plan, drafts and runs the layers; sampling draws, verifies and moves lengths. Late inputs may arrive between them, and
each half can be captured separately. Neither waits for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from dovetail.core.interfaces import (
    Blobs,
    CatchUp,
    ForwardContext,
    Hidden,
    LateInputs,
    Row,
    StepPlan,
    StepResult,
    StepShape,
)
from dovetail.core.interfaces.rows import shard_rows
from dovetail.core.memory.pools import apply_page_ops, make_pools
from dovetail.core.worker.adapter_reader import AdapterReader
from dovetail.core.worker.batch import Batch, Rows, adapting, build_batch
from dovetail.core.worker.device_state import DeviceState
from dovetail.core.worker.draft_copies import DraftCopies
from dovetail.core.worker.drafts import Drafts
from dovetail.core.worker.graph_sizes import PairLimit
from dovetail.core.worker.graphs import ForwardGraph, StepGraphs
from dovetail.core.worker.rank_parts import RankParts
from dovetail.core.worker.result_copies import Mark, ResultCopies, pooled_states, prompt_logprobs
from dovetail.core.worker.row_sections import (
    StepSections,
    advance_chunks,
    draft_padding,
    pack_catch_up,
    pack_draft_rows,
    pack_host_drafts,
    pack_joins,
    pack_samples,
    unpack_samples,
)
from dovetail.core.worker.sampling import SampledRows, sample_step, upload_masks
from dovetail.core.worker.slots import SlotInfo, Slots


@dataclass(slots=True)
class _ForwardedStep:
    """A step between its two halves."""

    began: Mark
    batch: Batch
    hidden: Hidden
    starts: Seq[int]
    """Index of each row's first token."""
    samples_N: torch.Tensor
    """Sample rows on the device; padding rows may follow."""
    graph: ForwardGraph | None
    drafted: Mark | None = None
    """End of the drafter's work before the layers, unless it is in the graph."""


class Runner:
    """A rank that is ready to run plans."""

    def __init__(
        self, parts: RankParts, num_pages: Mapping[int, int], capture: Callable[[StepGraphs], None] | None = None
    ) -> None:
        """Allocate slot state and KV pools of `num_pages[group]` pages. `capture` fills graphs; None = no graphs."""
        engine, device = parts.engine, parts.connection.device
        self.parts = parts
        self._thread = 0
        """The thread for which this rank's device is current."""
        self._use_device()
        self._waiting: tuple[StepPlan, _ForwardedStep] | None = None
        """The latest plan, while its late inputs are missing."""
        self._drafted: DraftCopies | None = None
        """Drafts of that plan's rows with late inputs, on rank 0."""
        self._reader = AdapterReader()
        self.slots = Slots(name for name, processor in parts.processors.items() if not processor.graph_safe)
        self.pools = make_pools(parts.groups, num_pages, device)
        parts.attention.bind(self.pools)
        self.state = DeviceState(
            slots=engine.max_seqs,
            max_len=parts.max_len,
            lookahead=parts.drafter.lookahead,
            groups=parts.groups,
            device=device,
            seed=engine.seed,
            draft_probs=parts.model.build.spec.vocab if parts.drafter.verify == "rejection" else 0,
            draft_depth=parts.drafter.depth,
            simulated_rates=parts.drafter.simulated_rates,
        )
        self.drafts = Drafts(
            parts.drafter,
            self.state,
            parts.attention,
            parts.model.build.spec.vocab,
            parts.model.kv_groups,
            parts.adapters,
            parts.connection.collective,
        )
        self.results = ResultCopies(device)
        self._set_lane_tokens(None)
        self.graphs: StepGraphs | None = None
        if capture is not None:
            self.graphs = make_graphs(parts, self.state, self.drafts)
            capture(self.graphs)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        """Enqueue a plan. If the plan has late inputs, only its forward half is enqueued; `complete` must follow. On
        CUDA this returns while the device still runs earlier plans."""
        self._use_device()
        if self.parts.balancer is not None and (plan.rows or plan.shape is not None):
            self.parts.balancer.before_step()
        if not plan.rows:
            self._serve_experts(plan)
            return
        step = self._forward(plan, blobs)
        if plan.late:
            self._waiting = plan, step
        else:
            self._finish(plan, step)

    @torch.inference_mode()
    def complete(self, late: LateInputs) -> None:
        """Enqueue the sampling half of the latest plan."""
        assert self._waiting is not None, f"step {late.step} does not wait for late inputs"
        self._use_device()
        (plan, step), self._waiting = self._waiting, None
        self._finish(plan, step, late)

    def drafted(self) -> Mapping[int, tuple[int, ...]]:
        """Return the drafts of the latest plan's rows with late inputs, by index of the row. Waits for the drafter, not
        for the layers. For rank 0."""
        return {} if self._drafted is None else self._drafted.read()

    def collect(self) -> StepResult:
        """Return the result of the oldest plan. Waits for its copy, not for later plans. For rank 0."""
        return self.results.collect()

    def _use_device(self) -> None:
        """Make this rank's device current in the calling thread: torch keeps the current device per thread."""
        device = self.parts.connection.device
        if device.type == "cuda" and self._thread != threading.get_ident():
            torch.cuda.set_device(device)
            self._thread = threading.get_ident()

    # The forward half.

    def _forward(self, plan: StepPlan, blobs: Blobs) -> _ForwardedStep:
        """Apply the plan's changes and run the layers. Everything that the host sends goes in one copy."""
        parts, state, rows = self.parts, self.state, Rows(plan.rows)
        joined = self._join(plan, blobs)
        graphs = self.graphs
        adapted = not self.slots.adapted.isdisjoint(rows.slots)
        guided = plan.late and rows.width > 1
        follows = plan.follows if plan.shape is None else bool(plan.shape.follows)
        shape = plan.shape or rows.shape
        graph = self._pick(shape, adapted, guided, follows)
        # Bounds of the drafter's work: all lanes' where they draft together.
        drafting = shape if plan.shape is None or parts.drafts_together else rows.shape
        if graph is not None:
            starts = graphs.starts(graph, rows)
            sections = [graphs.section(graph, rows, starts)]
        else:
            starts = rows.starts
            samples = pack_samples(rows, starts).reshape(-1) if graphs is None else graphs.samples(rows, starts)
            sections = StepSections.pack(rows, starts, samples)
        drafts = self._drafts_before(graph, drafting)
        if drafts:
            sections.append(pack_draft_rows(rows, self._draft_size(graph, drafting), state.scratch))
        if joins := bool(plan.joins) and self.drafts.on_device:
            sections.append(pack_joins(plan.joins))
        if plan.catch_up:
            sections.append(pack_catch_up(plan.catch_up))
        if plan.drafts:
            sections.append(pack_host_drafts(plan.drafts, self.drafts.lookahead))
        began = self.results.clock.mark()
        sent = state.apply(plan, joined, sections)
        for join, info in zip(plan.joins, joined, strict=True):
            if info.affected:
                for name, processor in parts.processors.items():
                    if name in info.affected:
                        processor.join(join.slot, info.blob.request)
        apply_page_ops(self.pools, plan.ops, parts.host_pools)
        host_drafts = sent.pop() if plan.drafts else None
        chunks_N = sent.pop() if plan.catch_up else None
        if joins:
            self.drafts.join(sent.pop())
        if chunks_N is not None or (parts.drafts_together and shape.caught_up):
            self._catch_up(plan.catch_up, chunks_N, shape)
        if drafts:
            self._draft(rows, sent.pop(), drafting.width - 1, captured=graph is not None)
        if host_drafts is not None:
            self.drafts.take_host(host_drafts)
        drafted = self.results.clock.mark() if drafts or plan.catch_up else None
        self._drafted = DraftCopies.of(rows, state) if guided and parts.connection.rank == 0 else None
        self._pad_lanes(shape, graph)
        if graph is not None:
            batch, hidden = graphs.forward(graph, rows, sent[0])
            return _ForwardedStep(
                began, batch, hidden, starts, sent[0][graph.sections.before_samples :], graph, drafted
            )
        step = StepSections(*sent)
        follow = follows and drafting.chunks > 0
        groups = self.drafts.groups_to_lay_out(parts.groups, follow=follow)
        batch = build_batch(
            rows, step.slots_B, step.row_start_B1, state, groups, parts.attention, self.drafts.lookahead
        )
        ctx = ForwardContext(batch.tokens.positions_T, batch.attn, batch.tokens.live_T)
        with adapting(parts.adapters if adapted else None, state.adapter_S, batch.tokens.slots_T):
            layers = parts.overlapped or parts.model.forward
            hidden = layers(parts.model.embed(batch.tokens.ids_T), ctx, parts.drafter.taps)
        observed = step.slots_B, step.row_start_B1.int(), rows.decodes, batch.tokens, batch.attn, hidden
        self.drafts.observe(*observed, follow=follow)
        advance_chunks(step.chunks_N, state.computed_S)
        return _ForwardedStep(began, batch, hidden, starts, step.samples_N, None, drafted)

    def _pick(
        self, shape: StepShape, adapted: bool = False, guided: bool = False, follows: bool = True
    ) -> ForwardGraph | None:
        """Return the graph that runs the layers, if any: on all lanes alike."""
        # The host reads drafts of rows with masks before the layers end, so no graph may do both.
        drafts = not (guided or shape.guided)
        return None if self.graphs is None else self.graphs.pick(shape, adapted, drafts=drafts, follows=follows)

    def _pad_lanes(self, shape: StepShape, graph: ForwardGraph | None) -> None:
        """Let layers that follow get as many rows on each lane as on the one with the most."""
        # Ranks with the same graph have equally many rows.
        self._set_lane_tokens(None if graph is not None else max(shape.tokens, 1))

    def _set_lane_tokens(self, tokens: int | None) -> None:
        """Set ExpertPlacement.lane_rows if there are other lanes. `tokens`: most of any lane, None = all have as
        many."""
        if self.parts.connection.lane_ranks is not None and (placement := self.parts.model.build.placement) is not None:
            placement.lane_rows = None if tokens is None else shard_rows(tokens, self.parts.connection.size)

    def _serve_experts(self, plan: StepPlan) -> None:
        """Run the layers of a plan without rows: this lane's experts get rows of other lanes."""
        began, none = self.results.clock.mark(), Rows(())
        if (shape := plan.shape) is not None:
            graph = self._pick(shape, follows=bool(shape.follows))
            if self.parts.drafts_together:
                if shape.caught_up:
                    self._catch_up((), None, shape)
                if self._drafts_before(graph, shape):
                    padding_N = draft_padding(self._draft_size(graph, shape), self.state.scratch, self.state.device)
                    self._draft(none, padding_N, shape.width - 1, captured=graph is not None)
            self._pad_lanes(shape, graph)
            if graph is not None:
                self.graphs.forward_padding(graph)
            else:
                self._forward_padding(shape)
        if self.parts.connection.rank == 0:
            self.results.send(plan.step, began, none, {}, None, {}, None)

    def _forward_padding(self, shape: StepShape) -> None:
        """Run the layers with one token of the scratch slot."""
        parts, state = self.parts, self.state
        rows = Rows((Row(state.scratch, 0, 0, 1, 1, 0, 0),))
        slots_B = torch.full((1,), state.scratch, device=state.device)
        row_start_B1 = torch.arange(2, device=state.device)
        follow = parts.drafts_together and bool(shape.follows and shape.chunks)
        groups = self.drafts.groups_to_lay_out(parts.groups, follow=follow)
        batch = build_batch(rows, slots_B, row_start_B1, state, groups, parts.attention)
        ctx = ForwardContext(batch.tokens.positions_T, batch.attn, batch.tokens.live_T)
        hidden = parts.model.forward(parts.model.embed(batch.tokens.ids_T), ctx, parts.drafter.taps)
        if parts.drafts_together:
            observed = slots_B, row_start_B1.int(), rows.decodes, batch.tokens, batch.attn, hidden
            self.drafts.observe(*observed, follow=follow)

    # The drafter's work before the layers.

    def _drafts_before(self, graph: ForwardGraph | None, shape: StepShape) -> bool:
        """Return whether drafting precedes the layers and is not in their graph. `shape`: bounds of the drafter's
        work."""
        return self.drafts.on_device and shape.width > 1 and (graph is None or not graph.capacity.drafts)

    def _draft_size(self, graph: ForwardGraph | None, shape: StepShape) -> int:
        """Return the number of rows for which to draft, padding included."""
        return shape.decodes if graph is None else self.graphs.draft_size(shape.decodes)

    def _catch_up(self, chunks: Seq[CatchUp], chunks_N: torch.Tensor | None, shape: StepShape) -> None:
        """Let the drafter feed earlier tokens. `chunks_N`: None = no row of this lane has any."""
        if chunks_N is None:
            chunks = (CatchUp(self.state.scratch, 0, 1),)
            chunks_N = torch.zeros(3, dtype=torch.int64, device=self.state.device)
            chunks_N[0], chunks_N[2] = self.state.scratch, 1
        self._set_lane_tokens(shape.caught_up or None)
        self.drafts.catch_up(chunks, chunks_N)

    def _draft(self, rows: Rows, draft_rows_N: torch.Tensor, most: int, *, captured: bool) -> None:
        """Draft for the decode rows, of which one verifies `most` drafts."""
        if captured:
            self.graphs.draft(draft_rows_N, most)
            return
        # Padding gives every lane that drafts equally many rows.
        self._set_lane_tokens(None)
        slots_B, most_B = draft_rows_N.view(2, -1).unbind(0)
        slots, bound = rows.slots[: rows.decodes], max(rows.bounds[: rows.decodes], default=1)
        random, filtered = (not kind.isdisjoint(slots) for kind in (self.slots.random, self.slots.filtered))
        kinds = {"random": random, "filtered": filtered, "adapted": not self.slots.adapted.isdisjoint(slots)}
        # As many as graphs draft: further numbers would compile kernels while requests wait.
        self.drafts.propose(slots_B, most_B, self.drafts.count(most), bound=bound, **kinds)

    def _join(self, plan: StepPlan, blobs: Blobs) -> list[SlotInfo]:
        """Apply the plan's leaves and joins on the host. Return the record of each join."""
        state, on_device = self.state, self.drafts.on_device
        for slot in plan.leaves:
            self.slots.leave(slot)
            if self.drafts.takes_leave:
                self.drafts.drafter.leave(slot, state.tokens_SL[slot], state.computed_S[slot] + 1)
        joined = []
        for join in plan.joins:
            blob = blobs[join.uid, join.epoch]
            joined.append(self.slots.join(join.slot, blob))
            if on_device:
                self.drafts.drafter.enter(join.slot, blob.request)
            if blob.adapter >= 0 and blob.request.adapter:
                self.parts.adapters.place(blob.adapter, blob.request.adapter)
        return joined

    # The sampling half.

    def _finish(self, plan: StepPlan, step: _ForwardedStep, late: LateInputs | None = None) -> None:
        """Sample and send the results to the host."""
        # A drafter's users ask which part of a step takes how long.
        forwarded = self.results.clock.mark() if self.drafts.lookahead else None
        sampled = self._sample(step, late)
        parts, state, slots = self.parts, self.state, self.slots
        rows, states_TC, logprobs = step.batch.rows, step.hidden.states, slots.logprobs
        # At most as many rows of logits at a time as sampling had when memory was measured.
        prompt = prompt_logprobs(rows, step.starts, states_TC, state, slots, parts.model, parts.engine.max_seqs)
        if parts.connection.rank == 0:
            pooled = pooled_states(rows, step.starts, states_TC, slots)
            wanted = {}
            if not logprobs.isdisjoint(rows.sampled_slots):
                wanted = {i: slots[slot].params.logprobs for i, slot in enumerate(rows.slots) if slot in logprobs}
            marks = {"drafted": step.drafted, "forwarded": forwarded}
            loads = None if parts.balancer is None else parts.balancer.take_loads()
            self.results.send(plan.step, step.began, rows, wanted, sampled, prompt, pooled, loads=loads, **marks)

    def _sample(self, step: _ForwardedStep, late: LateInputs | None) -> SampledRows | None:
        parts, state, batch, hidden = self.parts, self.state, step.batch, step.hidden
        rows, slots = batch.rows, batch.rows.sampled_slots
        if not slots:
            return None
        graphs, draw = self.graphs, self.slots.draw(slots)
        verify = parts.drafter.verify
        by_draws = verify == "draws" or rows.width == 1 or self.slots.random.isdisjoint(slots)
        if graphs is not None and draw is not None and late is None and by_draws:
            size = graphs.draw_size(rows, step.graph)
            if step.graph is None or step.graph.capacity.width != size.width:
                graphs.gather(batch, hidden, step.samples_N)
            return graphs.draw(size, len(slots), draw, self.slots.most_logprobs(slots))
        at = unpack_samples(step.samples_N, rows, batch.tokens.positions_T)
        states = hidden.states[at.token_RW.reshape(-1)]
        masks = None if late is None else upload_masks(late, rows, state.device)
        some = self.slots, parts.processors, self.drafts.keep
        return sample_step(parts.model, states, at, batch, state, *some, masks, verify)

    # Adapters.

    def load_adapter(self, key: str, folder: str) -> Future[None]:
        """Read this rank's share of an adapter while steps go on. The future raises RequestError."""
        return self._reader.read(self.parts.adapters, key, Path(folder))

    def unload_adapter(self, key: str) -> None:
        """Forget the adapter after the plans executed so far."""
        self.parts.adapters.drop(key)

    # The end.

    def close(self) -> None:
        """Free device memory, even if something still refers to this object, and close the connection."""
        self._reader.close()
        self.release()
        self.parts.close()

    def release(self) -> None:
        """Free KV pools, slot state and graphs. The parts stay usable."""
        self._waiting = self.graphs = self.results = self.state = self.pools = None


def make_graphs(parts: RankParts, state: DeviceState, drafts: Drafts) -> StepGraphs:
    """Return the graphs of a rank, not captured yet."""
    spec = parts.model.build.spec
    return StepGraphs(
        parts.model,
        state,
        parts.groups,
        parts.attention,
        drafts,
        most_rows=parts.engine.max_seqs,
        most_tokens=parts.graph_tokens,
        max_len=parts.max_len,
        adapters=parts.adapters,
        processors=[processor for processor in parts.processors.values() if processor.graph_safe],
        skips=parts.engine.drafts == "paying",
        too_many_pairs=PairLimit(spec.mla, max(1, spec.heads // parts.engine.tp)),
    )
