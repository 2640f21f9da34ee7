"""Facts of the built-in drafters, from which their memory is planned."""

from __future__ import annotations

from dovetail.core.compose import Host
from dovetail.core.engine.cost import BYTES
from dovetail.core.engine.stored_weights import stored_formats, table_formats
from dovetail.core.interfaces import DrafterFacts
from dovetail.plugins.spec_decode.config import DraftModelConfig, NgramConfig, NoneConfig


def none(config: NoneConfig) -> DrafterFacts:
    return DrafterFacts()


def ngram(config: NgramConfig) -> DrafterFacts:
    return DrafterFacts(config.lookahead)


def draft_model(config: DraftModelConfig) -> DrafterFacts:
    model = config.model
    stated = config.quant.capabilities(Host(device="cuda")).provides
    spec = model.facts() or model.target().spec(model.config)
    bits = stated.get("weight_bits")
    stored = stored_formats(config.quant, spec, 8.0 * BYTES[spec.dtype])
    tables = table_formats(stated, stored)
    return DrafterFacts(
        config.lookahead,
        spec,
        stored.bits if stored is not None else float(bits) if isinstance(bits, int | float) else None,
        config.verify,
        tables["head_bits"],
        tables["embedding_bits"],
    )
