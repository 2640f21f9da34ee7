"""The four plugin hooks. They are called once, while composing; no step calls a hook."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from dovetail.core.compose.component import Component

PROJECT = "dovetail"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def dovetail_components() -> Iterable[Component]:  # type: ignore[empty-body]
    """Return all components of this package."""


@hookspec
def dovetail_config_dirs() -> Iterable[str]:  # type: ignore[empty-body]
    """Return folders with presets and variants, as "pkg://acme_dovetail.conf", laid out like Dovetail's conf/."""


@hookspec
def dovetail_tuning_tables() -> Iterable[str]:  # type: ignore[empty-body]
    """Return tuning tables of this package, as "pkg://acme_dovetail/tables/h100.json". An engine reads them when it
    starts on a GPU."""


@hookspec
def dovetail_checkpoint_readers() -> Iterable[str]:  # type: ignore[empty-body]
    """Return classes that read model files, as "acme_dovetail.archive:ArchiveCheckpoint". Each is a subclass of
    dovetail.core.interfaces.Checkpoint and is imported when a model is opened."""
