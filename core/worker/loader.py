"""Start-up of one rank: connect, build and fill the model, compile kernels, measure memory; then bind KV pages."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dovetail.core.checkpoint import open_checkpoint
from dovetail.core.host import detect_host
from dovetail.core.interfaces import (
    Adapters,
    DrafterFacts,
    ExecutorInfo,
    ModelSpec,
    Progress,
    Quantizer,
)
from dovetail.core.memory.pools import make_host_pools
from dovetail.core.memory.sizing import measure_pages, wanted_tokens
from dovetail.core.ops.compile_ahead import compile_workers
from dovetail.core.ops.compile_server import CompileServer
from dovetail.core.startup_notes import SIMULATED, collect_notes, note
from dovetail.core.tuning.startup import install_choices
from dovetail.core.worker.build import (
    build_context,
    build_quantizer,
    check_weights,
    lane_ranks,
    target_view,
    tunables_of,
    tuned_sizes,
)
from dovetail.core.worker.connection import Connection
from dovetail.core.worker.dtypes import resolve_device, resolve_dtype
from dovetail.core.worker.expert_moves import ExpertBalancer
from dovetail.core.worker.fill import fill
from dovetail.core.worker.graph_sizes import most_graph_tokens
from dovetail.core.worker.graph_support import reason_against_graphs
from dovetail.core.worker.graphs import Recorder, StepGraphs
from dovetail.core.worker.rank_parts import RankParts
from dovetail.core.worker.runner import Runner
from dovetail.core.worker.two_batch_overlap import OverlappedForward, why_useless
from dovetail.core.worker.warmup import compile_kernels, failed_capture, report_unwarmed_kernels, run_warmup_steps

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


@dataclass(frozen=True, slots=True)
class LoadedRank:
    """A rank before its KV pages are bound. With several ranks, each binds the least page counts of all ranks."""

    parts: RankParts
    info: ExecutorInfo
    phases: dict[str, float]
    """Those of `info`; `bind` adds one."""
    graphs: bool
    """Steps run as CUDA graphs."""
    progress: Progress

    def bind(self, num_pages: Mapping[int, int]) -> Runner:
        """Allocate KV pages and slot state, and capture graphs."""
        return Runner(self.parts, num_pages, self._capture if self.graphs else None)

    def _capture(self, graphs: StepGraphs) -> None:
        began = time.perf_counter()
        recorder = self.parts.recorder = Recorder()
        graphs.capture(recorder, self.progress)
        recorder.close()
        report_unwarmed_kernels(True)
        self.phases["capture graphs"] = time.perf_counter() - began

    def close(self) -> None:
        """Close a rank that was not bound, or whose `bind` failed."""
        self.parts.close()


def load_rank(
    composition: Composition,
    progress: Progress,
    *,
    rank: int = 0,
    size: int = 1,
    address: str = "",
    on_connect: Callable[[Connection], None] = lambda connection: None,
) -> LoadedRank:
    """Load one rank of `size`. `address` is "host:port" of rank 0. `on_connect` receives the connection before it is
    made, so that another thread can abort it. If loading fails, the caller closes the connection: other ranks may have
    to be aborted first."""
    with collect_notes() as notes:
        quantizer = build_quantizer(composition)
        check_weights(composition, quantizer, rank, size)
    device = resolve_device(composition.engine.device, rank, composition.engine.first_gpu)
    with collect_notes() as more, _compile_server(device) as server:
        phases = _Phases()
        connection = _connect(composition, device, rank, size, address, progress, on_connect)
        phases.end("connect ranks")
        parts = _build_parts(composition, quantizer, connection, progress, phases)
        try:
            tuning = _tune(composition, parts, progress)
            phases.end("tune")
            why_no_graphs = reason_against_graphs(composition, parts.model.build.spec, connection.device, size)
            num_pages = _warm_up(parts, why_no_graphs is None, server, progress, phases)
            if why_no_graphs is None and not parts.model.capturable:
                why_no_graphs = _try_capture(parts)
        except BaseException:
            parts.release()
            raise
        if why_no_graphs is not None and connection.device.type == "cuda":
            note(f"steps run without CUDA graphs: {why_no_graphs}")
        info = _info(parts, num_pages, phases.seconds, tuple(notes | more), tuning)
    return LoadedRank(parts, info, phases.seconds, why_no_graphs is None, progress)


class _Phases:
    """Duration of each phase of loading. A phase begins where the previous one ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self._last = now - self._last, now


def _compile_server(device: torch.device) -> AbstractContextManager[CompileServer | None]:
    """Start to import Triton in other processes, which takes seconds, if kernels can compile in several."""
    workers = compile_workers(1)
    if device.type != "cuda" or workers == 1 or importlib.util.find_spec("triton") is None:
        return nullcontext()
    return CompileServer(workers)


