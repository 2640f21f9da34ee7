"""Where a GPU's memory goes, from shapes and formats alone. Bytes are per GPU unless said otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.compose import Composition, EngineConfig, Host
from dovetail.core.errors import ConfigError
from dovetail.core.interfaces import CostModel, Formats, ModelSpec

CONTEXT_BYTES = 0.6e9
"""CUDA context, library handles and kernels: what a process takes before its first tensor."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Plan:
    """One layout and what it takes."""

    spec: ModelSpec
    engine: EngineConfig
    formats: Formats
    cost: CostModel
    device_bytes: float
    max_len: int

    @property
    def budget(self) -> float:
        return self.device_bytes * self.engine.memory_fraction

    @property
    def weights(self) -> float:
        return self.cost.weight_bytes() / (self.engine.tp * self.engine.pp)

    @property
    def activations(self) -> float:
        """The costliest step: a full token budget through one layer, then logits of every sequence, sorted for
        top-p."""
        spec, engine, size = self.spec, self.engine, self.formats.dtype_bytes
        moe = spec.moe
        width = moe.intermediate * (moe.active + moe.shared) if moe is not None else spec.intermediate
        heads = spec.heads * spec.head_dim / engine.tp
        layer = engine.token_budget * size * (4 * spec.hidden + 3 * heads + 3 * width / engine.tp)
        logits = min(engine.max_seqs, engine.token_budget) * spec.vocab * 4 * 5
        return max(layer, logits)

    @property
    def kv(self) -> float:
        """Left for the KV cache; negative when the rest does not fit."""
        return self.budget - self.weights - self.activations - CONTEXT_BYTES

    def sequences(self, length: int) -> int:
        """Sequences of so many tokens that fit at once."""
        return max(int(self.kv // self.cost.kv_bytes(length)), 0)

    @property
    def missing(self) -> float:
        """Bytes that one sequence of max_len lacks; 0 = it fits."""
        return max(self.cost.kv_bytes(self.max_len) - self.kv, 0.0)


def make_plan(composition: Composition, **engine_changes: Any) -> Plan:
    """The composition's plan, or that of one with some engine settings changed."""
    return build_plan(composition, composition.part("quant").name, quant_facts(composition, None), engine_changes)


def quant_facts(composition: Composition, name: str | None) -> Mapping[str, object]:
    """What a quantizer (default: the chosen one) states of itself."""
    if name is None:
        return composition.part("quant").capabilities(Host()).provides
    registered = composition.registry.get("quant", name)
    if registered.component.capabilities is None:
        return {}
    config = registered.component.config()
    return registered.load(registered.component.capabilities)(config, Host()).provides  # type: ignore[no-any-return]


def build_plan(
    composition: Composition, quant: str, facts: Mapping[str, object], engine_changes: Mapping[str, Any]
) -> Plan:
    model = composition.part("model")
    spec: ModelSpec = model.facts() or model.target().spec(model.config)
    engine = composition.engine.model_copy(update=dict(engine_changes))
    dtype = spec.dtype if engine.dtype == "auto" else engine.dtype
    kv_dtype = dtype if engine.kv_dtype == "auto" else engine.kv_dtype
    for what, name in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if name not in DTYPE_BYTES:
            raise ConfigError(f"engine.{what}={name}: no such number format; options: {', '.join(DTYPE_BYTES)}")
    weight_bits = facts.get("weight_bits", DTYPE_BYTES[dtype] * 8)
    product = facts.get("product", dtype)
    assert isinstance(weight_bits, int | float) and isinstance(product, str), f"quant={quant} states {facts}"
    formats = Formats(dtype, DTYPE_BYTES[dtype], weight_bits, product, DTYPE_BYTES[kv_dtype])
    part = composition.part("cost")
    cost: CostModel = part.build()
    if not cost.predicts:
        raise ConfigError(f"cost={part.name} predicts nothing; choose hardware, such as cost=h200")
    memory = getattr(part.config, "memory", None)
    if memory is None:
        raise ConfigError(f"cost={part.name} does not say how much memory a device has: set cost.memory=<GB>")
    cost.bind(spec, engine, formats)
    max_len = min(engine.max_len or spec.max_len, spec.max_len)
    return Plan(spec, engine, formats, cost, memory * 1e9, max_len)
