"""Capabilities of the built-in drafters."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host, Requires
from dovetail.plugins.spec_decode.config import (
    DraftModelConfig,
    HeadFiles,
    MedusaConfig,
    NgramConfig,
    NoneConfig,
    SuffixConfig,
)

_EXACT_LENGTHS = Requires(
    kind="attention",
    key="exact_lengths",
    allowed=("device",),
    reason="its layers are fed tokens that the host does not count",
)


def none(config: NoneConfig, host: Host) -> Capabilities:
    return Capabilities(provides={"drafts": False})


def ngram(config: NgramConfig, host: Host) -> Capabilities:
    return Capabilities(provides={"drafts": True})


def suffix(config: SuffixConfig, host: Host) -> Capabilities:
    return Capabilities(provides={"drafts": True})


def draft_model(config: DraftModelConfig, host: Host) -> Capabilities:
    spec = config.model.facts() or config.model.target().spec(config.model.config)
    return Capabilities(
        provides={"drafts": True},
        requires=(_EXACT_LENGTHS,),
        lacks=("a draft model without attention windows",) if any(spec.windows) else (),
    )


def eagle(config: HeadFiles, host: Host) -> Capabilities:
    return Capabilities(provides={"drafts": True}, requires=(_EXACT_LENGTHS,))


eagle3 = eagle


def medusa(config: MedusaConfig, host: Host) -> Capabilities:
    return Capabilities(provides={"drafts": True})
