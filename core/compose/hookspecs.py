"""The two hooks. They are called once, while composing; nothing in a step calls a hook."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from dovetail.core.compose.component import Component

PROJECT = "dovetail"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def dovetail_components() -> Iterable[Component]:  # type: ignore[empty-body]
    """Everything that this package adds."""


@hookspec
def dovetail_config_dirs() -> Iterable[str]:  # type: ignore[empty-body]
    """Folders with presets and variants, as "pkg://acme_dovetail.conf"; laid out like Dovetail's own conf/."""
