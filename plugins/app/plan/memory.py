"""GPU memory budget, computed from shapes and formats alone. Bytes are per GPU unless noted otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dovetail.core.arithmetic import ceil_div
from dovetail.core.compose import Composition, EngineConfig, Host
from dovetail.core.engine.cost import bind_cost, drafter_facts
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import AdapterFacts, CostModel, DrafterFacts, Formats, ModelSpec, Parameters
from dovetail.plugins.app.plan.experts import PlacedExperts, placed_experts

CONTEXT_BYTES = 0.6e9
"""Memory that a process takes before its first tensor: CUDA context, library handles and kernels."""

HOST = Host(device="cuda")
"""Host that plans are made for, independent of the machine that runs the planner."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One layout and the memory and time that it needs."""

    spec: ModelSpec
    engine: EngineConfig
    formats: Formats
    cost: CostModel
    adapter: AdapterFacts
    drafter: DrafterFacts
    device_bytes: float
    max_len: int
    experts: PlacedExperts | None
    """None = the model has no routed experts."""

    @property
    def budget(self) -> float:
        return self.device_bytes * self.engine.memory_fraction

    @property
    def weights(self) -> float:
        more = 0.0 if self.experts is None else self.experts.more_bytes(self.formats)
        return (self.cost.weight_bytes() / self.engine.tp + more) / self.engine.pp

    @property
    def activations(self) -> float:
        """Peak of a step: either a full token budget in one layer, or the logits of every sequence, also after each of
        its drafts, sorted for top-p."""
        spec, engine, size = self.spec, self.engine, self.formats.dtype_bytes
        moe = spec.moe
        width = moe.intermediate * (moe.active + moe.shared) if moe is not None else spec.intermediate
        heads = spec.heads * spec.head_dim / engine.tp
        layer = engine.token_budget * size * (4 * spec.hidden + 3 * heads + 3 * width / engine.tp)
        logits = min(engine.max_seqs * (1 + self.drafter.lookahead), engine.token_budget) * spec.vocab * 4 * 5
        return max(layer, logits)

    @property
    def adapters(self) -> float:
        """Adapter slots, which are allocated whether they are used or not."""
        slots, numbers = self.adapter.slots, self.adapter.numbers
        if not slots:
            return 0.0
        each = sum(times * numbers(inputs, outputs) for inputs, outputs, times in matrices(self.spec, self.engine.tp))
        return float(slots * each * self.formats.dtype_bytes)

    @property
    def draft_weights(self) -> float:
        """Weights of the model inside the drafter, and the probabilities of drafts that are verified by rejection."""
        facts, engine, formats = self.drafter, self.engine, self.formats
        probs = (engine.max_seqs + 1) * facts.lookahead * self.spec.vocab * 4 if facts.verify == "rejection" else 0
        if facts.spec is None:
            return float(probs)
        p = facts.spec.parameters
        if p is None:
            raise ConfigError(f"the size of the draft model {facts.spec.architecture} is unknown: set spec_decode=none")
        if facts.mtp:
            return probs + self._mtp_weights(facts.spec, p)
        bits = 8 * formats.dtype_bytes if facts.weight_bits is None else facts.weight_bits
        head, embedding = facts.head_bits, facts.embedding_bits
        own = replace(
            formats, weight_bits=bits, head_bits=head, embedding_bits=embedding, expert_bits=None, copy_bits=0.0
        )
        return probs + own.weight_bytes(p) / (facts.tp or engine.tp)

    def _mtp_weights(self, spec: ModelSpec, p: Parameters) -> float:
        """Weights of the layer for multi-token prediction, whose experts are placed like the model's."""
        formats, tp, placed = self.formats, self.engine.tp, self.experts
        if placed is None or spec.moe is None:
            return formats.weight_bytes(p) / tp
        experts = formats.expert_bytes(p.experts)
        own = replace(placed, spec=spec, moe=replace(spec.moe, dense_layers=0), move=False)
        shares = (formats.weight_bytes(p) - experts + experts / placed.lanes) / tp
        return shares + own.more_bytes(formats)

    @property
    def left(self) -> float:
        """Memory left for the KV cache; negative if the rest does not fit."""
        return self.budget - self.weights - self.adapters - self.draft_weights - self.activations - CONTEXT_BYTES

    @property
    def kv(self) -> float:
        """Memory of the KV cache: all that is left, unless engine.kv_pages sets it."""
        return self.left if self.engine.kv_pages is None else min(self.left, self._pages_bytes)

    @property
    def _pages_bytes(self) -> float:
        """Memory of engine.kv_pages pages in each KV group, the drafter's included."""
        drafts, size = self.drafter.spec, self.formats.kv_bytes
        own = 0 if drafts is None else drafts.kv_bytes_per_token(size, self.drafter.tp or self.engine.tp)
        each = self.spec.kv_bytes_per_token(size, self.engine.tp) + own
        return float((self.engine.kv_pages or 0) * self.engine.page_size * each)

    def kv_bytes(self, length: int) -> float:
        """Return the KV cache bytes of a sequence of `length` tokens, the drafter's included."""
        drafts = self.drafter.spec
        tp = self.drafter.tp or self.engine.tp
        own = 0 if drafts is None else drafts.kv_bytes(length, self.formats.kv_bytes, tp)
        return self.cost.kv_bytes(length) + own

    def sequences(self, length: int) -> int:
        """Return how many sequences of `length` tokens fit at once, over all replicas."""
        number = self.kv // self.kv_bytes(length)
        if self.engine.kv_pages is not None:
            # Each group has as many pages, so the one that keeps most of a sequence decides.
            held = max(min(length, window or length) for window in self.spec.windows or (0,))
            number = min(number, self.engine.kv_pages // ceil_div(held, self.engine.page_size))
        return max(int(number), 0) * self.engine.dp

    def decode_seconds(self, batch: int, context: int) -> float:
        """Return the time of a decode step of `batch` sequences, on the replica that has the most of them."""
        return self.cost.decode_seconds(ceil_div(batch, self.engine.dp), context)

    @property
    def missing(self) -> float:
        """Bytes missing for engine.kv_pages, or else for one sequence of max_len; 0 = it fits."""
        needed = self.kv_bytes(self.max_len) if self.engine.kv_pages is None else self._pages_bytes
        return max(needed - self.left, 0.0)

    @property
    def misfit(self) -> str:
        """Sentence that names the part without room, and the bytes that are missing."""
        pages = self.engine.kv_pages
        what = f"one sequence of {self.max_len} tokens" if pages is None else f"engine.kv_pages={pages}"
        return f"{what} lacks {self.missing / 2**30:.2f} GiB per GPU"


def matrices(spec: ModelSpec, tp: int) -> Iterator[tuple[int, int, int]]:
    """Yield (inputs, outputs, count) of the matrices that adapters change, as sharded on one of `tp` ranks."""
    if spec.mla is not None or spec.moe is not None or spec.parameters is None:
        raise ConfigError(
            f"{spec.architecture}: the size of adapter slots for experts or compressed attention is unknown; "
            "plan with adapter=none"
        )
    inner, kv = spec.heads // tp * spec.head_dim, max(1, spec.kv_heads // tp) * spec.head_dim
    width = spec.intermediate // tp
    ups = spec.parameters.mlp // (spec.layers * spec.hidden * spec.intermediate) - 1
    yield spec.hidden, inner, spec.layers
    yield spec.hidden, kv, 2 * spec.layers
    yield inner, spec.hidden, spec.layers
    yield spec.hidden, width, ups * spec.layers
    yield width, spec.hidden, spec.layers


def make_plan(composition: Composition) -> Plan:
    """Plan a composition; builds only its cost model. Raises CapabilityError for a layout unsupported by the model."""
    composition.check_layout(HOST)
    model, part = composition.part("model"), composition.part("cost")
    spec: ModelSpec = model.facts() or model.target().spec(model.config)
    experts = placed_experts(composition, spec, HOST)
    cost = bind_cost(composition, spec, "cuda")
    if cost is None:
        raise ConfigError(f"cost={part.name} predicts nothing; choose hardware, such as cost=h200")
    memory = cost.memory
    if memory is None:
        way = "set cost.memory=<GB>"
        if "memory" not in type(part.config).model_fields:
            way = "its class or an option must have `memory`, GB; or choose another, such as cost=h200"
        raise ConfigError(f"cost={part.name} does not state the memory of a device: {way}")
    adapter = composition.part("adapter")
    stated: AdapterFacts | None = adapter.facts()
    if stated is None:
        raise ConfigError(f"adapter={adapter.name} does not state the size of its slots: plan with adapter=none")
    part = composition.part("spec_decode")
    drafter = drafter_facts(composition, spec)
    if drafter is None:
        raise ConfigError(f"spec_decode={part.name} does not state its memory: plan with spec_decode=none")
    max_len = spec.longest(composition.engine.max_len)
    return Plan(spec, composition.engine, cost.formats, cost, stated, drafter, memory * 1e9, max_len, experts)