def _connect(
    composition: Composition,
    device: torch.device,
    rank: int,
    size: int,
    address: str,
    progress: Progress,
    on_connect: Callable[[Connection], None],
) -> Connection:
    """Take the rank's device and connect it to the other ranks."""
    if device.type == "cuda":
        from dovetail.core.ops.kernels.launch import keep_shared_memory

        torch.cuda.set_device(device)
        keep_shared_memory(device)
    progress("connect ranks", None)
    collective = composition.build("collective")
    collective.rank, collective.size = rank, size
    connection = Connection(rank, size, device, collective, lane_ranks(composition, collective))
    on_connect(connection)
    connection.collective.connect(rank, size, address, device)
    if (ranks := connection.lane_ranks) is not None and composition.lane is not None:
        ranks.connect(ranks.rank, ranks.size, composition.lane.address, device)
    return connection


def _note_float32(chosen: str, dtype: torch.dtype, device: torch.device) -> None:
    """Add a start-up note if the model runs in float32 on a GPU, though nothing states that dtype. `chosen`:
    engine.dtype."""
    if dtype is torch.float32 and device.type == "cuda" and chosen == "auto":
        note(
            "the model states no dtype, or float32, in which a GPU takes several times as long as in 16 bits: set "
            "engine.dtype=bfloat16"
        )


def _build_parts(
    composition: Composition, quantizer: Quantizer, connection: Connection, progress: Progress, phases: _Phases
) -> RankParts:
    """Build the model and fill it, then build what depends on it."""
    engine, device = composition.engine, connection.device
    selected = composition.part("model")
    model_class = selected.target()
    spec = model_class.spec(selected.config)
    _note_choice(composition, spec)
    dtype, max_len = resolve_dtype(engine.dtype, spec.dtype, device), spec.longest(engine.max_len)
    _note_float32(engine.dtype, dtype, device)
    if engine.max_len is not None and max_len < engine.max_len:
        note(f"engine.max_len={engine.max_len}, and the model was made for {max_len}: sequences end there")
    attention, drafter = composition.build("attention"), composition.build("spec_decode")
    adapters = _build_adapters(composition, device, dtype)
    some = connection.collective, attention, drafter, adapters, connection.lane_ranks
    build = build_context(composition, spec, quantizer, device, dtype, *some)
    progress("build model", None)
    model = model_class(selected.config, build)
    if adapters is not None:
        adapters.allocate()
    overlapped = None
    if engine.overlap_tokens:
        overlapped = OverlappedForward(model, attention, adapters, device, least=engine.overlap_tokens)
        if (why := why_useless(engine.overlap_tokens, engine.token_budget, connection.size)) is not None:
            note(f"engine.overlap_tokens={engine.overlap_tokens} gains nothing: {why}")
    phases.end("build model")
    target = target_view(composition, model)
    layers = 0 if build.placement is None else build.placement.layers
    drafter.bind(target)
    drafts_together = False
    if build.placement is not None and connection.lane_ranks is not None:
        drafts_together = build.placement.layers > (0 if drafter.on_target_pages else layers)
    if drafter.verify == "typical":
        note("spec_decode.verify=typical is not lossless: sampled text is less random than without drafts")
    if drafter.simulated_rates:
        rates = ", ".join(f"{rate:.3g}" for rate in drafter.simulated_rates)
        note(f"{SIMULATED}: drafts are accepted by a coin, by position {rates}; the text has no meaning")
    balancer = None
    if build.placement is not None and build.placed:
        balancer = ExpertBalancer(build.placement, build.placed, engine.depth)
    fill(model, target.source, engine.seed, progress)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    phases.end("load weights")

    processors = {name: part.build() for name, part in composition.many("logits").items()}
    for processor in processors.values():
        processor.allocate(engine.max_seqs + 1, spec.vocab, device)
    groups = (*model.kv_groups, *drafter.kv_groups())
    if len({group.id for group in groups}) < len(groups):
        raise composition.part("spec_decode").fault(
            f"its KV groups have ids {[group.id for group in drafter.kv_groups()]}, and those of the model are "
            f"{[group.id for group in model.kv_groups]}: number its own from TargetView.first_group = "
            f"{target.first_group}"
        )
    kv_cache = composition.part("kv_cache")
    host_pages = kv_cache.target().host_pages(kv_cache.config, groups)
    return RankParts(
        engine=engine,
        connection=connection,
        max_len=max_len,
        model=model,
        attention=attention,
        drafter=drafter,
        processors=processors,
        groups=groups,
        host_pools=make_host_pools(groups, host_pages, device),
        adapters=adapters,
        balancer=balancer,
        drafts_together=drafts_together,
        overlapped=overlapped,
        graph_tokens=_graph_tokens(composition, spec, device),
        slides=getattr(kv_cache.target(), "slides", True),
    )


