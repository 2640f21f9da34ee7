"""Options of the app `plugins`."""

from __future__ import annotations

from typing import Literal

from dovetail.core.compose import AppConfig


class PluginsConfig(AppConfig):
    """Every component with its options, capabilities, package and version, the variants and presets, and what cannot be
    used and why."""

    kind: str | None = None
    """Show what is of this kind only, or the presets (`preset`); null: all."""
    package: str | None = None
    """Show what this package brings, and what of it cannot be used; null: all."""
    format: Literal["table", "json"] = "table"
    """For people or for programs."""
