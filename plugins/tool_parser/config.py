"""Options of the built-in tool parsers. The formats have no parameters."""

from __future__ import annotations

from dovetail.core.compose import Config


class HarmonyConfig(Config):
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`: gpt-oss."""


class HermesConfig(Config):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 and later, Qwen 2.5 and 3."""


class Llama3Config(Config):
    """`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`: Llama 3.1 and later."""


class MistralConfig(Config):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]name[ARGS]{...}` of newer tokenizers."""


class NoneConfig(Config):
    """Every output is content."""
