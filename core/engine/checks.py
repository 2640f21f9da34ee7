"""Checks that a composition's parts fit each other, the model and this machine, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from dovetail.core import host, tokenizer
from dovetail.core.compose import Host, Selected
from dovetail.core.compose.capabilities import Capabilities
from dovetail.core.compose.config import part_fields
from dovetail.core.compose.former import former, load
from dovetail.core.engine.adapters import check_folders
from dovetail.core.engine.cost import bind_cost, many_rows_formats, number_format
from dovetail.core.engine.lane_checks import lane_conflicts
from dovetail.core.engine.layer_formats import over_layers
from dovetail.core.engine.stored_weights import stored_formats, table_formats
from dovetail.core.errors import CapabilityError, CapacityError, ConfigError, DovetailError, shown
from dovetail.core.interfaces import ExpertPlacement, Formats, Model
from dovetail.core.interfaces.placement import expert_ranks
from dovetail.core.interfaces.spec_decode import MOST_NODES, Verify

if TYPE_CHECKING:
    from dovetail.core.compose import Composition
    from dovetail.core.interfaces import ModelSpec


def check_fit(composition: Composition) -> None:
    """Raise CapabilityError for conflicts, CapacityError if the weights alone are too large, ConfigError if an
    adapter's folder is missing, or tokenizer.json or the tuning table given by hand cannot be used."""
    model = composition.part("model")
    spec = model.target().spec(model.config)
    here = host.detect_host(composition.engine.device)
    composition.check(here, host.model_facts(spec))
    _check_drafter(composition)
    found = [*_gpu_conflicts(here), *_depth_conflicts(composition, here)]
    found += [*_overlap_conflicts(composition), *_launch_conflicts(composition)]
    found += [*_former_conflicts(composition), *expert_conflicts(composition, spec)]
    found += [*_tree_conflicts(composition, here), *lane_conflicts(composition, here)]
    if found:
        raise CapabilityError(found)
    check_weights_fit(composition, spec, here)
    check_folders(composition, spec)
    check_table(composition, here)
    check_cost(composition, spec, here)
    checkpoint = model.target().source(model.config).checkpoint
    if checkpoint is not None and checkpoint.text(tokenizer.FILE) is not None:
        tokenizer.Tokenizer(checkpoint)


OLDEST = (8, 0)
"""Compute capability of the oldest GPUs for which kernels are compiled and checked (docs/gpus.md)."""


def _gpu_conflicts(here: Host) -> Iterator[str]:
    if here.device == "cuda" and (0, 0) < here.compute_capability < OLDEST:
        yield (
            f"this GPU has compute capability {'.'.join(map(str, here.compute_capability))}, and kernels are for "
            f"{'.'.join(map(str, OLDEST))} (Ampere) and newer. Would work: engine.device=cpu"
        )


def _former_conflicts(composition: Composition) -> Iterator[str]:
    """Yield what components of former contracts cannot do in this composition."""
    for part in composition.parts.values():
        if isinstance(part, Selected) and (known := former(part.component.api)) and known.conflicts:
            yield from load(known.conflicts)(part, composition)


def former_scheduler_conflicts(scheduler: Selected, composition: Composition) -> Iterator[str]:
    """Yield the conflict of a scheduler of contract 0.1 that plans by itself, without SchedulerLimits.again."""
    from dovetail.core.engine.policy import PolicyScheduler

    drafter = composition.part("spec_decode")
    if drafter.target().follows_features and not issubclass(scheduler.target(), PolicyScheduler):
        yield (
            f"spec_decode={drafter.name} needs the last token of a cached prefix again, which scheduler="
            f"{scheduler.name} of {scheduler.package} does not feed: it is made for {scheduler.component.api}. Would "
            "work: another scheduler, spec_decode=none."
        )


def check_table(composition: Composition, here: Host) -> None:
    """Raise ConfigError if engine.tune_table is set and its table is not for this GPU."""
    engine = composition.engine
    if engine.tune_table is not None:
        from dovetail.core.tuning.startup import table_by_hand

        table_by_hand(engine, device_name(engine.first_gpu, here) if here.device == "cuda" else None)


