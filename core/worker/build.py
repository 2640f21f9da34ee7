"""Inputs of a rank's model, and the operations of the model that can be tuned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dovetail.core.checkpoint import located
from dovetail.core.interfaces import (
    Adapters,
    AttentionBackend,
    BuildContext,
    Checkpoint,
    Collective,
    Drafter,
    ExpertPlacement,
    Model,
    ModelSpec,
    Quantizer,
    TargetView,
)
from dovetail.core.interfaces.placement import expert_ranks
from dovetail.core.interfaces.tuning import Tunable
from dovetail.core.parallel.lane_ranks import LaneRanks
from dovetail.core.tuning.startup import MOST_ROWS
from dovetail.core.worker.drafts import makes_fewer
from dovetail.core.worker.dtypes import resolve_dtype, resolve_kv_dtype
from dovetail.core.worker.fill import read_headers
from dovetail.core.worker.graph_sizes import graph_sizes, most_graph_tokens

if TYPE_CHECKING:
    from dovetail.core.compose import Composition


def build_quantizer(composition: Composition) -> Quantizer:
    """Build the quantizer and let it read the headers of the weights."""
    quantizer: Quantizer = composition.build("quant")
    model = composition.part("model")
    read_headers(quantizer, model.target().source(model.config))
    return quantizer


def weights_of(composition: Composition) -> Checkpoint | None:
    """Return the checkpoint whose weights are loaded; None = random weights."""
    model = composition.part("model")
    checkpoint: Checkpoint | None = model.target().source(model.config).weights
    return checkpoint


def check_weights(composition: Composition, quantizer: Quantizer, rank: int, size: int) -> None:
    """Compare the headers of the weights, also of the drafter's own, with what this rank loads. Uses no device, so that
    what headers show to be wrong is refused first."""
    weights, drafter = weights_of(composition), composition.build("spec_decode")
    if composition.part("model").target().check_checkpoint is Model.check_checkpoint:
        weights = None
    drafts = type(drafter).check_files is not Drafter.check_files
    # Layers whose experts move refuse weight formats that cannot.
    moves = "experts" in composition.parts and composition.build("experts").rebalance > 0
    if weights is None and not drafts and not moves:
        return
    with nullcontext() if weights is None else located(weights):
        model = model_without_weights(composition, quantizer, torch.device("cpu"), rank, size)
        if weights is not None:
            model.check_checkpoint(weights)
    if drafts:
        drafter.check_files(target_view(composition, model))


def target_view(composition: Composition, model: Model) -> TargetView:
    """Return what a drafter gets of the target model."""
    engine, selected = composition.engine, composition.part("model")
    source = selected.target().source(selected.config)
    max_len, first_group = model.build.spec.longest(engine.max_len), 1 + max(group.id for group in model.kv_groups)
    calls = model.embed, model.logits, model.forward, model.mtp_layer, model.local_logits
    return TargetView(model.build, source, engine.max_seqs, max_len, first_group, *calls)


def model_without_weights(
    composition: Composition, quantizer: Quantizer, device: torch.device, rank: int, size: int
) -> Model:
    """Build the model of one rank of `size` on the meta device, where it takes no memory. `device`: the one on which
    dtypes depend."""
    engine, selected = composition.engine, composition.part("model")
    model_class = selected.target()
    spec = model_class.spec(selected.config)
    collective = composition.build("collective")
    # Shapes depend on the rank and the number of ranks only; nothing is sent.
    collective.rank, collective.size = rank, size
    ranks = lane_ranks(composition, collective)
    attention, drafter = composition.build("attention"), composition.build("spec_decode")
    dtype = resolve_dtype(engine.dtype, spec.dtype, device)
    device = torch.device("meta")
    build = build_context(composition, spec, quantizer, device, dtype, collective, attention, drafter, ranks=ranks)
    model: Model = model_class(selected.config, build)
    return model


def lane_ranks(composition: Composition, collective: Collective) -> Collective | None:
    """Build a collective for the ranks of all lanes, not connected yet; None = there is one lane. `collective`: that of
    this lane's ranks."""
    lane = composition.lane
    if lane is None:
        return None
    ranks: Collective = composition.build("collective")
    ranks.rank, ranks.size = lane.number * collective.size + collective.rank, lane.count * collective.size
    return LaneRanks(ranks)


def build_context(
    composition: Composition,
    spec: ModelSpec,
    quantizer: Quantizer,
    device: torch.device,
    dtype: torch.dtype,
    collective: Collective,
    attention: AttentionBackend,
    drafter: Drafter,
    adapters: Adapters | None = None,
    ranks: Collective | None = None,
) -> BuildContext:
    """`ranks`: those of all lanes, if there are several."""
    engine = composition.engine
    placement: ExpertPlacement | None = None
    if "experts" in composition.parts:
        placement = composition.build("experts")
        ranks = collective if ranks is None else ranks
        placement.bind(ranks, expert_ranks(placement, engine.ep, ranks.size))
    spec = replace(spec, max_len=spec.longest(engine.max_len))
    return BuildContext(
        spec=spec,
        device=device,
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(engine.kv_dtype, dtype),
        page_tokens=engine.page_size,
        max_len=spec.max_len + 2 * drafter.lookahead + 1,
        quantizer=quantizer,
        attention=attention,
        collective=collective,
        adapters=adapters,
        placement=placement,
    )


def tuned_sizes(most_rows: int, most_tokens: int, drafter: Drafter) -> list[int]:
    """Return the numbers of rows for which operations are tuned: those of steps with a graph."""
    sizes = graph_sizes(most_rows, most_tokens, drafter.lookahead, few=makes_fewer(drafter))
    return [size for size in sizes if size <= MOST_ROWS]


def tunables_of(build: BuildContext, sizes: Iterable[int]) -> Iterator[Tunable]:
    """Yield the tunable operations of a model that was built from this context; those of equal layers repeat."""
    ordered = sorted(sizes)
    for tuned in build.tuned:
        for rows in ordered:
            yield from tuned(rows)


def tunables_without_weights(composition: Composition, device: torch.device, sizes: Iterable[int]) -> list[Tunable]:
    """Return the tunable operations of rank 0. The model may be larger than the GPU. `device`: the GPU. `sizes`:
    numbers of rows; none = those of the engine's graphs."""
    engine = composition.engine
    model = model_without_weights(composition, build_quantizer(composition), device, 0, engine.tp)
    graph_tokens = most_graph_tokens(engine, model.build.spec)
    drafter = composition.build("spec_decode")
    # Layers that a drafter builds to compare its files with register their operations beside the model's.
    drafter.check_files(target_view(composition, model))
    return list(tunables_of(model.build, list(sizes) or tuned_sizes(engine.max_seqs, graph_tokens, drafter)))
