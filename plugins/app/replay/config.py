"""Options of the app `replay`."""

from __future__ import annotations

from typing import ClassVar

from dovetail.core.compose import ENGINE_NODES, AppConfig


class ReplayConfig(AppConfig):
    """Repeat a recording of an engine (engine.record) without a device, with the recorded scheduler and KV allocator or
    with others, or on several replicas. Parts that are not on the command line are the recorded ones."""

    needs: ClassVar[tuple[str, ...]] = ENGINE_NODES

    path: str
    """The recording."""
    trace: str | None = None
    """Write the recorded steps as a timeline for ui.perfetto.dev or chrome://tracing to this JSON file."""
    out: str | None = None
    """Write the figures and the first difference to this JSON file."""
