"""Options of the built-in drafters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dovetail.core.compose import Config, Part, Selected


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


class DraftModelConfig(Config):
    """Drafts by a smaller model with the same vocabulary, which has KV pages of its own."""

    lookahead: int = Field(4, ge=1, le=16)
    """Draft tokens per sequence and step; each is a pass of the draft model."""
    verify: Literal["draws", "rejection", "typical"] = "draws"
    """How drafts of requests that are not greedy are verified. draws: by comparison with plain sampling's draws, so the
    text is the same as without drafts. rejection: accepts more at high temperatures; the same distribution, but other
    text for a seed. typical: not lossless."""
    model: Selected = Part("model", default="tiny_draft")
    """The draft model: `model@spec_decode.model=llama spec_decode.model.path=<model folder>`."""
    quant: Selected = Part("quant", default="auto")
    """Quantizer of the draft model; auto: the one that reads its checkpoint."""
