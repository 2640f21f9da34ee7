"""Facts of the built-in drafters, from which their memory is planned."""

from __future__ import annotations

from dataclasses import replace

from dovetail.core.compose import Host
from dovetail.core.engine.cost import BYTES
from dovetail.core.engine.stored_weights import stored_formats, table_formats
from dovetail.core.interfaces import DrafterFacts, ModelSpec
from dovetail.plugins.spec_decode.config import (
    DraftModelConfig,
    Eagle3Config,
    EagleConfig,
    HeadFiles,
    LayerSkipConfig,
    MedusaConfig,
    MTPConfig,
    NgramConfig,
    NoneConfig,
    ParallelConfig,
    SuffixConfig,
)
from dovetail.plugins.spec_decode.eagle_files import EagleShape, read_eagle, read_eagle3, read_parallel
from dovetail.plugins.spec_decode.medusa_files import read_medusa


def none(config: NoneConfig) -> DrafterFacts:
    return DrafterFacts()


def ngram(config: NgramConfig) -> DrafterFacts:
    return DrafterFacts(config.lookahead)


def suffix(config: SuffixConfig) -> DrafterFacts:
    return DrafterFacts(config.lookahead)


def draft_model(config: DraftModelConfig) -> DrafterFacts:
    return _with_layers(config, config.spec())


def layer_skip(config: LayerSkipConfig) -> DrafterFacts:
    return DrafterFacts(config.lookahead, verify=config.verify, target_share=config.share)


def eagle(config: EagleConfig) -> DrafterFacts:
    return _head(config, read_eagle(config))


def eagle3(config: Eagle3Config) -> DrafterFacts:
    return _head(config, read_eagle3(config))


def parallel(config: ParallelConfig) -> DrafterFacts:
    return replace(_head(config, read_parallel(config)), one_pass=True)


def medusa(config: MedusaConfig) -> DrafterFacts | None:
    spec = read_medusa(config).spec
    if spec is None:
        return None
    return replace(_with_layers(config, spec), one_pass=True, made_for=(spec.hidden, spec.vocab))


def mtp(config: MTPConfig) -> DrafterFacts:
    return DrafterFacts(config.drafts, verify=config.verify, mtp=True)


def _head(config: HeadFiles, shape: EagleShape) -> DrafterFacts:
    return replace(_with_layers(config, shape.spec), made_for=(shape.spec.hidden, shape.target_vocab))


def _with_layers(config: DraftModelConfig | HeadFiles, spec: ModelSpec) -> DrafterFacts:
    stated = config.quant.capabilities(Host(device="cuda")).provides
    bits = stated.get("weight_bits")
    stored = stored_formats(config.quant, spec, 8.0 * BYTES[spec.dtype])
    product = stated.get("product") if stored is None else stored.product or stated.get("product")
    tables = table_formats(stated, stored)
    return DrafterFacts(
        config.drafts,
        spec,
        stored.bits if stored is not None else float(bits) if isinstance(bits, int | float) else None,
        config.verify,
        tables["head_bits"],
        tables["embedding_bits"],
        tp=config.tp,
        product=None if product in (None, "model") else str(product),
    )