def check_cost(composition: Composition, spec: ModelSpec, here: Host) -> None:
    """Raise ConfigError if the cost model cannot predict this model, or is for another device."""
    simulated = not composition.part("executor").capabilities(here).provides.get("holds_weights", True)
    cost = bind_cost(composition, spec, "simulated" if simulated else here.device, None if simulated else here)
    if cost is not None and not simulated:
        cost.check_device(device_name(composition.engine.first_gpu, here))


def device_name(first_gpu: int, here: Host) -> str:
    """Return the name of the GPU, or "cpu". Raises ConfigError without that GPU."""
    if here.device != "cuda":
        return "cpu"
    import torch

    return torch.cuda.get_device_name(host.gpu_of(0, first_gpu))


def has_virtual_time(composition: Composition, here: Host | None = None) -> bool:
    """Whether time passes only when the engine waits for its executor."""
    here = here or host.detect_host(composition.engine.device)
    return composition.part("executor").capabilities(here).provides.get("clock") == "virtual"


def check_clock(composition: Composition, here: Host | None = None) -> None:
    """Raise ConfigError if the engine's time is not that of its clients."""
    if has_virtual_time(composition, here):
        raise ConfigError(
            "executor.clock=virtual is for app=bench and app=ablate, which step the engine themselves; clients wait in "
            "real time: set executor.clock=real"
        )


def exact_lengths(composition: Composition, here: Host | None = None) -> bool:
    """Whether attention needs exact lengths on the host; upper bounds do not suffice."""
    here = here or host.detect_host(composition.engine.device)
    return composition.part("attention").capabilities(here).provides.get("exact_lengths") == "host"


def _depth_conflicts(composition: Composition, here: Host) -> Iterator[str]:
    """Yield conflicts of engine.depth > 1 with parts that need the accepted tokens on the host before each launch."""
    depth = composition.engine.depth
    if depth == 1:
        return
    drafter, chosen = composition.build("spec_decode"), composition.part("spec_decode")
    if drafter.needs_host_tokens:
        yield (
            f"spec_decode={chosen.name} drafts from tokens on the host, which does not have them yet while other plans "
            f"are in flight (engine.depth={depth}). Would work: engine.depth=1."
        )
    if exact_lengths(composition, here) and drafter.lookahead:
        yield (
            f"attention={composition.part('attention').name} plans from exact lengths on the host, which does not have "
            f"them while drafts are in flight (spec_decode={chosen.name}, engine.depth={depth}). "
            "Would work: engine.depth=1, spec_decode=none."
        )


def _check_drafter(composition: Composition) -> None:
    """Raise PluginError for a drafter whose facts are outside of their ranges."""
    part, drafter = composition.part("spec_decode"), composition.build("spec_decode")
    if not isinstance(drafter.lookahead, int) or drafter.lookahead < 0:
        raise part.fault(f"its lookahead is {drafter.lookahead!r}, and it must be a number of drafts, 0 or more")
    if drafter.lookahead and not 1 <= drafter.depth <= drafter.lookahead:
        raise part.fault(f"its depth is {drafter.depth!r}, and it must be from 1 to its lookahead={drafter.lookahead}")
    counts, most = [0, *drafter.draft_counts], drafter.lookahead
    if most and (counts != sorted(set(counts)) or counts[-1] != most):
        raise part.fault(
            f"its draft_counts are {counts[1:]}, and they must ascend from 1 or more to its lookahead={most}"
        )
    if drafter.verify not in get_args(Verify):
        raise part.fault(f"its verify is {drafter.verify!r}, and there are {', '.join(get_args(Verify))}")