def _note_choice(composition: Composition, spec: ModelSpec) -> None:
    """Name the model that another one chose (model=auto), and why, and a layer for drafts that is not used."""
    model = composition.part("model")
    bundled = str(getattr(model.config, "path", "")).startswith("pkg://")
    if model.chooser and not bundled:
        why = "which has" if model.component.reads is not None else "because no native model runs this"
        note(f"model={model.chooser} chose model={model.name}, {why} {spec.architecture}")
    facts: DrafterFacts | None = composition.part("spec_decode").facts()
    unused = spec.mtp is not None and (facts is None or not facts.mtp)
    if unused and spec.checkpoint is not None and _has_layer(spec.checkpoint, spec.layers):
        note("the checkpoint's layer for multi-token prediction is not loaded; spec_decode=mtp drafts with it")


def _has_layer(path: str, index: int) -> bool:
    """Whether the checkpoint has tensors of this layer. Newer versions of transformers do not write one that predicts
    further tokens, though config.json states it."""
    return any(f"layers.{index}." in name for name in open_checkpoint(path).tensors())


def _build_adapters(composition: Composition, device: torch.device, dtype: torch.dtype) -> Adapters | None:
    if "adapter" not in composition.parts:
        return None
    adapters: Adapters = composition.build("adapter", device=device, dtype=dtype)
    return adapters if adapters.slots else None


def _graph_tokens(composition: Composition, spec: ModelSpec, device: torch.device) -> int:
    """Return the tokens of the largest mixed step that gets a graph; 0 = the backend can capture decode steps only."""
    provides = composition.part("attention").capabilities(detect_host(device.type)).provides
    return most_graph_tokens(composition.engine, spec) if provides.get("graphs") == "mixed" else 0


def _tune(composition: Composition, parts: RankParts, progress: Progress) -> str:
    """Install the tuned choices of the operations that steps run. Return the hash of their table."""
    sizes = tuned_sizes(parts.engine.max_seqs, parts.graph_tokens, parts.drafter)
    tunables = tunables_of(parts.model.build, sizes)
    return install_choices(composition, tunables, parts.connection.collective, parts.connection.device, progress)


def _warm_up(
    parts: RankParts, graphs: bool, server: CompileServer | None, progress: Progress, phases: _Phases
) -> dict[int, int]:
    """Compile kernels, then return how many KV pages fit."""
    if parts.connection.device.type == "cuda":
        report_unwarmed_kernels(False)
    # Parts that can be captured accept any values in device memory. Others may use what no kernel wrote as an index.
    if graphs:
        progress("compile kernels", None)
        compile_kernels(parts, server)
        phases.end("compile kernels")
    progress("measure memory", None)
    num_pages = _measure_pages(parts)
    phases.end("measure memory")
    return num_pages


def _try_capture(parts: RankParts) -> str | None:
    recorder = Recorder()
    try:
        failed = failed_capture(parts, recorder)
    finally:
        recorder.close()
        recorder.forget()
    return failed and f"capturing {parts.model.build.spec.architecture} failed: {failed}"


def _measure_pages(parts: RankParts) -> dict[int, int]:
    engine = parts.engine
    if engine.kv_pages is not None:
        return dict.fromkeys((group.id for group in parts.groups), engine.kv_pages)
    groups = parts.groups
    if not parts.slides:
        groups = tuple(replace(group, kind="full", window=0) for group in groups)
    return measure_pages(
        groups,
        parts.connection.device,
        fraction=engine.memory_fraction,
        wanted=wanted_tokens(
            groups,
            sequences=engine.max_seqs,
            max_len=parts.max_len,
            ahead=engine.depth * (1 + parts.drafter.lookahead),
            budget=engine.token_budget,
        ),
        warm_up=lambda: run_warmup_steps(parts),
    )


def _info(
    parts: RankParts, num_pages: dict[int, int], phases: dict[str, float], notes: tuple[str, ...], tuning: str
) -> ExecutorInfo:
    device, spec = parts.connection.device, parts.model.build.spec
    return ExecutorInfo(
        spec=spec,
        groups=parts.groups,
        num_pages=num_pages,
        max_len=parts.max_len,
        lookahead=parts.drafter.lookahead,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        phases=phases,
        notes=notes,
        adapter_slots=0 if parts.adapters is None else parts.adapters.slots,
        tuning=tuning,
    )
