"""Capabilities of the built-in drafters."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host, Requires
from dovetail.plugins.spec_decode.config import (
    DrafterOptions,
    DraftModelConfig,
    HeadFiles,
    LayerSkipConfig,
    MedusaConfig,
    MTPConfig,
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


def _drafts(config: DrafterOptions) -> dict[str, bool]:
    return {"drafts": True, "simulated_acceptance": bool(config.simulated_rates)}


def none(config: NoneConfig, host: Host) -> Capabilities:
    return Capabilities(provides={"drafts": False})


def ngram(config: NgramConfig, host: Host) -> Capabilities:
    return Capabilities(provides=_drafts(config))


def suffix(config: SuffixConfig, host: Host) -> Capabilities:
    return Capabilities(provides=_drafts(config))


def draft_model(config: DraftModelConfig, host: Host) -> Capabilities:
    return Capabilities(
        provides=_drafts(config),
        requires=(_EXACT_LENGTHS,),
        lacks=("a draft model without attention windows",) if any(config.spec().windows) else (),
    )


def layer_skip(config: LayerSkipConfig, host: Host) -> Capabilities:
    skips = Requires(kind="model", key="skips_layers", allowed=(True,), reason="it drafts with some of the layers")
    return Capabilities(provides=_drafts(config), requires=(_EXACT_LENGTHS, skips))


def eagle(config: HeadFiles, host: Host) -> Capabilities:
    return Capabilities(provides=_drafts(config), requires=(_EXACT_LENGTHS,))


eagle3 = parallel = eagle


def medusa(config: MedusaConfig, host: Host) -> Capabilities:
    return Capabilities(provides=_drafts(config))


def mtp(config: MTPConfig, host: Host) -> Capabilities:
    layers = Requires(
        kind="model",
        key="mtp_layers",
        allowed=(1,),
        reason="it drafts with the checkpoint's layer for that, applied again",
    )
    return Capabilities(provides=_drafts(config), requires=(_EXACT_LENGTHS, layers))