def _tree_conflicts(composition: Composition, here: Host) -> Iterator[str]:
    """Yield conflicts of a drafter of trees with itself and with attention."""
    drafter = composition.build("spec_decode")
    if drafter.depth >= drafter.lookahead:
        return
    name = composition.part("spec_decode").name
    if drafter.lookahead > MOST_NODES:
        yield (
            f"spec_decode={name} drafts trees of {drafter.lookahead} tokens, and the limit is {MOST_NODES}: the "
            f"ancestors of a draft are the bits of one number. Would work: {MOST_NODES}."
        )
    if drafter.verify == "typical":
        yield (
            f"spec_decode={name} drafts trees, which are verified by the model's own draws or by rejection, and its "
            "verification is typical. Would work: spec_decode.verify=draws, or chains."
        )
    attention = composition.part("attention")
    if not attention.capabilities(here).provides.get("tree"):
        registry = composition.registry
        parts = (registry.get("attention", name) for name in registry.options("attention"))
        chosen = (Selected(part, part.component.config()) for part in parts)
        able = [f"attention={part.name}" for part in chosen if part.capabilities(here).provides.get("tree")]
        yield (
            f"attention={attention.name} has no tree masks, and spec_decode={name} drafts trees. "
            f"Would work: {', '.join([*able, 'chains of drafts'])}."
        )


def _overlap_conflicts(composition: Composition) -> Iterator[str]:
    """Yield a conflict if half-batches must overlap and the model does not expose its collective calls."""
    model = composition.part("model")
    if composition.engine.overlap_tokens and model.target().layers is Model.layers:
        yield (
            f"model={model.name} makes its collective calls by itself (it has no `layers`), and "
            "engine.overlap_tokens alternates between two halves of a step. Would work: engine.overlap_tokens=0."
        )


def _launch_conflicts(composition: Composition) -> Iterator[str]:
    """Yield a conflict of engine.late_launch with engine.depth."""
    engine = composition.engine
    # At depth 1 there is no step to wait for; at more than 2 the delay would hold back results.
    if engine.late_launch and engine.depth != 2:
        yield (
            "engine.late_launch delays the launch of a step while the preceding one runs, and "
            f"engine.depth={engine.depth} has {engine.depth - 1 or 'no'} others in flight. "
            "Would work: engine.depth=2, engine.late_launch=false."
        )


def expert_conflicts(composition: Composition, spec: ModelSpec) -> list[str]:
    """Return conflicts of engine.ep with the ranks, with the placement of experts, and with the model. Layouts that do
    not fit the number of experts raise ConfigError."""
    engine = composition.engine
    if "experts" not in composition.parts:
        return []
    part = composition.part("experts")
    placement: ExpertPlacement = part.build()
    if spec.moe is None:
        has = f"engine.ep={engine.ep} spreads experts, and {spec.architecture} has none. Would work: engine.ep=null."
        return [has] if (engine.ep or 1) > 1 else []
    all_ranks = composition.expert_ranks
    ep = expert_ranks(placement, engine.ep, all_ranks)
    if all_ranks % ep:
        works = [f"engine.ep={ranks}" for ranks in range(1, all_ranks + 1) if all_ranks % ranks == 0]
        there = f"engine.tp={engine.tp} ranks"
        if composition.lanes > 1:
            there = f"the {all_ranks} ranks of {composition.lanes} lanes with engine.tp={engine.tp} each"
        return [f"engine.ep={ep} does not divide {there}. Would work: {', '.join(works)}."]
    if not placement.spreads and ep > 1:
        if composition.lanes > 1:
            return []  # placement_conflicts names the placements that run in lanes
        spread = ", ".join(f"experts={name}" for name in spreading(composition))
        return [
            f"experts={part.name} has every expert on each rank, and engine.ep={ep} spreads them. Would work: "
            f"engine.ep=1, {spread}."
        ]
    slots = _slots(part, placement, spec.moe.experts, ep)
    return [
        *_own_rows_conflicts(composition, placement, spec.moe.shared),
        *_move_conflicts(part.name, placement.rebalance, slots),
    ]


def _slots(part: Selected, placement: ExpertPlacement, experts: int, ep: int) -> list[int]:
    """Return the number of slots of each expert rank. Raise PluginError if the layout is none of these experts."""
    with part.registered.blamed(f"cannot lay out {experts} experts on {ep} ranks"):
        layouts = [list(placement.layout(experts, rank, ep)) for rank in range(ep)]
    for rank, layout in enumerate(layouts):
        wrong = [x for x in layout if not isinstance(x, int) or isinstance(x, bool) or not 0 <= x < experts]
        if wrong:
            raise part.fault(f"layout({experts}, {rank}, {ep}) has {shown(wrong[0])}, which is no expert's number")
    return [len(layout) for layout in layouts]


