"""Capabilities of the built-in drafters."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host, Requires
from dovetail.plugins.spec_decode.config import DraftModelConfig, NgramConfig, NoneConfig


def none(config: NoneConfig, host: Host) -> Capabilities:
    return Capabilities(provides={"drafts": False})


def ngram(config: NgramConfig, host: Host) -> Capabilities:
    return Capabilities(provides={"drafts": True})


def draft_model(config: DraftModelConfig, host: Host) -> Capabilities:
    spec = config.model.facts() or config.model.target().spec(config.model.config)
    lengths = "it feeds the draft model tokens that the host does not count"
    return Capabilities(
        provides={"drafts": True},
        requires=(Requires(kind="attention", key="exact_lengths", allowed=("device",), reason=lengths),),
        lacks=("a draft model without attention windows",) if any(spec.windows) else (),
    )
