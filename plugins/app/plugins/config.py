"""Options of the app `plugins`."""

from __future__ import annotations

from typing import Literal

from dovetail.core.compose import AppConfig


class PluginsConfig(AppConfig):
    kind: str | None = None
    """Show components of this kind only; null: all."""
    format: Literal["table", "json"] = "table"
    """For people or for programs."""
