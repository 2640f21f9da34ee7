"""Facts of the built-in drafters, from which their memory is planned."""

from __future__ import annotations

from dovetail.core.compose import Host
from dovetail.core.interfaces import DrafterFacts
from dovetail.plugins.spec_decode.config import DraftModelConfig, NgramConfig, NoneConfig


def none(config: NoneConfig) -> DrafterFacts:
    return DrafterFacts()


def ngram(config: NgramConfig) -> DrafterFacts:
    return DrafterFacts(config.lookahead)


def draft_model(config: DraftModelConfig) -> DrafterFacts:
    model = config.model
    bits = config.quant.capabilities(Host(device="cuda")).provides.get("weight_bits")
    spec = model.facts() or model.target().spec(model.config)
    return DrafterFacts(config.lookahead, spec, float(bits) if isinstance(bits, int | float) else None, config.verify)
