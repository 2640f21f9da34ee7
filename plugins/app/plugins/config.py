"""Options of the app `plugins`."""

from __future__ import annotations

from typing import Literal

from dovetail.core.compose import AppConfig


class PluginsConfig(AppConfig):
    """List every component with its options, capabilities, package and version, all variants, presets and tuning
    tables, and what cannot be used with the reason."""

    kind: str | None = None
    """Show only this kind, or only the presets (`preset`); null: all."""
    package: str | None = None
    """Show only what this package provides, and what of it cannot be used; null: all."""
    format: Literal["table", "json"] = "table"
    """Output format."""
