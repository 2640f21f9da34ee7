"""Capabilities of the built-in drafters."""

from __future__ import annotations

from dovetail.core.compose import Capabilities, Host
from dovetail.plugins.spec_decode.config import NgramConfig, NoneConfig


def none(config: NoneConfig, host: Host) -> Capabilities:
    return Capabilities(provides={"drafts": False})


def ngram(config: NgramConfig, host: Host) -> Capabilities:
    return Capabilities(provides={"drafts": True})
