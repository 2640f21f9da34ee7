"""Number formats of a composition, and its cost model bound to them. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.core.compose import Host
from dovetail.core.engine.layer_formats import copy_bits, over_layers
from dovetail.core.engine.stored_weights import stored_formats, table_formats
from dovetail.core.errors import ConfigError, PluginError
from dovetail.core.interfaces import CostModel, DrafterFacts, ExpertPlacement, Formats
from dovetail.core.interfaces.placement import expert_ranks

if TYPE_CHECKING:
    from dovetail.core.compose import Composition, EngineConfig
    from dovetail.core.interfaces import ModelSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by dtype."""
_KV_BYTES = {**BYTES, "fp8_e4m3": 1, "fp8_e5m2": 1}


def bind_cost(
    composition: Composition, spec: ModelSpec, device: str | None = None, here: Host | None = None
) -> CostModel | None:
    """Return the chosen cost model, ready to predict, also the time of the drafter; None if the app has none or the
    choice is `none`. `device` decides what "auto" means for dtypes: "cpu", or else a GPU. Default: engine.device, where
    auto is a GPU. `here`: the machine that runs the engine; None = any."""
    if "cost" not in composition.parts:
        return None
    cost: CostModel = composition.build("cost")
    if not cost.predicts:
        return None
    bound = formats(composition, spec, device or composition.engine.device, here)
    engine = with_expert_ranks(composition)
    cost.bind(spec, engine, bound)
    facts = drafter_facts(composition, spec) if "spec_decode" in composition.parts else None
    if facts is not None:
        cost.draft_window = composition.build("spec_decode").window
    if facts is not None and facts.target_share and spec.parameters is not None:
        cost.drafter = composition.build("cost")
        cost.drafter.bind(_part_of(spec, facts.target_share), engine, bound)
    elif facts is not None and facts.spec is not None and facts.spec.parameters is not None:
        cost.drafter, cost.drafts_in_one_pass = composition.build("cost"), facts.one_pass
        if facts.mtp:
            cost.drafter.bind(_with_head_of(spec, facts.spec), engine, bound)
            return cost
        bits = 8.0 * bound.dtype_bytes if facts.weight_bits is None else facts.weight_bits
        own = replace(
            bound,
            weight_bits=bits,
            product=facts.product or bound.dtype,
            head_bits=facts.head_bits,
            head_product=None,
            embedding_bits=facts.embedding_bits,
            expert_bits=None,
            rounds=True,
        )
        cost.drafter.bind(facts.spec, engine.model_copy(update={"tp": facts.tp or engine.tp}), own)
    return cost


def of_another_gpu(stated: object, device: str) -> bool:
    """Whether the numbers of a cost model, whose option `device` is `stated`, are not those of the GPU `device`. False
    for a CPU and a simulated device, and without a name."""
    return isinstance(stated, str) and device not in ("cpu", "simulated") and not _has_word(device, stated)


