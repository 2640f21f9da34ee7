"""Options of the built-in reasoning parsers."""

from __future__ import annotations

from pydantic import Field

from dovetail.core.compose import Config


class HarmonyConfig(Config):
    """`<|channel|>analysis<|message|>reasoning<|end|>` before the messages of other channels: gpt-oss."""


class NoneConfig(Config):
    """Every output is content."""


class ThinkConfig(Config):
    """`<think>reasoning</think>answer`: DeepSeek-R1, Qwen 3, QwQ."""

    open: str = Field("<think>", min_length=1)
    """Tag that opens the reasoning, at the beginning of the output or at the end of the prompt."""
    close: str = Field("</think>", min_length=1)
    """Tag that closes the reasoning."""
    always: bool = False
    """Whether the output begins with reasoning even without an opening tag in the output or the prompt."""
