"""One rank: holds model, KV pools and device state, and runs plans in order.

A step is two halves, `forward` (apply the plan, run the layers) and `sample` (draw, verify, move lengths, draft).
Between them late inputs may arrive; each half can be captured by itself. Nothing in either waits for the device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dovetail.core.checkpoint import open_weights
from dovetail.core.errors import RequestError
from dovetail.core.host import detect_host
from dovetail.core.interfaces import (
    Adapters,
    Blobs,
    BuildContext,
    DraftContext,
    ExecutorInfo,
    ForwardContext,
    Hidden,
    LateInputs,
    ModelSource,
    Progress,
    StepPlan,
    StepResult,
    TargetView,
)
from dovetail.core.memory.pools import apply_page_ops, make_host_pools, make_pools
from dovetail.core.memory.sizing import measure_pages, page_count, wanted_tokens
from dovetail.core.startup_notes import collect_notes, note
from dovetail.core.worker.batch import Batch, Rows, adapting, build_batch
from dovetail.core.worker.device_state import DeviceState, SlotInfo
from dovetail.core.worker.dtypes import resolve_device, resolve_dtype, resolve_kv_dtype
from dovetail.core.worker.graph_support import reason_against_graphs
from dovetail.core.worker.graphs import ForwardGraph, Recorder, StepGraphs
from dovetail.core.worker.result_copies import Mark, ResultCopies, pooled_states, prompt_logprobs
from dovetail.core.worker.sampler import rehearse_float32
from dovetail.core.worker.sampling import (
    Sampled,
    advance_chunks,
    chunk_section,
    locate,
    sample_step,
    sampling_section,
    upload_masks,
)
from dovetail.core.worker.two_batch_overlap import OverlappedForward, why_useless
from dovetail.core.worker.warmup import (
    compile_ahead,
    compile_workers,
    rehearsal,
    rehearsed_masks,
    rehearsed_steps,
    report_late_kernels,
)

if TYPE_CHECKING:
    from dovetail.core.compose import Composition

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Step:
    """Between the two halves."""

    began: Mark
    batch: Batch
    hidden: Hidden
    starts: Seq[int]
    """Index of each row's first token."""
    samples: torch.Tensor
    """sampling_section, on the device; a graph's spare rows may follow."""
    graph: ForwardGraph | None