def _move_conflicts(name: str, rebalance: int, slots: Sequence[int]) -> Iterator[str]:
    """Yield a conflict of experts that move with their layout. `slots`: number of each expert rank."""
    if rebalance and len(slots) == 1:
        yield (
            f"experts.rebalance={rebalance} moves experts between ranks, and engine.ep=1. Would work: "
            "experts.rebalance=0, engine.ep of at least 2."
        )
    elif rebalance and min(slots) < max(slots):
        yield (
            f"experts={name} moves experts (experts.rebalance={rebalance}), and its ranks have unlike numbers of slots "
            f"for them: {', '.join(map(str, slots))}. Would work: experts.rebalance=0, another engine.ep."
        )


def _own_rows_conflicts(composition: Composition, placement: ExpertPlacement, shared: int) -> Iterator[str]:
    """Yield a conflict of adapters with shared experts that get a rank's own rows."""
    if placement.rows == "own" and shared and "adapter" in composition.parts:
        adapter = composition.part("adapter")
        if getattr(adapter.config, "slots", 0):
            yield (
                f"experts={composition.part('experts').name} gives each rank its own rows, and adapter={adapter.name} "
                "applies to all rows of the shared experts. Would work: adapter=none, experts=whole, experts=tensor."
            )


def expert_copies(composition: Composition, spec: ModelSpec) -> float:
    """Return the number of experts that the ranks of a replica have together, copies included, as a multiple of the
    model's. Lanes have a share of the experts each."""
    if "experts" not in composition.parts or spec.moe is None:
        return 1.0
    part = composition.part("experts")
    placement: ExpertPlacement = part.build()
    ep = expert_ranks(placement, composition.engine.ep, composition.expert_ranks)
    return sum(_slots(part, placement, spec.moe.experts, ep)) / spec.moe.experts / composition.lanes


def spreading(composition: Composition) -> list[str]:
    """Return the names of the placements that spread experts."""
    registry, found = composition.registry, []
    for name in registry.options("experts"):
        try:
            registered = registry.get("experts", name)
            if registered.target().spreads:
                found.append(name)
        except DovetailError:
            continue  # an unusable one is no remedy
    return found


MOST_GPUS = 16
"""Largest number of GPUs that a remedy may propose."""


def check_weights_fit(composition: Composition, spec: ModelSpec, host: Host) -> None:
    """Raise CapacityError if the weights alone exceed engine.memory_fraction of a device. No check if the model states
    no number of parameters, the quantizer no `weight_bits` (allocation then fails), or the executor holds no
    weights."""
    if spec.parameters is None or not host.memory_bytes:
        return
    if not composition.part("executor").capabilities(host).provides.get("holds_weights", True):
        return
    quant, (dtype, each) = composition.part("quant"), number_format(composition.engine, spec, host.device)
    stated = quant.capabilities(host)
    provides = over_layers(stated.provides, spec, 8.0 * each)
    bits = 8.0 * each if quant.name == "none" else _weight_bits(replace(stated, provides=provides), host, 8.0 * each)
    if (stored := stored_formats(quant, spec, 8.0 * each)) is not None:
        bits = stored.bits
    if bits is None:
        return
    tables = table_formats(provides, stored)
    product = stored.product if stored is not None and stored.product else str(provides.get("product"))
    formats = Formats(dtype, each, bits, dtype, each, **tables, **many_rows_formats(provides, product, bits))
    weights = _WeightMemory(composition, spec, host)
    missing = weights.missing(formats, composition.engine.tp, composition.engine.memory_fraction)
    if missing > 0:
        size = weights.bytes(formats, composition.engine.tp)
        what = f"{spec.architecture} has {size / 2**30:.1f} GiB of weights a device, which has"
        raise CapacityError(
            f"{what} {host.memory_bytes / 2**30:.1f} GiB x engine.memory_fraction={composition.engine.memory_fraction}",
            missing_bytes=int(missing),
            settings=[words for words, _ in zip(weights.remedies(formats), range(3), strict=False)],
        )


