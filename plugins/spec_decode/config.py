"""Options of the built-in drafters."""

from __future__ import annotations

from pydantic import Field, model_validator

from dovetail.core.compose import Config


class NoneConfig(Config):
    """No speculation: one token per sequence and step."""


class NgramConfig(Config):
    """Drafts the tokens that followed the last earlier occurrence of the sequence's suffix (prompt lookup)."""

    lookahead: int = Field(4, ge=1, le=32)
    """Draft tokens per sequence and step."""
    min_match: int = Field(2, ge=1, le=16)
    """Shortest matching suffix, in tokens."""
    max_match: int = Field(4, ge=1, le=16)
    """Longest suffix compared, in tokens. Longer matches win, then later ones."""

    @model_validator(mode="after")
    def _ordered(self) -> NgramConfig:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match={self.min_match} is more than max_match={self.max_match}")
        return self