class Runner:
    def __init__(self, composition: Composition, *, rank: int = 0, size: int = 1, address: str = "") -> None:
        self.composition, self.rank, self.size, self.address = composition, rank, size, address
        self.engine = composition.engine
        self._halfway: tuple[StepPlan, _Step] | None = None
        """The plan executed last, while it lacks its late inputs."""
        self._phases: dict[str, float] = {}
        self._progress: Progress = lambda phase, share: None
        self.adapters: Adapters | None = None
        """None = this engine has none."""
        self._adapted: set[int] = set()
        """Slots whose sequence has an adapter."""
        self._processed: set[tuple[str, int]] = set()
        """Logits processors, and slots whose latest join of theirs wanted them: who else joins has nothing to reset."""
        self._reading: ThreadPoolExecutor | None = None
        """Reads adapters, one after another."""
        self._overlapped: OverlappedForward | None = None
        """Runs the layers of steps without a graph; None = `Model.forward` does."""
        self.graphs: StepGraphs | None = None
        self._recorder: Recorder | None = None
        self._thread = 0
        """That has this rank's device for its own."""
        self._why_no_graphs: str | None = "not loaded yet"
        """None = steps run as graphs."""

    # Start-up.

    def load(self, progress: Progress) -> ExecutorInfo:
        """Build and fill the model, then measure how many KV pages fit beside it. `bind` must follow."""
        with collect_notes() as notes:
            return replace(self._load(progress), notes=tuple(notes))

    def _load(self, progress: Progress) -> ExecutorInfo:
        phases, self._progress = self._phases, progress

        def phase(name: str, began: float) -> float:
            now = time.perf_counter()
            phases[name] = now - began
            return now

        clock = time.perf_counter()
        engine, composition = self.engine, self.composition
        device = self.device = resolve_device(engine.device, self.rank, engine.first_gpu)
        self._use_device()
        if device.type == "cuda":
            from dovetail.core.ops.kernels.launch import keep_shared_memory

            keep_shared_memory(device)
        progress("connect ranks", None)
        self.collective = composition.build("collective")
        self.collective.connect(self.rank, self.size, self.address, device)
        clock = phase("connect ranks", clock)

        selected = composition.part("model")
        model_class = selected.target()
        spec = self.spec = model_class.spec(selected.config)
        self.dtype = resolve_dtype(engine.dtype, spec.dtype, device)
        self.max_len = spec.longest(engine.max_len)
        if engine.max_len is not None and self.max_len < engine.max_len:
            note(f"engine.max_len={engine.max_len}, and the model was made for {self.max_len}: sequences end there")
        self.attention = composition.build("attention")
        self.drafter = composition.build("spec_decode")
        quantizer, source = composition.build("quant"), model_class.source(selected.config)
        if spec.hf is not None and not source.dummy:
            quantizer.read_checkpoint(spec.hf)
        build = BuildContext(
            spec=spec,
            device=device,
            dtype=self.dtype,
            kv_dtype=resolve_kv_dtype(engine.kv_dtype, self.dtype),
            page_tokens=engine.page_size,
            max_len=self.max_len + 2 * self.drafter.lookahead + 1,
            quantizer=quantizer,
            attention=self.attention,
            collective=self.collective,
            adapters=self._build_adapters(),
        )
        progress("build model", None)
        self.model = model_class(selected.config, build)
        if self.adapters is not None:
            self.adapters.allocate()
        if engine.overlap_tokens:
            self._overlapped = OverlappedForward(
                self.model, self.attention, self.adapters, device, least=engine.overlap_tokens
            )
            if (why := why_useless(engine.overlap_tokens, engine.token_budget, self.size)) is not None:
                note(f"engine.overlap_tokens={engine.overlap_tokens} gains nothing: {why}")
        clock = phase("build model", clock)
        self._load_weights(source, progress)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        clock = phase("load weights", clock)

        self.drafter.bind(
            TargetView(spec, device, self.dtype, engine.max_seqs, self.max_len, self.model.embed, self.model.logits)
        )
        self.processors = {name: part.build() for name, part in composition.many("logits").items()}
        for processor in self.processors.values():
            processor.allocate(engine.max_seqs + 1, spec.vocab, device)
        self.groups = (*self.model.kv_groups, *self.drafter.kv_groups())
        kv_cache = self.composition.part("kv_cache")
        host_pages = kv_cache.target().host_pages(kv_cache.config, self.groups)
        self.host_pools = make_host_pools(self.groups, host_pages, device)
        why_no_graphs = reason_against_graphs(composition, spec, device, self.size)
        if device.type == "cuda":
            report_late_kernels(False)
        # Parts that can be captured take whatever the device holds; others may index by what no kernel wrote.
        if why_no_graphs is None:
            progress("compile kernels", None)
            self._compile_kernels()
            clock = phase("compile kernels", clock)
        progress("measure memory", None)
        pages = self._measure_pages()
        phase("measure memory", clock)
        self._why_no_graphs = why_no_graphs
        if self._why_no_graphs is not None and device.type == "cuda":
            note(f"steps run without CUDA graphs: {self._why_no_graphs}")
        return ExecutorInfo(
            spec=spec,
            groups=self.groups,
            num_pages=pages,
            max_len=self.max_len,
            lookahead=self.drafter.lookahead,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            phases=phases,
            adapter_slots=0 if self.adapters is None else self.adapters.slots,
        )

    def _build_adapters(self) -> Adapters | None:
        if "adapter" in self.composition.parts:
            adapters: Adapters = self.composition.build("adapter", device=self.device, dtype=self.dtype)
            if adapters.slots:
                self.adapters = adapters
        return self.adapters

    def _load_weights(self, source: ModelSource, progress: Progress) -> None:
        progress("load weights", 0.0)
        if source.folder is None or source.dummy:
            self.model.init_dummy(self.engine.seed)
            return
        weights = list(open_weights(str(source.folder)))

        def counted() -> Iterator[tuple[str, Callable[[], Any]]]:
            for i, weight in enumerate(weights):
                yield weight
                progress("load weights", (i + 1) / len(weights))

        self.model.load(counted())

    def _compile_kernels(self) -> None:
        """What the rehearsals launch, and the graphs."""
        with compile_ahead(compile_workers(self.size)), torch.inference_mode():
            self._rehearse()
            with self._trial(self.engine.page_size):
                self.step_graphs().rehearse()
                if self.processors:
                    rehearse_float32(self.state, self.spec.vocab)

    def _rehearse(self) -> None:
        engine = self.engine
        for size, rows, decodes, context in rehearsed_steps(engine.token_budget, engine.max_seqs, self.max_len - 1):
            with self._trial(max(size, context)):
                plan, blobs = rehearsal(
                    size,
                    rows,
                    self.groups,
                    decodes,
                    context=context,
                    embeds=not self.spec.head,
                    adapted=self.adapters is not None,
                )
                self.execute(plan, blobs)
                if plan.late:
                    self.complete(rehearsed_masks(plan, self.spec.vocab))

    @contextmanager
    def _trial(self, tokens: int) -> Iterator[None]:
        """With KV pools of so many tokens."""
        self.bind({group.id: page_count(group, tokens) for group in self.groups})
        yield
        del self.pools, self.state, self.outcomes
        self.attention.bind({})

    def _measure_pages(self) -> dict[int, int]:
        engine = self.engine
        if engine.kv_pages is not None:
            return dict.fromkeys((group.id for group in self.groups), engine.kv_pages)

        return measure_pages(
            self.groups,
            self.device,
            fraction=engine.memory_fraction,
            wanted=wanted_tokens(
                self.groups,
                sequences=engine.max_seqs,
                max_len=self.max_len,
                ahead=engine.depth * (1 + self.drafter.lookahead),
                budget=engine.token_budget,
            ),
            rehearse=self._rehearse,
        )

    def bind(self, num_pages: Mapping[int, int]) -> None:
        """Allocate KV pools and slot state."""
        self._adapted.clear()
        self.pools = make_pools(self.groups, num_pages, self.device)
        self.attention.bind(self.pools)
        self.state = DeviceState(
            slots=self.engine.max_seqs,
            max_len=self.max_len,
            lookahead=self.drafter.lookahead,
            groups=self.groups,
            device=self.device,
            seed=self.engine.seed,
        )
        self.outcomes = ResultCopies(self.device)
        if self._why_no_graphs is None:
            began = time.perf_counter()
            self.graphs = self.step_graphs()
            recorder = self._recorder = Recorder()
            self.graphs.capture(recorder, self._progress)
            recorder.close()
            report_late_kernels(True)
            self._phases["capture graphs"] = time.perf_counter() - began

    def step_graphs(self) -> StepGraphs:
        """Not captured yet."""
        engine, attention = self.engine, self.composition.part("attention")
        mixed = attention.capabilities(detect_host(self.device.type)).provides.get("graphs") == "mixed"
        return StepGraphs(
            self.model,
            self.state,
            self.groups,
            self.attention,
            taps=self.drafter.taps,
            lookahead=self.drafter.lookahead,
            most_rows=engine.max_seqs,
            most_tokens=min(engine.graph_tokens, engine.token_budget) if mixed else 0,
            max_len=self.max_len,
            adapters=self.adapters,
        )

    # Steps.

    @torch.inference_mode()
    def execute(self, plan: StepPlan, blobs: Blobs) -> None:
        """Enqueue a plan, or its forward alone where `complete` is to follow. On CUDA this returns while the device
        still runs earlier plans."""
        self._use_device()
        step = self._forward(plan, blobs)
        if plan.late:
            self._halfway = plan, step
        else:
            self._second_half(plan, step)

    @torch.inference_mode()
    def complete(self, late: LateInputs) -> None:
        """Enqueue the sampling half of the plan executed last."""
        assert self._halfway is not None, f"step {late.step} does not wait for late inputs"
        self._use_device()
        (plan, step), self._halfway = self._halfway, None
        self._second_half(plan, step, late)

    def _use_device(self) -> None:
        """In every thread that calls: a thread launches kernels on a device of its own, and there may be several."""
        if self.device.type == "cuda" and self._thread != threading.get_ident():
            torch.cuda.set_device(self.device)
            self._thread = threading.get_ident()

    def _second_half(self, plan: StepPlan, step: _Step, late: LateInputs | None = None) -> None:
        sampled = self._sample(step, late)
        state, batch, states_TC = self.state, step.batch, step.hidden.states
        # So many rows of logits as sampling was measured with.
        rows, logprobs = batch.rows, state.unusual.logprobs
        prompt = prompt_logprobs(rows, step.starts, states_TC, state, self.model, self.engine.max_seqs)
        if self.rank == 0:
            pooled = pooled_states(rows, step.starts, state, states_TC)
            wanted = {}
            if not logprobs.isdisjoint(rows.sampled_slots):
                wanted = {i: state.slots[slot].params.logprobs for i, slot in enumerate(rows.slots) if slot in logprobs}
            self.outcomes.send(plan.step, step.began, rows, wanted, sampled, prompt, pooled)

    def collect(self) -> StepResult:
        """The oldest executed plan's result; waits for its copy, not for later plans."""
        return self.outcomes.collect()

    def _join(self, plan: StepPlan, blobs: Blobs) -> list[SlotInfo]:
        joined = []
        self._adapted.difference_update(plan.leaves)
        for join in plan.joins:
            blob = blobs[join.uid, join.epoch]
            joined.append(SlotInfo(join.uid, join.epoch, blob))
            if blob.adapter >= 0:
                self._adapted.add(join.slot)
                if blob.request.adapter:
                    self.adapters.place(blob.adapter, blob.request.adapter)
        return joined

    def _forward(self, plan: StepPlan, blobs: Blobs) -> _Step:
        """Apply the plan's changes and run the layers. Whatever the host has to say goes in one copy."""
        state, rows = self.state, Rows(plan.rows)
        joined = self._join(plan, blobs)
        graphs = self.graphs
        adapted = not self._adapted.isdisjoint(rows.slots)
        graph = None if graphs is None else graphs.pick(rows, adapted)
        if graph is not None:
            starts = graphs.starts(graph, rows)
            sections = [graphs.section(graph, rows, starts)]
        else:
            starts = rows.starts
            sampling = sampling_section(rows, starts).reshape(-1) if graphs is None else graphs.samples(rows, starts)
            sections = [sampling, rows.slots, starts, chunk_section(rows)]
        began = self.outcomes.clock.mark()
        sent = state.apply(plan, joined, sections)
        for join, info in zip(plan.joins, joined, strict=True):
            for name, processor in self.processors.items():
                wanted, place = name in info.processors, (name, join.slot)
                if wanted or place in self._processed:
                    processor.join(join.slot, info.blob.request)
                    (self._processed.add if wanted else self._processed.discard)(place)
        apply_page_ops(self.pools, plan.ops, self.host_pools)
        for draft in plan.drafts:
            state.set_drafts(draft.slot, draft.tokens)
        if graph is not None:
            batch, hidden = graphs.forward(graph, rows, sent[0])
            return _Step(began, batch, hidden, starts, sent[0][graph.capacity.layout :], graph)
        samples, slots_B, row_start_B1, chunks = sent
        batch = build_batch(rows, slots_B, row_start_B1, state, self.groups, self.attention)
        ctx = ForwardContext(batch.tokens.positions_T, batch.attn)
        with adapting(self.adapters if adapted else None, state.adapter_S, batch.tokens.slots_T):
            layers = self._overlapped or self.model.forward
            hidden = layers(self.model.embed(batch.tokens.ids_T), ctx, self.drafter.taps)
        advance_chunks(chunks, state)
        return _Step(began, batch, hidden, starts, samples, None)

    def _sample(self, step: _Step, late: LateInputs | None) -> Sampled | None:
        state, drafter, batch, hidden = self.state, self.drafter, step.batch, step.hidden
        slots = batch.rows.sampled_slots
        if not slots:
            if drafter.lookahead:
                drafter.observe(self._draft_context(batch, None), hidden.states, hidden.taps)
            return None
        unusual = state.unusual
        random = not unusual.random.isdisjoint(slots)
        graphs = None if late is not None or (random and state.draft_probs_SKV is not None) else self.graphs
        if graphs is not None and unusual.not_plain.isdisjoint(slots):
            width = graphs.width(batch.rows)
            if step.graph is None or step.graph.capacity.width != width:
                graphs.gather(batch, hidden, step.samples)
            sampled = graphs.draw(width, len(slots), random, not unusual.filtered.isdisjoint(slots))
        else:
            at = locate(batch, step.samples[: 3 * len(slots)])
            states = hidden.states[at.token_RW.reshape(-1)]
            masks = None if late is None else upload_masks(late, batch, self.device)
            sampled = sample_step(self.model, states, at, batch, state, self.processors, masks)
        if drafter.lookahead:
            ctx = self._draft_context(batch, sampled)
            drafter.observe(ctx, hidden.states, hidden.taps)
            if not drafter.needs_host_tokens:
                state.take_draft(ctx, drafter.propose(ctx))
        return sampled

    def _draft_context(self, batch: Batch, sampled: Sampled | None) -> DraftContext:
        tokens = batch.tokens
        nobody = tokens.slots_T[:0]
        return DraftContext(
            slots_B=nobody if sampled is None else sampled.slots_R,
            tokens_SL=self.state.tokens_SL,
            lengths_B=nobody if sampled is None else sampled.lengths_R,
            max_length=batch.rows.max_len + batch.rows.width,
            k=self.drafter.lookahead,
            key_S=self.state.key_S,
            slots_T=tokens.slots_T,
            positions_T=tokens.positions_T,
        )

    # Adapters.

    def load_adapter(self, key: str, folder: str) -> Future[None]:
        """Read this rank's share while steps go on. The future raises RequestError."""
        if self._reading is None:
            self._reading = ThreadPoolExecutor(1, "dovetail-adapter")
        return self._reading.submit(self._read_adapter, key, Path(folder).expanduser())

    def _read_adapter(self, key: str, folder: Path) -> None:
        try:
            self.adapters.read(key, folder)
        except RequestError:
            raise
        except Exception as error:  # a folder may hold anything; it concerns this adapter alone
            log.exception("adapter %s cannot be read", key)
            raise RequestError(f"adapter: {folder} cannot be read: {type(error).__name__}: {error}") from error

    def unload_adapter(self, key: str) -> None:
        """After the plans executed so far."""
        self.adapters.drop(key)

    def close(self) -> None:
        """Give device memory back, whoever still holds this object."""
        if self._reading is not None:
            self._reading.shutdown(wait=False, cancel_futures=True)
        self._halfway = None
        self.graphs = self._overlapped = None
        if self._recorder is not None:
            self._recorder.forget()
        self.adapters = None
        for name in ("outcomes", "state", "pools", "model", "drafter", "attention", "processors"):
            self.__dict__.pop(name, None)
        if "collective" in self.__dict__:
            self.collective.close()
        if "device" in self.__dict__ and self.device.type == "cuda":
            torch.cuda.empty_cache()