class _WeightMemory:
    def __init__(self, composition: Composition, spec: ModelSpec, host: Host) -> None:
        self.composition, self.spec, self.host = composition, spec, host

    def bytes(self, formats: Formats, tp: int) -> float:
        """Return the bytes of weights per device. Ranks on a CPU share its memory."""
        assert self.spec.parameters is not None
        experts = self.spec.parameters.experts * (expert_copies(self.composition, self.spec) - 1)
        total = formats.weight_bytes(self.spec.parameters) + formats.expert_bytes(experts)
        return total / tp if self.host.device == "cuda" else total

    def missing(self, formats: Formats, tp: int, fraction: float) -> float:
        return self.bytes(formats, tp) - self.host.memory_bytes * fraction

    def remedies(self, formats: Formats) -> Iterator[str]:
        """Yield overrides with which the weights fit, single changes first."""
        engine, bits = self.composition.engine, formats.weight_bits
        if engine.memory_fraction < 0.95 and self.missing(formats, engine.tp, 0.95) <= 0:
            yield "engine.memory_fraction=0.95"
        if formats.copy_bits:
            formats = replace(formats, copy_bits=0.0)
            own = getattr(self.composition.part("quant").config, "many_rows", None) == "kept"
            if own and self.missing(formats, engine.tp, engine.memory_fraction) <= 0:
                yield "quant.many_rows=rounded"
        others = [one for one in quantizers(self.composition, self.host) if one[1] < bits]
        # With default options, quantizers leave logits and embedding plain, and experts have the bits of other layers.
        plain = replace(formats, head_bits=None, embedding_bits=None, expert_bits=None)
        smaller = [(name, replace(plain, weight_bits=fewer)) for name, fewer in others]
        for name, fewer in smaller[:MOST_QUANTIZERS]:
            if self.missing(fewer, engine.tp, engine.memory_fraction) <= 0:
                yield f"quant={name}"
        for words, each in [("", formats), *((f" quant={name}", fewer) for name, fewer in smaller)]:
            for tp in self._ranks():
                if self.missing(each, tp, engine.memory_fraction) <= 0:
                    yield f"engine.tp={tp} executor=multiproc{words}"
                    break

    def _ranks(self) -> list[int]:
        if self.host.device != "cuda":
            return []
        return [tp for tp in model_ranks(self.composition, self.host, MOST_GPUS) if tp > self.composition.engine.tp]


MOST_QUANTIZERS = 2
"""Quantizers that are proposed by themselves: those that change the weights least."""


def quantizers(composition: Composition, host: Host) -> list[tuple[str, float]]:
    """Return (name, bits per weight) of the quantizers that run on this host with default options and quantize plain
    weights as they load, most bits first; none for a checkpoint that is quantized already."""
    found, registry = [], composition.registry
    facts = composition.part("model").facts()
    if ((facts.hf if facts is not None else None) or {}).get("quantization_config") is not None:
        return []
    for name in registry.options("quant"):
        try:
            registered = registry.get("quant", name)
            if part_fields(registered.component.config):
                continue
            selected = Selected(registered, registered.component.config())
            stated = selected.capabilities(host)
            bits, only_reads = _weight_bits(stated, host), stated.provides.get("plain_weights") is False
        except (DovetailError, ValueError):
            continue  # a quantizer that is unusable, or needs options, is no remedy
        if bits is not None and not only_reads:
            found.append((name, bits))
    return sorted(found, key=lambda one: -one[1])


def model_ranks(composition: Composition, host: Host, most: int) -> list[int]:
    """Return the values of engine.tp up to `most` that satisfy the model's stated demands."""
    stated = composition.part("model").capabilities(host).requires
    demands = [demand for demand in stated if (demand.kind, demand.key) == ("engine", "tp")]
    return [tp for tp in range(1, most + 1) if all(demand.admits(tp) for demand in demands)]


def _weight_bits(stated: Capabilities, host: Host, plain: float | None = None) -> float | None:
    """Return the bits per weight that a quantizer states, `plain` for "model"; None = not stated, or it does not run on
    this host."""
    bits = stated.provides.get("weight_bits")
    bits = plain if bits == "model" else bits
    runs = all(d.admits(getattr(host, d.key)) for d in stated.requires if d.kind == "host")
    return float(bits) if isinstance(bits, int | float) and runs else None
