"""Options of the built-in reasoning parsers."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class NoneConfig(Config):
    """Every output is content."""


class ThinkConfig(Config):
    """`<think>reasoning</think>answer`: DeepSeek-R1, Qwen 3, QwQ."""

    open: str = Field("<think>", min_length=1)
    """Mark that opens the reasoning, at the beginning of the output or at the end of the prompt."""
    close: str = Field("</think>", min_length=1)
    """Mark that ends it."""
    always: bool = False
    """The output begins with reasoning even if neither it nor the prompt has the opening mark."""