def _has_word(name: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", name, re.IGNORECASE) is not None


def other_gpu(composition: Composition, device: str) -> Iterator[str]:
    """Yield a note if the cost model has the numbers of another GPU than `device`, with what to set instead. `device`:
    name of the GPU, "cpu" or "simulated"."""
    if "cost" not in composition.parts:
        return
    part = composition.part("cost")
    stated = getattr(part.config, "device", None)
    if not of_another_gpu(stated, device):
        return
    chosen = composition.choices.get("cost", part.name)
    known = [file.name for file in composition.registry.files if file.group == "cost"]
    if fitting := [f"cost={name}" for name in known if name != chosen and _has_word(device, name)]:
        advice = f"set {' or '.join(fitting)}"
    else:
        advice = f"of {', '.join(known)} none is for it, so set cost=roofline with its cost.bandwidth and cost.tflops"
    yield (
        f"cost={chosen} is for {stated}, and this GPU is {device}: predictions, by which engine.drafts=paying and "
        f"schedulers decide, are off; {advice}"
    )


def drafter_facts(composition: Composition, spec: ModelSpec) -> DrafterFacts | None:
    """Return what the chosen drafter states of itself for a target; None = nothing. Raises ConfigError for a target
    that it was not made for, or without the layer that it runs."""
    part = composition.part("spec_decode")
    stated: DrafterFacts | None = part.facts()
    if stated is not None and stated.made_for not in (None, (spec.hidden, spec.vocab)):
        hidden, vocab = stated.made_for
        raise ConfigError(
            f"spec_decode={part.name} was made for a model with a hidden size of {hidden} and a vocabulary of {vocab}, "
            f"and {spec.architecture} has {spec.hidden} and {spec.vocab}: set spec_decode.path to a head of this model"
        )
    if stated is not None and stated.mtp and spec.mtp is None:
        raise ConfigError(
            f"spec_decode={part.name} drafts with the checkpoint's layer for multi-token prediction, and "
            f"{spec.architecture} has none here: set spec_decode=none"
        )
    return None if stated is None else stated.of(spec)


def with_expert_ranks(composition: Composition) -> EngineConfig:
    """Return the engine's settings with the number of expert ranks in place of ep=null, and with dp as the number of
    lanes if this is one of them."""
    engine = composition.engine
    if "experts" not in composition.parts:
        return engine
    placement: ExpertPlacement = composition.build("experts")
    ep, dp = expert_ranks(placement, engine.ep, composition.expert_ranks), max(engine.dp, composition.lanes)
    return engine.model_copy(update={"ep": ep, "dp": dp})


def _part_of(spec: ModelSpec, share: float) -> ModelSpec:
    """Return a model of some of the layers, with the embedding and logits of the whole."""
    layers = max(1, round(spec.layers * share))
    p, part = spec.parameters, layers / spec.layers
    assert p is not None
    fewer = {name: int(getattr(p, name) * part) for name in ("attention", "mlp", "experts", "active_experts", "rest")}
    return replace(spec, layers=layers, windows=spec.windows[:layers], parameters=replace(p, **fewer))


def _with_head_of(target: ModelSpec, layer: ModelSpec) -> ModelSpec:
    """Return a layer that reads the target's matrix of logits in each pass."""
    head, own = target.parameters, layer.parameters
    assert own is not None
    return layer if head is None else replace(layer, parameters=replace(own, head=head.head or head.embedding))


def formats(composition: Composition, spec: ModelSpec, device: str, here: Host | None = None) -> Formats:
    """Formats from engine.dtype, engine.kv_dtype, and the quantizer's capabilities `weight_bits`, `product`,
    `head_bits`, `head_product`, `expert_bits`, `rounds` and `of_layers`, which the headers of a quantized checkpoint
    replace."""
    engine, quant = composition.engine, composition.part("quant")
    dtype, size = number_format(engine, spec, device)
    kv_bytes = size if engine.kv_dtype == "auto" else _size("kv_dtype", engine.kv_dtype, _KV_BYTES)
    stated = quant.capabilities(here or Host(device="cpu" if device == "cpu" else "cuda")).provides
    stated = over_layers(stated, spec, 8.0 * size)
    if quant.name == "none":
        stated = {"weight_bits": 8 * size, "product": dtype, **stated}
    if (stored := stored_formats(quant, spec, 8 * size)) is not None:
        stated = {**stated, "weight_bits": stored.bits, "product": stored.product or stated.get("product")}
    if missing := [key for key in ("weight_bits", "product") if stated.get(key) is None]:
        raise PluginError(
            str(quant.package),
            f"quant={quant.name} does not state {' and '.join(missing)} in its capabilities, which "
            f"cost={composition.part('cost').name} needs: choose another quant, or for a run cost=none",
        )
    product = dtype if stated["product"] == "model" else str(stated["product"])
    tables = table_formats(stated, stored)
    bits = 8.0 * size if stated["weight_bits"] == "model" else float(stated["weight_bits"])  # type: ignore[arg-type]
    return Formats(dtype, size, bits, product, kv_bytes, **tables, **many_rows_formats(stated, product, bits))


def many_rows_formats(stated: Mapping[str, Any], product: str, bits: float) -> dict[str, Any]:
    """Return how matmuls of many rows treat weights, by the fields of Formats."""
    return {"rounds": bool(stated.get("rounds", True)), "copy_bits": copy_bits(stated, product, bits)}


def number_format(engine: EngineConfig, spec: ModelSpec, device: str) -> tuple[str, int]:
    """Return (name, bytes per number) for activations and unquantized weights."""
    dtype = engine.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else spec.dtype
    return dtype, _size("dtype", dtype, BYTES)


def _size(option: str, name: str, known: Mapping[str, int]) -> int:
    if name not in known:
        raise ConfigError(f"engine.{option}={name} is not one of auto, {', '.join(known)}")
    return known[name]
